"""The heap: growth and its failure, tensors that outlive their Buffer, statistics, scratch memory."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import Attempt, attempt, good_high_throughput, good_program
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import Program, check, execute
from ..support.ranks import run_ranks
from ..support.system import memfd_mappings, memfds
from .test_failures import fused

STATS = {
    "heap_bytes",
    "live_bytes",
    "live_blocks",
    "quarantined_bytes",
    "peak_bytes",
    "free_bytes",
    "segments",
    "largest_free_bytes",
    "ll_staging_bytes",
}
LARGE = Case("large", (1500, 900), hidden=1024)  # some 4 MiB of rows a rank


def large_program(path: str = "fused") -> Program:
    given = LARGE.inputs()
    calls = [Dispatch(given, path), Combine(0, weights=path != "layout only", biases=1)]
    calls += [CachedDispatch(0, LARGE.rows(3)), Combine(0, seed=2, weights=False, in_heap=False)]
    return Program(calls)


@pytest.fixture
def small_heap() -> Any:
    """Bounds the heap of the rank that calls it; in processes only, for the bound belongs to a process."""

    def bound(megabytes: float) -> None:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(int(megabytes * 2**20))

    return bound


def all_or_none(outcomes: list[Attempt], program: Program) -> bool:
    """True if all ranks finished, with right results; False if all raised an error of the library."""
    errors = [outcome.error for outcome in outcomes]
    if any(errors):
        assert all(isinstance(error, deep_moe.Error) for error in errors), f"some finished: {errors}"
        return False
    check(program, [outcome.value for outcome in outcomes])
    return True


@pytest.mark.parametrize("path", ["v1", "fused", "layout only"])
@pytest.mark.parametrize("megabytes", [0.25, 1.0, 3.0])
def test_heap_of_one_rank_that_cannot_grow(megabytes: float, path: str, small_heap: Any) -> None:
    """One rank's rows do not fit its bounded heap: all go by waves, or all raise; then small calls work."""
    program = large_program(path)

    def rank_main(comm: Any, rank: int) -> Any:
        if rank == 1:
            small_heap(megabytes)
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        tried = attempt(lambda: execute(program, rank, [buffer]))
        gc.collect()
        return tried, buffer.memory_stats(), execute(good_high_throughput(), rank, [buffer])

    results = run_ranks(rank_main, 2)
    finished = all_or_none([tried for tried, _, _ in results], program)
    assert finished or megabytes < 1.0, results[0][0].error
    assert results[1][1]["heap_bytes"] <= megabytes * 2**20, results[1][1]
    check(good_high_throughput(), [good for _, _, good in results])


def test_heap_filled_until_growth_fails(small_heap: Any) -> None:
    """Rank 1 holds all that its heap can be, so rows come by waves; when it lets go, all is as usual."""
    program = large_program()

    def rank_main(comm: Any, rank: int) -> Any:
        if rank == 1:
            small_heap(24)
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        held: list[torch.Tensor] = []
        full = None
        while rank == 1 and full is None:
            tried = attempt(lambda: buffer.empty((1 << 20,), torch.uint8))
            full = tried.error
            held += [tried.value.fill_(len(held))] if full is None else []
        stats = buffer.memory_stats()
        crowded = attempt(lambda: execute(program, rank, [buffer]))
        intact = all(bool((tensor == number).all()) for number, tensor in enumerate(held))
        held.clear()
        return full, stats, intact, crowded, execute(program, rank, [buffer])

    results = run_ranks(rank_main, 2)
    full, stats, intact, _, _ = results[1]
    assert isinstance(full, deep_moe.BufferTooSmallError) and isinstance(full, ValueError), full
    assert str(1 << 20) in str(full) or "1048576" in str(full), full
    assert intact and stats["live_bytes"] > 16 << 20, stats
    all_or_none([crowded for _, _, _, crowded, _ in results], program)
    check(program, [good for *_, good in results])


def test_low_latency_staging_that_cannot_grow(small_heap: Any) -> None:
    case = Case("low", (64, 64), hidden=4096)
    program = Program([LowLatencyDispatch(case.inputs(), 64), LowLatencyCombine(0)])

    def rank_main(comm: Any, rank: int) -> Any:
        if rank == 1:
            small_heap(0.25)
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        tried = attempt(lambda: execute(program, rank, [buffer]))
        return tried, execute(good_high_throughput(), rank, [buffer])

    results = run_ranks(rank_main, 2)
    all_or_none([tried for tried, _ in results], program)
    check(good_high_throughput(), [good for _, good in results])


def test_capacity_given_at_the_start_needs_no_growth() -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, 32 << 20, comm=comm, timeout=20)
        before = buffer.memory_stats()["heap_bytes"]
        good = execute(large_program(), rank, [buffer])
        return before, buffer.memory_stats()["heap_bytes"], buffer.num_nvl_bytes, good

    results = run_ranks(rank_main, 2)
    for before, after, attribute, _ in results:
        assert 32 << 20 <= before == after and attribute == 32 << 20
    check(large_program(), [good for *_, good in results])


def test_low_latency_size_hint_is_enough() -> None:
    case = Case("hint", (33, 20), hidden=1024)
    given = case.inputs()
    calls = [LowLatencyDispatch(given, 64, use_fp8=True, hook="late"), LowLatencyCombine(0, hook="late")]
    program = Program([*calls, LowLatencyDispatch(given, 64, hook="late"), LowLatencyCombine(2, hook="late")])

    def rank_main(comm: Any, rank: int) -> Any:
        size = deep_moe.Buffer.get_low_latency_rdma_size_hint(64, 1024, 2, 16)
        buffer = deep_moe.Buffer(None, 0, size, low_latency_mode=True, comm=comm, timeout=20)
        before = buffer.memory_stats()["ll_staging_bytes"]
        good = execute(program, rank, [buffer])
        return size, before, buffer.memory_stats()["ll_staging_bytes"], good

    results = run_ranks(rank_main, 2)
    for size, before, after, _ in results:
        assert size >= before == after > 0, (size, before, after)
    check(program, [good for *_, good in results])


def test_statistics_add_up_and_freed_memory_is_used_again(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        seen = [buffer.memory_stats()]
        tensor = buffer.empty((3, 1 << 20), torch.uint8)
        seen.append(buffer.memory_stats())
        del tensor
        seen.append(buffer.memory_stats())
        for _ in range(20):
            fused(buffer, LARGE.inputs())
        gc.collect()
        seen.append(buffer.memory_stats())
        return seen

    for start, one, freed, end in run_ranks(rank_main, 2, form=form):
        for stats in (start, one, freed, end):
            assert set(stats) == STATS and all(type(value) is int and value >= 0 for value in stats.values())
            assert stats["live_bytes"] + stats["free_bytes"] <= stats["heap_bytes"]
            assert stats["largest_free_bytes"] <= stats["free_bytes"]
            assert stats["live_bytes"] <= stats["peak_bytes"]
        assert one["live_blocks"] == start["live_blocks"] + 1
        assert one["live_bytes"] >= start["live_bytes"] + (3 << 20)
        assert freed["live_blocks"] == start["live_blocks"] and freed["live_bytes"] == start["live_bytes"]
        assert end["live_bytes"] == start["live_bytes"], "blocks are lost"
        assert end["heap_bytes"] < 64 << 20, "the memory of 20 exchanges was not used again"


@pytest.mark.parametrize("who", ["own", "peer"])
def test_tensors_outlive_destroy_on_either_side(who: str, form: str) -> None:
    """Received rows stay as they are when their Buffer, or the peer's, ends, and its process too."""
    before = LARGE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20, explicitly_destroy=True)
        sent = fused(buffer, before)
        own = buffer.empty((1000,), torch.float32).fill_(rank + 0.5)
        copies = sent[0].clone(), sent[1].clone(), sent[2].clone()
        comm.allgather(None)
        if rank == (0 if who == "own" else 1):
            buffer.destroy()
            del buffer
            gc.collect()
        comm.allgather(None)
        if rank == 1:
            return True  # and ends
        intact = all(torch.equal(one, two) for one, two in zip(sent[:3], copies, strict=True))
        sent[0].add_(1.0)  # and it can be written to
        return intact and bool((own == 0.5).all()) and torch.equal(sent[0], copies[0] + 1.0)

    assert run_ranks(rank_main, 2, form=form) == [True, True]


def test_nothing_is_left_when_the_last_tensor_dies() -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        before = memfds(), memfd_mappings()
        buffer = deep_moe.Buffer(None, 1 << 20, comm=comm, timeout=20)
        sent = fused(buffer, LARGE.inputs())
        comm.allgather(None)
        buffer.destroy()
        del buffer
        gc.collect()
        held = memfd_mappings()
        del sent
        gc.collect()
        return before, held, (memfds(), memfd_mappings())

    for before, held, after in run_ranks(rank_main, 2):
        assert held > before[1], "the tensors' memory is not what this test thinks it is"
        assert after == before, f"(descriptors, mappings) {before} before, {after} after"


def test_local_buffer_tensor_touches_nothing_else(form: str) -> None:
    """All of the scratch memory is overwritten while tensors live and between calls; nothing else changes."""

    def rank_main(comm: Any, rank: int) -> Any:
        size = deep_moe.Buffer.get_low_latency_rdma_size_hint(32, 256, 2, 8)
        buffer = deep_moe.Buffer(None, 1 << 20, size, True, comm=comm, timeout=20)
        sent = fused(buffer, LARGE.inputs())
        copy = sent[0].clone()
        views = [buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=rdma) for rdma in (False, True)]
        part = buffer.get_local_buffer_tensor(torch.float32, (4, 8), offset=64)
        for view in views:
            view.fill_(-1)
        good = execute(good_program(), rank, [buffer])
        again = buffer.get_local_buffer_tensor(torch.int8)
        kept = bool((views[0] == -1).all()) and again.data_ptr() == views[0].data_ptr()
        sizes = [view.numel() for view in views] == [1 << 20, size]
        shape = part.shape == (4, 8) and part.dtype == torch.float32 and bool(part.isnan().all())
        return sizes, shape, kept, torch.equal(copy, sent[0]), good

    results = run_ranks(rank_main, 2, form=form)
    for *flags, _ in results:
        assert flags == [True] * 4
    check(good_program(), [good for *_, good in results])


def test_empty_takes_shapes_and_types(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8]
        tensors = [buffer.empty(shape, dtype) for dtype in kinds for shape in ((0, 5), (3,), (2, 3, 4))]
        seen = [(tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) for tensor in tensors]
        aligned = all(tensor.data_ptr() % 128 == 0 for tensor in tensors if tensor.numel())
        buffer.record_stream(tensors[0], buffer.get_comm_stream())
        wrong = [attempt(lambda: buffer.empty((-1,), torch.int8)), attempt(lambda: buffer.empty((4,), "int"))]
        return seen, aligned, wrong

    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8]
    expected = [(shape, dtype, True) for dtype in kinds for shape in ((0, 5), (3,), (2, 3, 4))]
    for seen, aligned, (negative, other) in run_ranks(rank_main, 1, form=form):
        assert seen == expected and aligned
        negative.must_be(ValueError, "shape|extent|-1")
        other.must_be(TypeError, "dtype")
