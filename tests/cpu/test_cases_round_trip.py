"""Hostile inputs that are a matter of shapes and routes: whole exchanges, in both modes and forms.

Each test's id begins with the row's id. A row is data in HIGH_THROUGHPUT or LOW_LATENCY; add one there.
"""

from __future__ import annotations

import time

import pytest
import torch

from ..support.compare import one_rounding, within
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import BufferOptions, Program, run

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = (bf16, fp16, fp32)


def two(**changes: object) -> Case:
    """The list's usual shape: two ranks, bf16, H=512, E=16, K=4, here with 33 and 20 tokens."""
    return Case("", (33, 20)).but(**changes)


ROUND_TRIPS = [
    two(name="Z1-one-rank-empty", tokens=(16, 0)),
    two(name="Z2-both-ranks-empty", tokens=(0, 0)),
    two(name="Z3-one-rank-receives-nothing", routing="rank0"),
    two(name="Z5-one-token", tokens=(1, 1)),
    two(name="Z5-one-of-eight-selects", tokens=(1,) * 8, routing="lone"),
    two(name="M1-nothing-selected", routing="none"),
    two(name="M2-none-among-valid", routing="mixed"),
    two(name="M4-duplicates", routing="repeated"),
    two(name="M5-half-of-the-rows-go-nowhere", routing="half"),
    *(two(name=f"K1-topk{k}", topk=k, experts=40) for k in (1, 10, 14, 16, 22, 32)),
    *(two(name=f"H1-hidden{h}", hidden=h, tokens=(9, 4)) for h in (2880, 1536, 2688, 3072, 6144)),
    two(name="E1-9-experts-2-ranks", experts=9),
    two(name="E1-60-experts-8-ranks", experts=60, tokens=(5, 3, 4, 2, 0, 7, 1, 6)),
    two(name="E1-30-experts-8-ranks", experts=30, tokens=(5, 3, 4, 2, 0, 7, 1, 6)),
    two(name="E1-fewer-experts-than-ranks", experts=3, tokens=(5, 3, 4, 2, 0), topk=2),
    *(two(name=f"R1-{r}-ranks", tokens=tuple(range(3, 3 + r))) for r in (1, 3, 5, 6, 12)),
    *(two(name=f"U2-{t}-tokens", tokens=(t, t)) for t in (63, 65, 672)),
    two(name="skew-hot-expert", routing="hot"),
    two(name="skew-zipf", routing="skewed"),
    two(name="type-fp16", dtype=fp16),
    two(name="type-fp32", dtype=fp32),
]

HIGH_THROUGHPUT = [
    *ROUND_TRIPS,
    two(name="Z4-fp8-and-one-rank-receives-nothing", routing="rank0", payload="fp8"),
    *(
        two(name=f"H1-fp8-hidden{h}", hidden=h, payload="fp8", tokens=(9, 4))
        for h in (1536, 2688, 3072, 6144)
    ),
    two(name="U1-1-and-4095", tokens=(1, 4095)),
    two(name="U2-4095-tokens", tokens=(4095, 4095), hidden=128),
    two(name="D2-int32-ids", idx_dtype=torch.int32),
    two(name="D4-scales-row-major", payload="fp8"),
    two(name="D4-scales-column-major", payload="fp8_columns"),
    two(name="D4-scales-column-major-empty-rank", payload="fp8_columns", tokens=(16, 0)),
    two(name="D4-packed-ue8m0-scales", payload="ue8m0"),
    two(name="D4-one-scale-a-row", payload="one_scale"),
    two(name="D4-opaque-bytes", payload="opaque"),
    two(name="W3-combine-of-8", topk=8),
]

# Hidden sizes that are whole blocks of 128 are sent as fp8 too.
LOW_LATENCY = [
    *ROUND_TRIPS,
    two(name="D2-int32-ids", idx_dtype=torch.int32),
    two(name="D4-fp8-rows-with-scales", payload="fp8"),
    two(name="D4-packed-ue8m0-scales", payload="ue8m0"),
    two(name="D4-opaque-bytes", payload="opaque"),
]


def high_throughput(case: Case) -> Program:
    """The V1 sequence and the fused one, cached dispatch with other rows, combine with and without extras."""
    given = case.inputs()
    return Program(
        [
            Dispatch(given),
            Combine(0),
            CachedDispatch(0, case.rows(1)),
            Dispatch(given, path="fused", alignment=16),
            Combine(3, seed=1, weights=False, biases=2, in_heap=True),
            Combine(0, seed=2, biases=1, out=True),
        ]
    )


def low_latency(case: Case) -> Program:
    """Rows as they are, fp8, logarithms; with and without hooks; summed before the link and behind it."""
    given, cap = case.inputs(), max(*case.tokens, 1)
    fp8 = case.payload == "plain" and case.hidden % 128 == 0
    ue8m0 = case.payload == "plain" and case.hidden % 512 == 0
    logfmt = case.hidden % 128 == 0
    return Program(
        [
            LowLatencyDispatch(given, cap),
            LowLatencyCombine(0),
            LowLatencyDispatch(given, cap + 3, use_fp8=fp8, hook="now"),
            LowLatencyCombine(2, seed=1, hook="late"),
            LowLatencyDispatch(
                given, cap, use_fp8=fp8, round_scale=fp8, use_ue8m0=ue8m0, weights=True, hook="late"
            ),
            LowLatencyCombine(4, seed=2, hook="now", out=True),
            LowLatencyCombine(0, seed=3, logfmt=logfmt, out=True),
            LowLatencyCombine(2, seed=4, logfmt=logfmt, hook="late"),
            LowLatencyCombine(4, seed=5, logfmt=logfmt),
        ]
    )


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_high_throughput(case: Case, form: str) -> None:
    run(high_throughput(case), case.ranks, form)


@pytest.mark.parametrize("case", LOW_LATENCY, ids=str)
def test_low_latency(case: Case, form: str) -> None:
    run(low_latency(case), case.ranks, form)


def test_z2_with_no_tokens_returns_at_once(form: str) -> None:
    case = two(name="Z2", tokens=(0, 0))
    calls = [Dispatch(case.inputs()), Combine(0), LowLatencyDispatch(case.inputs(), 8), LowLatencyCombine(2)]
    run(Program(calls), 2, form)  # the ranks are there from now on
    started = time.monotonic()
    run(Program(calls), 2, form)
    assert time.monotonic() - started < 2.0


def test_m1_sums_are_zero_on_memory_that_was_used(form: str) -> None:
    """Rows of an earlier exchange lie in the heap and in the staging when nothing is selected."""
    full, none = two(name="full"), two(name="none", routing="none")
    calls = []
    for case in (full, none, full, none):
        at = len(calls)
        calls += [Dispatch(case.inputs()), Combine(at), LowLatencyDispatch(case.inputs(), 33)]
        calls += [LowLatencyCombine(at + 2, hook="now")]
    results = run(Program(calls), 2, form)
    for rank, tokens in enumerate(none.tokens):
        zeros = torch.zeros(tokens, 512, dtype=bf16)
        for call in (5, 7, 13, 15):
            assert torch.equal(results[rank][call]["x"], zeros)


@pytest.mark.parametrize("path", ["v1", "fused"])
def test_m4_weights_of_a_repeated_expert_are_both_kept(path: str, form: str) -> None:
    case = two(name="M4", tokens=(2, 1), topk=3)
    given = case.inputs()
    for idx, weights in zip(given.topk_idx, given.topk_weights, strict=True):
        idx[:], weights[:] = torch.tensor([3, 3, 9]), torch.tensor([0.25, 0.75, 0.5])
    results = run(Program([Dispatch(given, path=path), Combine(0)]), 2, form)
    first, second = results[0][0], results[1][0]
    assert first["idx"].tolist() == [[3, 3, -1]] * 3 and second["idx"].tolist() == [[-1, -1, 1]] * 3
    assert first["weights"].tolist() == [[0.25, 0.75, 0.0]] * 3
    assert first["counts"] == [0, 0, 0, 6, 0, 0, 0, 0]
    assert results[1][1]["weights"].tolist() == [[0.25, 0.75, 0.5]]


def test_m5_rows_that_go_nowhere_cost_nothing(form: str) -> None:
    case = two(name="M5", tokens=(64, 64), routing="half")
    given = case.inputs()
    results = run(Program([Dispatch(given), LowLatencyDispatch(given, 64)]), 2, form)
    for rank in range(2):
        reached = sum(int(((idx >= 8 * rank) & (idx < 8 * rank + 8)).any(1).sum()) for idx in given.topk_idx)
        assert len(results[rank][0]["x"]) == reached <= 64
        entries = sum(int(((idx >= 8 * rank) & (idx < 8 * rank + 8)).sum()) for idx in given.topk_idx)
        assert int(results[rank][1]["count"].sum()) == entries


def test_u1_sizes_change_on_one_buffer(form: str) -> None:
    cases = [
        two(name="large", tokens=(4096, 1234)),
        two(name="other", tokens=(100, 5000)),
        two(name="skewed", tokens=(1, 4095)),
        two(name="small", tokens=(3, 0)),
    ]
    calls = []
    for case in cases:
        calls += [Dispatch(case.inputs(), path="fused"), Combine(len(calls))]
    run(Program(calls), 2, form)


def test_b3_two_buffers_are_independent(form: str) -> None:
    one, other = two(name="one").inputs(), two(name="other", tokens=(5, 40), hidden=1024, experts=10).inputs()
    calls = [
        Dispatch(one, buffer=0),
        Dispatch(other, buffer=1),
        Combine(1, buffer=1),
        Combine(0, buffer=0),
        Dispatch(other, buffer=1),
        LowLatencyDispatch(one, 33, buffer=0, hook="late"),
        LowLatencyDispatch(other, 40, buffer=1, hook="late"),
        Combine(4, buffer=1),
        LowLatencyCombine(6, buffer=1),
        LowLatencyCombine(5, buffer=0),
        Dispatch(one, buffer=0),
        Combine(10, buffer=0),
    ]
    run(Program(calls, [BufferOptions(), BufferOptions(1 << 20, 1 << 20)]), 2, form)


@pytest.mark.parametrize("path", ["v1", "fused"])
def test_g1_no_sync_dispatch_pads_its_tail(path: str, form: str) -> None:
    """The CPU's half of the row: new ids, then no tokens at all, then few, into results of a fixed size."""
    calls = []
    for tokens, seed in (((30, 34), 0), ((30, 34), 1), ((0, 0), 2), ((3, 0), 3)):
        given = two(name="G1", tokens=tokens, seed=seed, routing="mixed").inputs()
        calls += [Dispatch(given, path, worst=64), Combine(len(calls), in_heap=True)]
    results = run(Program(calls), 2, form)
    for of_rank in results:
        for call in of_rank[::2]:
            real = int((call["idx"] >= 0).any(1).sum())
            assert call["idx"].shape == (64, 4) and bool((call["idx"][real:] == -1).all())
            assert bool((call["weights"][real:] == 0).all()) and call["counts"] == []


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_w3_sums_are_within_one_rounding_of_exact_ones(dtype: torch.dtype, form: str) -> None:
    """Against sums in float64 of the same rows, in no particular order."""
    case = two(name="W3", tokens=(50, 40, 60, 30), topk=8, dtype=dtype)
    given, back = case.inputs(), Combine(0)
    results = run(Program([Dispatch(given), back]), 4, form)
    sent = [result[0]["in rank"] for result in results]
    for source in range(4):
        exact = torch.zeros(case.tokens[source], case.hidden, dtype=torch.float64)
        magnitude = torch.zeros_like(exact)
        for rank in range(4):
            rows = back.rows(rank, sum(int(one[:, rank].sum()) for one in sent), case.hidden, dtype)
            first = sum(int(one[:, rank].sum()) for one in sent[:source])
            mine = rows[first : first + int(sent[source][:, rank].sum())].double()
            exact[sent[source][:, rank]] += mine
            magnitude[sent[source][:, rank]] += mine.abs()
        allowed = one_rounding(dtype, exact) + magnitude * 2.0**-22
        within(results[source][1]["x"], exact.to(dtype), allowed * 2, f"rank {source}")


@pytest.mark.parametrize("path", ["v1", "fused", "layout only"])
def test_w2_results_repeat_and_do_not_depend_on_others(path: str, form: str) -> None:
    """The same input gives the same bits; rank 0's own rows are the same whatever rank 1 sends."""
    case = two(name="W2", topk=8)
    given, other = case.inputs(), case.but(seed=9).inputs()
    for part in ("x", "topk_idx", "topk_weights"):
        getattr(other, part)[0] = getattr(given, part)[0]
    weights = path != "layout only"
    calls = [Dispatch(given, path), Combine(0, weights=weights), Dispatch(given, path)]
    calls += [Combine(2, weights=weights), Dispatch(other, path)]
    results = run(Program(calls), 2, form)
    for of_rank in results:
        assert torch.equal(of_rank[0]["x"], of_rank[2]["x"]) and torch.equal(of_rank[1]["x"], of_rank[3]["x"])
    own = int(results[0][0]["in rank"][:, 0].sum())
    assert torch.equal(results[0][0]["x"][:own], results[0][4]["x"][:own])
