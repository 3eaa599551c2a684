"""Hostile inputs that must be refused: by an error that says what is wrong, on every rank, with no harm done.

In every test rank 1 (or every rank) makes a bad call. It raises ValueError or TypeError that names the
argument; its peers raise PeerRefusedError with its rank and its reason, at once; and then the same Buffers
make a good exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import attempt, good_program, words
from ..support.device import where
from ..support.inputs import Case, random_rows, rng
from ..support.program import check, execute
from ..support.ranks import run_ranks

CASE = Case("refused", (12, 12))
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    name: str
    call: str
    change: Callable[[Arguments], Any]  # makes the good arguments bad
    error: type[Exception]
    says: tuple[Any, ...]  # words of the error
    by_all: bool = False

    def __str__(self) -> str:
        return self.name


def put(**values: Any) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.update(values)


def with_id(value: int) -> Callable[[Arguments], Any]:
    def change(arguments: Arguments) -> None:
        arguments["topk_idx"][5, 2] = value

    return change


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def as_type(name: str, dtype: torch.dtype) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.update({name: arguments[name].to(dtype)})


def transposed(name: str) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.update({name: arguments[name].t().contiguous().t()})


def every_second_column(arguments: Arguments) -> None:
    arguments["x"] = rows(12, 1024)[:, ::2]


def longer(*names: str) -> Callable[[Arguments], Any]:
    return lambda arguments: arguments.update({name: torch.cat([arguments[name]] * 2) for name in names})


HT, HT_BACK, LL, LL_BACK = "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"
pair, unwritten = torch.float8_e4m3fn, torch.float64

REFUSALS = [
    *(
        Refusal(f"M3-id{bad}-{call}", call, with_id(bad), ValueError, ("topk_idx", bad, 5))
        for bad in (16, 23, -2)
        for call in (HT, LL)
    ),
    Refusal("H2-hidden7", HT, put(x=rows(12, 7)), ValueError, ("x", 14, 16), by_all=True),
    Refusal("H2-hidden100", HT, put(x=rows(12, 100)), ValueError, ("x", 200, 16), by_all=True),
    Refusal("H2-hidden7-ll", LL, put(x=rows(12, 7), use_fp8=False), ValueError, ("x", 14, 16), by_all=True),
    Refusal(
        "D1-ids-float-ht", HT, as_type("topk_idx", torch.float32), TypeError, ("topk_idx", "int64", "int32")
    ),
    Refusal(
        "D1-ids-float-ll", LL, as_type("topk_idx", torch.float32), TypeError, ("topk_idx", "int64", "int32")
    ),
    Refusal("D1-x-int8-ht", HT_BACK, as_type("x", torch.int8), TypeError, ("x", "int8", "bfloat16")),
    Refusal("D1-x-float64-ht", HT_BACK, as_type("x", unwritten), TypeError, ("x", "float64", "bfloat16")),
    Refusal("D1-x-int8-ll", LL_BACK, as_type("x", torch.int8), TypeError, ("x", "int8", "bfloat16")),
    Refusal("D1-x-float64-ll", LL_BACK, as_type("x", unwritten), TypeError, ("x", "float64", "bfloat16")),
    Refusal(
        "D1-weights-float64", HT, as_type("topk_weights", unwritten), TypeError, ("topk_weights", "float32")
    ),
    Refusal("D3-x-transposed-ht", HT, transposed("x"), ValueError, ("x", r"contiguous()")),
    Refusal("D3-x-every-second-column-ht", HT, every_second_column, ValueError, ("x", r"contiguous()")),
    Refusal("D3-x-transposed-ll", LL, transposed("x"), ValueError, ("x", r"contiguous()")),
    Refusal("D3-ids-transposed", HT, transposed("topk_idx"), ValueError, ("topk_idx", r"contiguous()")),
    Refusal(
        "D4-scales-wrong-rows",
        HT,
        put(x=(rows(12, 512, dtype=pair), torch.ones(11, 4))),
        ValueError,
        (11, 12),
    ),
    Refusal(
        "D4-scales-3d", HT, put(x=(rows(12, 512, dtype=pair), torch.ones(12, 2, 2))), ValueError, ("scales",)
    ),
    Refusal("U4-over-the-cap", LL, put(num_max_dispatch_tokens_per_rank=11), ValueError, (11, 12)),
    Refusal("x-no-tensor", HT, put(x=[[1.0]]), TypeError, ("x",)),
    Refusal("x-1d", HT, put(x=rows(512)), ValueError, ("x",)),
    Refusal("ids-of-other-rows", HT, longer("topk_idx", "topk_weights"), ValueError, (24, 12)),
    Refusal("weights-of-other-rows", HT, longer("topk_weights"), ValueError, ("topk_weights", 24, 12)),
    Refusal("alignment-0", HT, put(expert_alignment=0), ValueError, ("expert_alignment", 0)),
    Refusal("worst-negative", HT, put(num_worst_tokens=-1), ValueError, ("num_worst_tokens", -1)),
    Refusal(
        "expert-major-worst",
        HT,
        put(expert_major=True, num_worst_tokens=1 << 30),
        ValueError,
        ("num_worst_tokens", 1 << 30, "expert_major", (1 << 31) - 1),
    ),
    Refusal("no-experts", HT, put(num_experts=0), ValueError, ("num_experts", 0)),
    Refusal("no-layout", HT, put(num_experts=None), ValueError, ("num_experts",)),
    Refusal("config-of-other-type", HT, put(config={"num_sms": 20}), TypeError, ("config", "dict")),
    Refusal("event-of-other-type", HT, put(previous_event=5), TypeError, ("previous_event", "int")),
    Refusal("comm-stream-alone", HT, put(allocate_on_comm_stream=True), ValueError, ("previous_event",)),
    Refusal("too-few-rows", HT_BACK, lambda a: a.update(x=a["x"][:-1]), ValueError, ("x",)),
    Refusal(
        "row-weights-and-plain-rows",
        HT_BACK,
        put(row_weights=torch.zeros(3)),
        ValueError,
        ("row_weights", 3, "expert-major"),
    ),
    Refusal("bias-of-other-rows", HT_BACK, put(bias=rows(11, 512)), ValueError, ("bias", 11, 12)),
    Refusal("bias-of-other-type", HT_BACK, put(bias=torch.zeros(12, 512)), TypeError, ("bias", "float32")),
    Refusal("three-biases", HT_BACK, put(bias=(rows(12, 512),) * 3), TypeError, ("bias",)),
    Refusal("out-of-other-shape", HT_BACK, put(out=rows(12, 256)), ValueError, ("out",)),
    Refusal("handle-of-other-mode", HT_BACK, put(handle=(torch.zeros(2, 2),) * 4), TypeError, ("handle",)),
    Refusal("fp8-hidden192", LL, put(x=rows(12, 192), use_fp8=True), ValueError, (192, 128)),
    Refusal(
        "ue8m0-hidden640", LL, put(x=rows(12, 640), use_fp8=True, use_ue8m0=True), ValueError, (640, 512)
    ),
    Refusal(
        "async-and-hook", LL, put(async_finish=True, return_recv_hook=True), ValueError, ("async_finish",)
    ),
    Refusal("x-float64", LL, as_type("x", unwritten), TypeError, ("x", "float64", "bfloat16")),
    Refusal(
        "stats-of-other-type",
        LL,
        put(cumulative_local_expert_recv_stats=torch.zeros(8)),
        TypeError,
        ("cumulative_local_expert_recv_stats", "int32"),
    ),
    Refusal(
        "stats-of-other-length",
        LL,
        put(cumulative_local_expert_recv_stats=torch.zeros(7, dtype=torch.int32)),
        ValueError,
        ("cumulative_local_expert_recv_stats", 7, 8),
    ),
    Refusal("rows-of-other-shape", LL_BACK, put(x=rows(8, 25, 512)), ValueError, ("x",)),
    Refusal(
        "weights-float64", LL_BACK, as_type("topk_weights", unwritten), TypeError, ("topk_weights", "float32")
    ),
    Refusal(
        "logfmt-and-zero-copy", LL_BACK, put(use_logfmt=True, zero_copy=True), ValueError, ("use_logfmt",)
    ),
    Refusal("ll-out-of-other-type", LL_BACK, put(out=torch.zeros(12, 512)), TypeError, ("out", "float32")),
]


def good_arguments(buffer: deep_moe.Buffer, call: str) -> Arguments:
    """Arguments that the call takes; what has to go before a combine is done."""
    given = CASE.inputs()
    mine = given.x[buffer.rank], given.topk_idx[buffer.rank], given.topk_weights[buffer.rank]
    x, idx, weights = (where(buffer, one) for one in mine)
    if call == HT:
        return {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": 16}
    if call == HT_BACK:
        received = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=16)
        return {"x": received[0], "handle": received[4], "topk_weights": received[2]}
    to_low_latency = {
        "x": x,
        "topk_idx": idx,
        "num_max_dispatch_tokens_per_rank": 12,
        "num_experts": 16,
        "use_fp8": False,
    }
    if call == LL:
        return to_low_latency
    sent = buffer.low_latency_dispatch(**to_low_latency)
    return {"x": sent[0], "topk_idx": idx, "topk_weights": weights, "handle": sent[2]}


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_e2_bad_call_then_good_one(refusal: Refusal, form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        arguments = good_arguments(buffer, refusal.call)
        if rank == 1 or refusal.by_all:
            refusal.change(arguments)
        tried = attempt(lambda: getattr(buffer, refusal.call)(**arguments))
        tried.value = None
        return tried, execute(good_program(), rank, [buffer])

    (first, good0), (second, good1) = run_ranks(rank_main, 2, form=form)
    second.must_be(refusal.error, *words(*refusal.says))
    if refusal.by_all:
        first.must_be(refusal.error, *words(*refusal.says))
    else:
        first.must_be(deep_moe.PeerRefusedError, r"rank 1\b")
        assert str(second.error)[:60] in str(first.error), f"{second.error!r} is not told in {first.error!r}"
    assert max(first.seconds, second.seconds) < 5.0, "refused only after a wait"
    check(good_program(), [good0, good1])


@pytest.mark.parametrize("call", [HT, HT_BACK, LL, LL_BACK])
def test_e2_unknown_keywords_are_local(call: str, form: str) -> None:
    """A TypeError for an unknown keyword, by which programs probe for features, is no call at all."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        arguments = good_arguments(buffer, call)
        probes = 1 - rank  # on one rank only
        tried = [attempt(lambda: getattr(buffer, call)(**arguments, unheard_of=1)) for _ in range(probes)]
        return tried, execute(good_program(), rank, [buffer])

    (tried, good0), (_, good1) = run_ranks(rank_main, 2, form=form)
    tried[0].must_be(TypeError, "unheard_of")
    check(good_program(), [good0, good1])


def test_m3_layout_is_refused_locally() -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        idx = CASE.inputs().topk_idx[rank]
        idx[7, 1] = 99
        tried = attempt(lambda: buffer.get_dispatch_layout(idx, 16))
        wrong_type = attempt(lambda: buffer.get_dispatch_layout(idx.float(), 16))
        return tried, wrong_type, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2)
    for tried, wrong_type, _ in results:
        tried.must_be(ValueError, *words("topk_idx", 99, 7))
        wrong_type.must_be(TypeError, *words("topk_idx", "int64", "int32"))
    check(good_program(), [good for _, _, good in results])


def test_u3_caps_that_differ_are_named_on_both_ranks(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        given = CASE.inputs()
        cap = (128, 64)[rank]
        tried = attempt(
            lambda: buffer.low_latency_dispatch(given.x[rank], given.topk_idx[rank], cap, 16, use_fp8=False)
        )
        return tried, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, *words(128, 64))
    check(good_program(), [good for _, good in results])


@pytest.mark.parametrize("worst", ["one row too few", "zero rows to spare"])
def test_worst_tokens_too_small_is_refused_everywhere(worst: str, form: str) -> None:
    """The rows of rank 0's experts do not fit on rank 0: nobody sends anything, and everybody says so."""
    case = Case("worst", (16, 8), routing="rank0")
    limit = 24 - (worst == "one row too few")

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        given = case.inputs()
        tried = attempt(
            lambda: buffer.dispatch(
                given.x[rank], topk_idx=given.topk_idx[rank], num_experts=16, num_worst_tokens=limit
            )[3]
        )
        return tried, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for tried, _ in results:
        if worst == "one row too few":
            tried.must_be(ValueError, *words("num_worst_tokens", 23, 24))
        else:
            assert tried.value == []
    check(good_program(), [good for _, good in results])


def test_d3_rows_with_gaps_between_them_are_taken(form: str) -> None:
    """Every second row of a larger tensor, and a block of its columns, in both modes."""
    case = Case("D3", (10, 7))
    given = case.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        x, idx = given.x[rank], given.topk_idx[rank]
        wide = random_rows(rng(4), 2 * len(x), 1024, torch.bfloat16)
        gaps = wide[::2, 256:768].copy_(x)
        assert not gaps.is_contiguous()
        outcome = []
        for rows in (x, gaps):
            sent = buffer.dispatch(rows, topk_idx=idx, num_experts=16)
            back = buffer.combine(sent[0], sent[4])
            low = buffer.low_latency_dispatch(rows, idx, 10, 16)
            used = torch.arange(20) < low[1].unsqueeze(1)
            outcome.append((sent[0], back[0], low[0][0].float()[used], low[0][1][used]))
        return outcome

    for plain, gaps in run_ranks(rank_main, 2, form=form):
        assert all(torch.equal(one, other) for one, other in zip(plain, gaps, strict=True))
