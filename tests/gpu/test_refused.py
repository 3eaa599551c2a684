"""Calls that must be refused, on a GPU: those of the CPU's list, then a good exchange on the same Buffer.

A peer whose call waits for nothing learns of a refusal with the next look at its Buffer, here check().
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu.test_cases_refused import HT, REFUSALS, good_arguments
from ..support.attempts import attempt, good_high_throughput, good_program, words
from ..support.gpu import World, on_gpu
from ..support.inputs import Case, random_rows, rng
from ..support.program import check, execute

pytestmark = pytest.mark.gpus(1)

TWO = World("thread", 2)
MINE = {refusal.name: refusal for refusal in REFUSALS if refusal.name != "handle-of-other-mode"}


def job_refusal(comm: Any, rank: int, name: str) -> Any:
    refusal = MINE[name]
    if name.startswith("M3"):
        os.environ["DEEP_MOE_CHECK"] = "1"
    comm.allgather(None)
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    comm.allgather(None)
    os.environ.pop("DEEP_MOE_CHECK", None)
    arguments = good_arguments(buffer, refusal.call)
    if rank == 1 or refusal.by_all:
        refusal.change(arguments)

    def call() -> None:
        getattr(buffer, refusal.call)(**{key: on_gpu(value) for key, value in arguments.items()})
        torch.cuda.current_stream().synchronize()
        buffer.check()

    return attempt(call), execute(good_program(), rank, [buffer])


@pytest.mark.parametrize("name", MINE)
def test_e2_bad_call_then_good_one(name: str) -> None:
    refusal = MINE[name]
    (first, good0), (second, good1) = TWO.run(job_refusal, name)
    second.must_be(refusal.error, *words(*refusal.says))
    if refusal.by_all:
        first.must_be(refusal.error, *words(*refusal.says))
    else:
        first.must_be(deep_moe.PeerRefusedError, r"rank 1\b")
        assert str(second.error)[:60] in str(first.error), f"{second.error!r} is not told in {first.error!r}"
    assert max(first.seconds, second.seconds) < 5.0, "refused only after a wait"
    check(good_program(), [good0, good1])


def job_one_refuses(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    arguments = good_arguments(buffer, HT)
    if rank == 1:
        arguments["x"] = arguments["x"][:, :100]
    tried = attempt(lambda: buffer.dispatch(**{key: on_gpu(value) for key, value in arguments.items()}))
    tried.value = None
    return tried, execute(good_high_throughput(), rank, [buffer])


def test_e2_between_processes() -> None:
    (first, good0), (second, good1) = World("process", 2).run(job_one_refuses)
    first.must_be(deep_moe.PeerRefusedError, r"rank 1\b")
    second.must_be(ValueError, *words("x", 200, 16))
    check(good_high_throughput(), [good0, good1])


def job_worst(comm: Any, rank: int, work: tuple[int, bool]) -> Any:
    """Two calls in a row: the report of the first may come with the second."""
    limit, expert_major = work
    buffer = deep_moe.Buffer(None, 8 << 20, comm=comm, timeout=10)
    given = Case("worst", (16, 8), routing="rank0").inputs()
    guard = buffer.empty((1 << 16,), torch.uint8).fill_(7)

    def call() -> None:
        buffer.dispatch(
            on_gpu(given.x[rank]),
            topk_idx=on_gpu(given.topk_idx[rank]),
            num_experts=16,
            num_worst_tokens=limit,
            expert_major=expert_major,
        )
        torch.cuda.current_stream().synchronize()
        buffer.check()

    tried = attempt(call)
    intact = bool((guard == 7).all())
    return tried, intact, execute(good_high_throughput(), rank, [buffer])


@pytest.mark.parametrize("expert_major", [False, True], ids=["plain", "expert-major"])
@pytest.mark.parametrize("limit", [23, 24, 1])
def test_worst_tokens_too_small_is_refused_everywhere(limit: int, expert_major: bool, form: str) -> None:
    """The rows of rank 0's experts do not fit there: nobody writes past an end, and everybody says so."""
    results = World(form.removeprefix("gpu "), 2).run(job_worst, (limit, expert_major))
    for tried, intact, _ in results:
        assert intact
        if limit < 24:
            tried.must_be(ValueError, "num_worst_tokens", *words(limit, 24))
        else:
            assert tried.error is None, tried
    check(good_high_throughput(), [good for *_, good in results])


def job_gaps(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    given = Case("D3", (10, 7)).inputs()
    x, idx = on_gpu(given.x[rank]), on_gpu(given.topk_idx[rank])
    even, odd = (on_gpu(random_rows(rng(4), 2 * len(x), 1024, torch.bfloat16)) for _ in range(2))
    outcome = []
    for rows in (x, even[::2, 256:768].copy_(x), odd[::2, 257:769].copy_(x)):
        sent = buffer.dispatch(rows, topk_idx=idx, num_experts=16)
        outcome.append((sent[0], buffer.combine(sent[0], sent[4])[0]))
    return outcome


def test_d3_rows_with_gaps_between_them_are_taken() -> None:
    """Every second row of a larger tensor, and a block of its columns, also one at an odd address."""
    for plain, *others in TWO.run(job_gaps):
        for gaps in others:
            assert all(torch.equal(one, other) for one, other in zip(plain, gaps, strict=True))
