"""The heap on a GPU: growth and its failure, tensors freed by any thread, statistics, fragmentation."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu import test_memory as on_cpus
from ..cpu.test_failures import fused
from ..cpu.test_memory import STATS, all_or_none
from ..cpu.test_properties import PATHS
from ..support.attempts import attempt, good_high_throughput
from ..support.device import side_stream
from ..support.gpu import ONE, World, on_gpu
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import Program, check, execute
from .test_streams import LATE

pytestmark = pytest.mark.gpus(1)

MIB = 1 << 20
LARGE = Case("large", (4000, 2600), hidden=1024)  # some 12 MiB of rows a rank
TWO_PROCESSES = World("process", 2)


def large_program(path: str = "fused") -> Program:
    given = LARGE.inputs()
    calls = [Dispatch(given, path), Combine(0, weights=path != "layout only", biases=1)]
    calls += [CachedDispatch(0, LARGE.rows(3)), Combine(0, seed=2, weights=False)]
    return Program(calls)


def bounded(comm: Any, megabytes: float | None, num_bytes: int = 0) -> deep_moe.Buffer:
    """A Buffer whose heap on this rank grows no further; the bound belongs to a process."""
    if megabytes is not None:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(int(megabytes * MIB))
    buffer = deep_moe.Buffer(None, num_bytes, comm=comm, timeout=20)
    os.environ.pop("DEEP_MOE_MAX_HEAP_BYTES", None)
    return buffer


def job_cannot_grow(comm: Any, rank: int, work: tuple[float, str]) -> Any:
    megabytes, path = work
    buffer = bounded(comm, megabytes if rank == 1 else None)
    tried = attempt(lambda: execute(large_program(path), rank, [buffer]))
    gc.collect()
    return tried, buffer.memory_stats(), execute(good_high_throughput(), rank, [buffer])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("megabytes", [4, 12, 32])
def test_heap_of_one_rank_that_cannot_grow(megabytes: float, path: str) -> None:
    """One rank's rows do not fit its bounded heap: all go by waves, or all raise; then small calls work."""
    results = TWO_PROCESSES.run(job_cannot_grow, (megabytes, path))
    all_or_none([tried for tried, _, _ in results], large_program(path))
    assert results[1][1]["heap_bytes"] <= megabytes * MIB, results[1][1]
    check(good_high_throughput(), [good for _, _, good in results])


def job_spilled(comm: Any, rank: int, _: Any) -> Any:
    """Rows that came in waves, read late by another stream that has been recorded; then more come."""
    buffer, side = bounded(comm, 4 if rank == 1 else None), side_stream()
    rows = fused(buffer, LARGE.inputs())[0]
    wanted = rows.clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        copy = rows.clone()
    buffer.record_stream(rows, side)
    del rows
    other = fused(buffer, LARGE.but(seed=9).inputs())[0]
    side.synchronize()
    return copy, wanted, other


def test_record_stream_keeps_rows_that_came_in_waves() -> None:
    for copy, wanted, other in TWO_PROCESSES.run(job_spilled):
        assert torch.equal(copy, wanted) and not torch.equal(wanted, other)


def job_filled(comm: Any, rank: int, _: Any) -> Any:
    buffer = bounded(comm, 80 if rank == 1 else None)
    held: list[torch.Tensor] = []
    full = None
    while rank == 1 and full is None:
        tried = attempt(lambda: buffer.empty((MIB,), torch.uint8))
        full = tried.error
        held += [tried.value.fill_(len(held))] if full is None else []
    stats = buffer.memory_stats()
    crowded = attempt(lambda: execute(large_program(), rank, [buffer]))
    intact = all(bool((tensor == number).all()) for number, tensor in enumerate(held))
    held.clear()
    gc.collect()
    return full, stats, intact, crowded, execute(large_program(), rank, [buffer])


def test_heap_filled_until_growth_fails() -> None:
    """Rank 1 holds all that its heap can be; when it lets go, all is as usual."""
    results = TWO_PROCESSES.run(job_filled)
    full, stats, intact, _, _ = results[1]
    assert isinstance(full, deep_moe.BufferTooSmallError) and isinstance(full, ValueError), full
    assert str(MIB) in str(full), full
    assert intact and stats["live_bytes"] >= 32 * MIB, stats
    all_or_none([crowded for _, _, _, crowded, _ in results], large_program())
    check(large_program(), [good for *_, good in results])


def job_own_rows(comm: Any, rank: int, _: Any) -> Any:
    """Rows that a rank sends itself and, from an ordinary tensor, back; a heap with room for two of these."""
    buffer = deep_moe.Buffer(None, 96 * MIB, comm=comm, timeout=20)
    x = torch.randn(9 * 1024, 2048, device=buffer.device).bfloat16()
    idx = torch.full((len(x), 1), rank, device=buffer.device)
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=comm.Get_size())
    y = rows.clone()
    before = buffer.memory_stats()["heap_bytes"]
    total, _, _ = buffer.combine(y, handle)
    torch.cuda.current_stream().synchronize()
    return torch.equal(total, x), before, buffer.memory_stats()["heap_bytes"], rows.nbytes


def test_rows_of_its_own_are_not_copied_for_a_combine() -> None:
    for ranks in (1, 2):
        for equal, before, after, row_bytes in World("thread", ranks).run(job_own_rows):
            assert equal and after == before < 3 * row_bytes, (before, after, row_bytes)


def job_capacity(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, 96 * MIB, comm=comm, timeout=20)
    before = buffer.memory_stats()["heap_bytes"]
    good = execute(large_program(), rank, [buffer])
    return before, buffer.memory_stats()["heap_bytes"], buffer.num_nvl_bytes, good


def test_capacity_given_at_the_start_needs_no_growth() -> None:
    results = World("thread", 2).run(job_capacity)
    for before, after, attribute, _ in results:
        assert 96 * MIB <= before == after and attribute == 96 * MIB
    check(large_program(), [good for *_, good in results])


def settled(buffer: deep_moe.Buffer) -> dict[str, int]:
    """Statistics when nothing runs any more and what was freed has been looked at."""
    stats: dict[str, int] = {}
    for _ in range(2):  # the first look may only begin to watch the streams
        for stream in (torch.cuda.current_stream(), buffer.get_comm_stream(), torch.cuda.default_stream()):
            stream.synchronize()
        stats = buffer.memory_stats()
    return stats


def job_statistics(comm: Any, rank: int, _: Any) -> Any:
    buffer, given = deep_moe.Buffer(None, comm=comm, timeout=20), LARGE.inputs()
    seen = [settled(buffer)]
    tensor = buffer.empty((3, MIB), torch.uint8)
    seen.append(settled(buffer))
    del tensor
    seen.append(settled(buffer))
    for _ in range(20):
        fused(buffer, given)
        settled(buffer)
    return [*seen, settled(buffer)]


def test_statistics_add_up_and_freed_memory_is_used_again(form: str) -> None:
    for start, one, freed, end in World(form.removeprefix("gpu "), 2).run(job_statistics):
        for stats in (start, one, freed, end):
            assert set(stats) == STATS and all(type(value) is int and value >= 0 for value in stats.values())
            assert stats["live_bytes"] + stats["free_bytes"] <= stats["heap_bytes"]
            assert stats["largest_free_bytes"] <= stats["free_bytes"]
            assert stats["live_bytes"] <= stats["peak_bytes"]
        assert one["live_blocks"] == start["live_blocks"] + 1
        assert one["live_bytes"] >= start["live_bytes"] + 3 * MIB
        for stats in (freed, end):
            assert (stats["live_blocks"], stats["live_bytes"]) == (start["live_blocks"], start["live_bytes"])
        assert end["heap_bytes"] < 160 * MIB, "the memory of 20 exchanges was not used again"


def job_thousand(comm: Any, rank: int, exchanges: int) -> Any:
    """Results of many exchanges stay alive, are freed in any order by four threads, while others go on."""
    buffer = deep_moe.Buffer(None, 8 * MIB, comm=comm, timeout=20)
    chance = random.Random(7)
    case = Case("thousand", (24, 17), hidden=256)
    before = settled(buffer)
    live: list[tuple[torch.Tensor, torch.Tensor]] = []
    wrong = 0

    def receive(seed: int) -> None:
        sent = fused(buffer, case.but(seed=seed).inputs())
        live.extend((tensor, tensor.clone()) for tensor in (*sent[:3], *sent[4][:2]))

    def free(part: list[tuple[torch.Tensor, torch.Tensor]], bad: list[int]) -> None:
        while part:  # on the default stream, which no rank uses
            tensor, copy = part.pop()
            bad.append(int(not torch.equal(tensor, copy)))

    for seed in range(exchanges):
        receive(seed)
    most = settled(buffer)["live_blocks"]
    for turn in range(3):
        chance.shuffle(live)
        torch.cuda.current_stream().synchronize()
        half = len(live) // 2 if turn < 2 else 0
        going = live[half:]
        del live[half:]
        bad: list[int] = []
        threads = [threading.Thread(target=free, args=(going[i::4], bad)) for i in range(4)]
        del going
        for thread in threads:
            thread.start()
        for seed in range(20 if turn < 2 else 0):
            receive(1000 * turn + seed)
        for thread in threads:
            thread.join()
        del threads
        wrong += sum(bad)
    return most, wrong, before, settled(buffer)


def test_a_thousand_tensors_freed_in_any_order_from_any_thread() -> None:
    """No received tensor changes while it lives, and all memory comes back."""
    for most, wrong, before, after in World("thread", 2).run(job_thousand, 360, timeout=90):
        assert most > 1000 and wrong == 0
        assert (after["live_blocks"], after["live_bytes"]) == (before["live_blocks"], before["live_bytes"]), (
            after
        )


def job_fragments(comm: Any, rank: int, rounds: int) -> Any:
    """Exchanges of random sizes of which some stay for a while, as layers' activations do."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    chance = random.Random(3)
    live: list[Any] = []
    heap = []
    whole = Case("fragments", (1000,) * comm.Get_size(), hidden=512).inputs()
    x, idx = on_gpu(whole.x[rank]), on_gpu(whole.topk_idx[rank])
    for _ in range(rounds):
        tokens = [chance.choice((1, 30, 200, 900)) + chance.randrange(100) for _ in whole.x][rank]
        live.append(buffer.dispatch(x[:tokens], topk_idx=idx[:tokens], num_experts=whole.experts)[:3])
        if len(live) > 12:
            del live[chance.randrange(len(live))]
        heap.append(settled(buffer)["heap_bytes"])
    return heap, settled(buffer)["peak_bytes"]


def test_fragmentation_is_bounded() -> None:
    """The heap stays within a few times what lives at once, and hardly grows any more."""
    for heap, peak in World("thread", 2).run(job_fragments, 1000, timeout=90):
        assert heap[-1] <= 4 * peak, (heap[-1], peak)
        assert len(set(heap[400:])) <= 3, sorted(set(heap))


@pytest.mark.parametrize("who", ["own", "peer"])
def test_tensors_outlive_destroy_on_either_side(who: str) -> None:
    on_cpus.test_tensors_outlive_destroy_on_either_side(who, "gpu process")


def job_scratch(comm: Any, rank: int, _: Any) -> Any:
    """All of the scratch memory is overwritten while tensors live and between calls; nothing else changes."""
    buffer = deep_moe.Buffer(None, MIB, comm=comm, timeout=20)
    sent = fused(buffer, LARGE.inputs())
    copy = sent[0].clone()
    view = buffer.get_local_buffer_tensor(torch.int8).fill_(-1)
    part = buffer.get_local_buffer_tensor(torch.float32, (4, 8), offset=64)
    good = execute(good_high_throughput(), rank, [buffer])
    again = buffer.get_local_buffer_tensor(torch.int8)
    kept = bool((view == -1).all()) and again.data_ptr() == view.data_ptr() and view.numel() == MIB
    shape = part.shape == (4, 8) and part.dtype == torch.float32 and bool(part.isnan().all())
    return shape, kept, torch.equal(copy, sent[0]), good


def test_local_buffer_tensor_touches_nothing_else() -> None:
    results = World("thread", 2).run(job_scratch)
    for *flags, _ in results:
        assert flags == [True] * 3
    check(good_high_throughput(), [good for *_, good in results])


def job_empty(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    tensors = [buffer.empty(shape, dtype) for dtype, shape in KINDS]
    aligned = all(tensor.data_ptr() % 128 == 0 for tensor in tensors if tensor.numel())
    wrong = [attempt(lambda: buffer.empty((-1,), torch.int8)), attempt(lambda: buffer.empty((4,), "int"))]
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], aligned, wrong


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8]
KINDS = [(dtype, shape) for dtype in DTYPES for shape in ((0, 5), (3,), (2, 3, 4))]


def test_empty_takes_shapes_and_types() -> None:
    ((seen, aligned, (negative, other)),) = ONE.run(job_empty)
    assert seen == KINDS and aligned
    negative.must_be(ValueError, "shape|extent|-1")
    other.must_be(TypeError, "dtype")
