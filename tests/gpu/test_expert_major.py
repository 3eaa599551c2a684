"""Rows grouped by local expert on GPUs: the CPU's programs, graphs, small heaps, and what it costs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deep_moe
from deep_moe import reference

from ..cpu.test_cases_round_trip import two
from ..cpu.test_expert_major import CASES, program
from ..support.attempts import attempt, good_high_throughput
from ..support.compare import same_bits, same_values
from ..support.device import captured
from ..support.expert_major import GroupedCombine, GroupedDispatch, grouped, groups_of, summed, with_tail
from ..support.gpu import ONE, VECTOR, World, on_cpu, on_gpu
from ..support.inputs import Case, Inputs
from ..support.program import Program, check, execute, run
from .test_cases import some

pytestmark = pytest.mark.gpus(1)

TWO = World("thread", 2)
WAYS = ("mixed", "rank0", "none", "repeated")  # of routing, of a graph's replays


@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads(case: Case) -> None:
    run(program(case), case.ranks, "gpu thread")


@pytest.mark.parametrize("case", some(CASES)[::3], ids=str)
def test_processes(case: Case) -> None:
    run(program(case), case.ranks, "gpu process")


def test_without_the_copy_engine() -> None:
    World("thread", 2, VECTOR).run_program(program(two(name="vector", topk=8)))


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_between_nodes(local_ranks: int) -> None:
    case = two(name="nodes", tokens=(9, 20, 0, 13), routing="mixed", topk=6)
    run(program(case, local_ranks), 4, "gpu thread")


def test_wide_rows_and_many_experts() -> None:
    case = two(name="wide", tokens=(300, 128), hidden=7168, experts=256, topk=8)
    calls = [GroupedDispatch(case.inputs(), alignment=128), GroupedCombine(0, row_weights=True)]
    run(Program(calls), 2, "gpu thread")


def test_too_many_experts_of_one_rank() -> None:
    (tried,) = ONE.run(job_too_many)
    tried.must_be(ValueError, "expert_major", "5000", "4096")


def job_too_many(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx = on_gpu(torch.ones(1, 8)), on_gpu(torch.zeros(1, 1, dtype=torch.int64))
    return attempt(lambda: buffer.dispatch(x, topk_idx=idx, num_experts=5000, expert_major=True))


def job_waves(comm: Any, rank: int, _: Any) -> Any:
    if rank == 1:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(4 << 20)
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    os.environ.pop("DEEP_MOE_MAX_HEAP_BYTES", None)
    return execute(waves(), rank, [buffer])


def waves() -> Program:
    """3 MiB and more arrive at rank 1, in blocks that are smaller, and become twice as many rows."""
    given = two(name="waves", tokens=(700, 500), hidden=1024, experts=4, topk=2).inputs()
    return Program([GroupedDispatch(given, alignment=8)])


def test_rows_that_come_in_waves() -> None:
    check(waves(), World("process", 2).run(job_waves))


def job_expands(comm: Any, rank: int, _: Any) -> Any:
    """Rank 1 receives 4 MiB, which become 32 MiB, and its heap grows to no more than 8."""
    if rank == 1:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(8 << 20)
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    os.environ.pop("DEEP_MOE_MAX_HEAP_BYTES", None)
    tokens = 2000 if rank == 0 else 0
    x = torch.arange(tokens, device="cuda").float().unsqueeze(1).expand(-1, 512).contiguous()
    idx = torch.arange(8, 16, device="cuda").expand(tokens, 8).contiguous()
    rows, _, _, sizes, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=16, expert_major=True)
    total, _, _ = buffer.combine(rows, handle)
    torch.cuda.current_stream().synchronize()
    heap = buffer.memory_stats()["heap_bytes"]
    right = torch.equal(total, 8 * x)
    return right, rows[:, 0].tolist(), sizes, heap, execute(good_high_throughput(), rank, [buffer])


def test_a_heap_without_room_for_the_groups() -> None:
    """They lie in ordinary memory."""
    results = World("process", 2).run(job_expands)
    assert all(right for right, *_ in results)
    _, rows, sizes, heap, _ = results[1]
    assert rows == [float(row) for row in range(2000)] * 8 and sizes == [2000] * 8 and heap <= 8 << 20
    check(good_high_throughput(), [good for *_, good in results])


# ---- graphs ----
def job_graph(comm: Any, rank: int, given: Any) -> Any:
    """A dispatch by handle and a combine, captured and replayed with other rows."""
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm)
    x, idx, weights = (on_gpu(part[rank]) for part in (given.x, given.topk_idx, given.topk_weights))
    _, _, row_weights, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=16, expert_alignment=4, expert_major=True
    )

    def layer() -> tuple[Tensor, Tensor]:
        rows = buffer.dispatch(x, handle=handle)[0]
        return rows, buffer.combine(rows, handle, row_weights=row_weights)[0]

    graph, outputs = captured(comm, rank, layer)
    seen = []
    for factor in (1, -3):
        for output in outputs:
            output.fill_(-7)
        x.mul_(factor)
        graph.replay()
        seen.append(on_cpu(list(outputs)))
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    return seen


def test_a_graph_replays_with_other_rows() -> None:
    given = two(name="graph", dtype=torch.float32).inputs()
    results = TWO.run(job_graph, given)
    for turn, factor in enumerate((1, -3)):
        x = [rows * factor for rows in given.x]
        received = reference.dispatch(x, given.topk_idx, 16, given.topk_weights)
        groups = [groups_of(one.topk_idx, 8, 4) for one in received]
        sums, in_rank = [], []
        for rank, one in enumerate(received):
            rows = grouped(one.x, groups[rank])
            same_bits(results[rank][turn][0], rows, f"replay {turn}, rank {rank}")
            factors = torch.zeros(len(rows))
            here = groups[rank].rows >= 0
            factors[groups[rank].rows[here].long()] = one.topk_weights[here]
            sums.append(summed(rows, groups[rank], factors))
            in_rank.append(reference.layout(given.topk_idx[rank], 16, 2).is_token_in_rank)
        for rank, (total, _) in enumerate(reference.combine(sums, in_rank)):
            same_values(results[rank][turn][1], total, f"replay {turn}, rank {rank}, combined")


def job_worst_graph(comm: Any, rank: int, rounds: list[Inputs]) -> Any:
    """Dispatch and combine with a fixed number of rows, captured and replayed with other rows and ids."""
    first = rounds[0]
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm)
    x, idx, weights = (on_gpu(part[rank]) for part in (first.x, first.topk_idx, first.topk_weights))

    def layer() -> tuple[Tensor, ...]:
        rows, experts, row_weights, sizes, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=16,
            num_worst_tokens=sum(map(len, first.topk_idx)),
            expert_alignment=4,
            expert_major=True,
        )
        assert sizes == []
        total = buffer.combine(rows, handle, row_weights=row_weights)[0]
        return rows, experts, row_weights, handle.expert_offsets, handle.expert_counts, total

    graph, outputs = captured(comm, rank, layer)
    seen = []
    for given in rounds:
        for output in outputs:
            output.fill_(-7)
        for old, new in ((x, given.x), (idx, given.topk_idx), (weights, given.topk_weights)):
            old.copy_(on_gpu(new[rank]))
        graph.replay()
        seen.append(on_cpu(list(outputs)))
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    return seen


def test_a_graph_of_a_fixed_number_of_rows_replays_with_other_ids() -> None:
    case = two(name="graph", dtype=torch.float32)
    rounds = [case.but(name=f"graph {number}", routing=way).inputs() for number, way in enumerate(WAYS)]
    results = TWO.run(job_worst_graph, rounds)
    most = sum(case.tokens)
    for turn, given in enumerate(rounds):
        received = reference.dispatch(given.x, given.topk_idx, 16, given.topk_weights, num_worst_tokens=most)
        sums = []
        for rank, (one, result) in enumerate(zip(received, results, strict=True)):
            rows, experts, row_weights, offsets, counts, _ = result[turn]
            groups = with_tail(groups_of(one.topk_idx, 8, 4), len(experts))
            what = f"replay {turn}, rank {rank}"
            assert len(rows) == -(-(most * one.topk_idx.shape[1] + 8 * 3) // 4) * 4
            wanted, factors = grouped(one.x, groups), torch.zeros(len(experts))
            here = groups.rows >= 0
            assert one.topk_weights is not None
            factors[groups.rows[here].long()] = one.topk_weights[here]
            same_bits(rows[: groups.used], wanted[: groups.used], f"{what}, recv_x")
            same_bits(experts, groups.experts, f"{what}, recv_topk_idx")
            same_bits(row_weights, factors, f"{what}, recv_topk_weights")
            same_bits(offsets, groups.offsets, f"{what}, expert_offsets")
            same_bits(counts, groups.counts, f"{what}, expert_counts")
            sums.append(summed(wanted, groups, factors))
        in_rank = [reference.layout(idx, 16, 2).is_token_in_rank for idx in given.topk_idx]
        for rank, (total, _) in enumerate(reference.combine(sums, in_rank)):
            same_values(results[rank][turn][5], total, f"replay {turn}, rank {rank}, combined")


# ---- what it costs ----
def job_times(comm: Any, rank: int, work: tuple[int, int, int, int]) -> dict[str, float]:
    """Microseconds of calls, and of a permute of torch's beside plain ones; all ranks at the same time."""
    tokens, hidden, experts, topk = work
    gen = torch.Generator("cuda").manual_seed(rank)
    buffer = deep_moe.Buffer(None, 3 << 30, comm=comm)
    warm = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
    del warm
    x = torch.randn(tokens, hidden, device="cuda", generator=gen).bfloat16()
    weights, idx = torch.rand(tokens, experts, device="cuda", generator=gen).topk(topk)
    call = {"topk_idx": idx, "topk_weights": weights, "num_experts": experts}

    def permuted() -> tuple[Any, ...]:
        rows, ids, row_weights, _, handle, _ = buffer.dispatch(x, **call)
        flat = ids.flatten()
        order = torch.sort(flat, stable=True).indices[int_of(flat) :]
        return rows[order // topk], order, row_weights.flatten()[order], handle, len(rows)

    def int_of(flat: Tensor) -> int:
        return len(flat) - entries

    def grouped_rows(alignment: int) -> tuple[Any, ...]:
        return buffer.dispatch(x, **call, expert_alignment=alignment, expert_major=True)

    first = buffer.dispatch(x, **call)
    entries, received = sum(first[3]), len(first[0])
    plain_y, plain_handle = first[0].clone(), first[4]
    ours = grouped_rows(1)
    y, order, factors, handle, _ = permuted()
    torch.cuda.current_stream().synchronize()
    assert torch.equal(ours[0], y) and torch.equal(ours[2], factors)
    y = y.clone()
    extra = torch.empty_like(y[received:])

    def unpermuted() -> Tensor:
        total = torch.zeros(received, hidden, dtype=torch.float32, device="cuda")
        total.index_add_(0, order // topk, y.float() * factors.unsqueeze(1))
        return buffer.combine(total.bfloat16(), handle)[0]

    def micros(run: Callable[[], Any], times: int = 8) -> float:
        for _ in range(3):
            run()
        torch.cuda.current_stream().synchronize()
        comm.allgather(None)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        comm.allgather(None)
        return begin.elapsed_time(end) * 1000 / times

    return {
        "rows received": received,
        "rows by expert": entries,
        "dispatch": micros(lambda: buffer.dispatch(x, **call)),
        "dispatch, expert-major": micros(lambda: grouped_rows(1)),
        "dispatch, expert-major, aligned to 128": micros(lambda: grouped_rows(128)),
        "dispatch, sort and gather": micros(permuted),
        "gather alone": micros(lambda: torch.index_select(plain_y, 0, order // topk)),
        "copy of the extra rows": micros(lambda: extra.copy_(y[received:])),
        "combine": micros(lambda: buffer.combine(plain_y, plain_handle)),
        "combine, expert-major": micros(lambda: buffer.combine(y, ours[4])),
        "combine, expert-major, weighted": micros(lambda: buffer.combine(y, ours[4], row_weights=ours[2])),
        "scatter in fp32, combine": micros(unpermuted, 4),
    }


@pytest.mark.parametrize("ranks", [2, 8])
def test_timing_beside_a_permute(ranks: int) -> None:
    """T=4096, H=7168, E=256, K=8: less than a dispatch and torch's permute behind it."""
    results = World("thread", ranks).run(job_times, (4096, 7168, 256, 8), timeout=60)
    print()
    for name in results[0]:
        print(f"  {ranks} ranks  {name:40} {max(result[name] for result in results):9.1f}")
    slowest = {name: max(result[name] for result in results) for name in results[0]}
    assert slowest["dispatch, expert-major"] < slowest["dispatch, sort and gather"]
    assert slowest["combine, expert-major, weighted"] < slowest["scatter in fp32, combine"]
