"""GPU ranks on several nodes: DEEP_MOE_LOCAL_RANKS cuts those that share a GPU, and rows take the rings.

The programs of the CPU, against the same reference: sums are rounded once more for the network.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..cpu import test_nodes as on_cpus
from ..cpu import test_nodes_life as life
from ..cpu.test_cases_round_trip import HIGH_THROUGHPUT, LOW_LATENCY, high_throughput, low_latency
from ..cpu.test_failures import fused
from ..cpu.test_models import MODELS, TOKENS, model_inputs
from ..cpu.test_nodes import SQUARE, WIDE, WORLDS, World
from ..support.attempts import attempt, attempt_when_late, good_high_throughput
from ..support.gpu import World as Gpu
from ..support.gpu import on_gpu
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import Program, check, cut_into_nodes, execute, run

pytestmark = pytest.mark.gpus(1)

THREADS = "gpu thread"
FOUR = Gpu("thread", 4)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_high_throughput(case: Case, world: World) -> None:
    case = world.case(case)
    run(world.program(high_throughput(case)), case.ranks, THREADS)


@pytest.mark.parametrize("world", [World(2, 1)], ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT[::8], ids=str)
def test_high_throughput_between_processes(case: Case, world: World) -> None:
    case = world.case(case)
    run(world.program(high_throughput(case)), case.ranks, "gpu process")


@pytest.mark.parametrize("world", [SQUARE], ids=str)
@pytest.mark.parametrize("case", LOW_LATENCY, ids=str)
def test_low_latency(case: Case, world: World) -> None:
    """On one machine these rows go straight from GPU to GPU."""
    case = world.case(case)
    run(world.program(low_latency(case)), case.ranks, THREADS)


@pytest.mark.parametrize("world", [SQUARE, WIDE], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_models(model: dict[str, Any], world: World) -> None:
    given = model_inputs(model, TOKENS[: world.ranks])
    calls = [Dispatch(given), Combine(0), Dispatch(given, path="fused"), Combine(2, seed=1)]
    run(world.program(Program(calls)), world.ranks, THREADS)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_rings_of_few_rows_go_round_many_times(world: World) -> None:
    on_cpus.test_rings_of_few_rows_go_round_many_times(world, THREADS)


@pytest.mark.parametrize("num_rdma_bytes", [0, 1 << 20])
def test_results_repeat_bit_for_bit(num_rdma_bytes: int) -> None:
    on_cpus.test_results_repeat_bit_for_bit(num_rdma_bytes, THREADS)


@pytest.mark.parametrize("path", ["v1", "fused"])
def test_no_sync_dispatch_pads_its_tail(path: str) -> None:
    on_cpus.test_no_sync_dispatch_pads_its_tail(path, THREADS)


def test_two_buffers_and_both_modes_side_by_side() -> None:
    on_cpus.test_two_buffers_and_both_modes_side_by_side(THREADS)


def job_grow(comm: Any, rank: int, local_ranks: int) -> Any:
    with cut_into_nodes(comm, local_ranks):
        buffer = deep_moe.Buffer(None, 4096, comm=comm, timeout=20)
    return execute(growing(), rank, [buffer])


def growing() -> Program:
    given = Case("grow", (300, 0, 120, 77), hidden=1024, topk=6, experts=16).inputs()
    return Program([Dispatch(given), Combine(0), CachedDispatch(0, given.case.rows(3)), Combine(0, seed=2)])


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_heaps_grow_together(local_ranks: int) -> None:
    """What arrives does not fit: all ranks learn it, on all nodes, and the rows move once there is room."""
    results = FOUR.run(job_grow, local_ranks)
    check(Program(growing().calls, local_ranks=local_ranks), results)


def job_routes(comm: Any, rank: int, given: Any) -> Any:
    with cut_into_nodes(comm, 2):
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    handle = fused(buffer, given)[4]
    return (
        handle.recv_rdma_rank_prefix_sum,
        handle.send_nvl_index,
        handle.send_rdma_index,
        handle.rank_prefix_matrix,
    )


def test_a_row_crosses_once_a_node() -> None:
    """The handle says what a rank forwarded: a row for each token of its peers that went to its node."""
    given = Case("once", (40, 30, 20, 10), topk=8, experts=16).inputs()
    in_rank = [reference.layout(idx, 16, 4).is_token_in_rank for idx in given.topk_idx]
    for rank, (rows, index, positions, matrix) in enumerate(FOUR.run(job_routes, given)):
        node, peer = rank // 2, (rank + 2) % 4
        goes = in_rank[peer][:, 2 * node : 2 * node + 2]
        arrived = int(goes.any(1).sum())
        assert rows[0].tolist() == ([0, arrived] if node == 0 else [arrived, arrived])
        sent = in_rank[rank][:, 2 * (1 - node) : 4 - 2 * node].any(1)
        assert rows[1].tolist() == [0 if one == node else int(sent.sum()) for one in range(2)]
        assert torch.equal(index >= 0, goes[goes.any(1)])
        assert positions[:, node].eq(-1).all() and torch.equal(positions[:, 1 - node] >= 0, sent)
        assert torch.equal(matrix, torch.stack([one.sum(0) for one in in_rank]).cumsum(0).int())


@pytest.mark.parametrize("order", ["abab", "baab"])
def test_ranks_in_any_order_over_the_nodes(order: str) -> None:
    life.test_ranks_in_any_order_over_the_nodes(order, "gpu process")


# ---- what goes wrong ----
def test_rows_wider_than_a_slot_name_the_bytes() -> None:
    life.test_rows_wider_than_a_slot_name_the_bytes(THREADS)


def test_a_refusal_leaves_the_rings_in_step() -> None:
    life.test_a_refusal_leaves_the_rings_in_step(THREADS)


def test_too_few_worst_tokens_are_refused_everywhere() -> None:
    life.test_too_few_worst_tokens_are_refused_everywhere(THREADS)


def test_handles_of_other_nodes_are_refused() -> None:
    life.test_handles_of_other_nodes_are_refused(THREADS)


def job_mismatch(comm: Any, rank: int, _: None) -> Any:
    with cut_into_nodes(comm, 2):
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    usual = Case("usual", (9, 6, 5, 8), experts=8, topk=3)
    given = (usual.but(hidden=1024) if rank == 3 else usual).inputs()
    tried = attempt(lambda: fused(buffer, given))
    return tried, execute(good_high_throughput(4), rank, [buffer])


def test_another_call_on_one_rank_is_noticed_by_all() -> None:
    results = FOUR.run(job_mismatch)
    for rank, (tried, _) in enumerate(results):
        tried.must_be(
            deep_moe.CallMismatchError, rf"rank {3 if rank < 3 else '[0-2]'}\b", "dispatch", "2048", "1024"
        )
    check(Program(good_high_throughput(4).calls, local_ranks=2), [good for _, good in results])


def job_late(comm: Any, rank: int, late: str) -> Any:
    with cut_into_nodes(comm, 2):
        buffer = deep_moe.Buffer(None, comm=comm, timeout=0.4)
    given = Case("late", (60, 50, 40, 30), topk=6).inputs()
    sent = fused(buffer, given)
    x = on_gpu(given.x[rank])
    calls = {
        "dispatch": lambda: fused(buffer, given),
        "cached": lambda: buffer.dispatch(x, handle=sent[4]),
        "combine": lambda: buffer.combine(sent[0], sent[4]),
    }
    tried = attempt_when_late(comm, buffer, calls[late], 1.0 if rank == 3 else 0)
    return tried, execute(good_high_throughput(4), rank, [buffer])


@pytest.mark.parametrize("late", ["dispatch", "cached", "combine"])
def test_a_late_rank_fails_all_and_reset_mends(late: str) -> None:
    """Rank 3 does not come; the rings begin anew in the next generation, whatever was left in them."""
    results = FOUR.run(job_late, late)
    for tried, _ in results[:3]:
        tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 3\b")
    check(Program(good_high_throughput(4).calls, local_ranks=2), [good for _, good in results])
