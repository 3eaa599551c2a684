"""Several nodes: DEEP_MOE_LOCAL_RANKS cuts the ranks of this host, and rows take the rings in between.

Ids of worlds are nodes x ranks of a node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.attempts import good_program
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import BufferOptions, Program, check, cut_into_nodes, execute, run
from ..support.ranks import run_ranks
from .test_cases_round_trip import HIGH_THROUGHPUT, LOW_LATENCY, high_throughput, low_latency
from .test_failures import fused
from .test_models import MODELS, TOKENS, model_inputs


@dataclass(frozen=True)
class World:
    nodes: int
    local_ranks: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.local_ranks}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.local_ranks

    def case(self, case: Case) -> Case:
        """The case with as many ranks as there are here; tokens are those of its ranks, again and again."""
        tokens = [case.tokens[rank % case.ranks] for rank in range(self.ranks)]
        few = [count if count < 1000 else count // self.nodes for count in tokens]
        return case.but(tokens=tuple(few))

    def program(self, program: Program, num_rdma_bytes: int = 0) -> Program:
        options = [replace(one, num_ll_bytes=num_rdma_bytes or one.num_ll_bytes) for one in program.buffers]
        return replace(program, local_ranks=self.local_ranks, buffers=options)


WORLDS = [World(2, 1), World(2, 2), World(4, 1), World(2, 4), World(4, 2)]
SQUARE = World(2, 2)
WIDE = World(4, 2)


def ring_bytes(world: World, row_bytes: int, rows: int = 1) -> int:
    """num_rdma_bytes for slots of this many rows, so that a few tokens go round the rings many times."""
    hint = deep_moe.Config().get_rdma_buffer_size_hint
    before = os.environ.get("DEEP_MOE_LOCAL_RANKS")
    os.environ["DEEP_MOE_LOCAL_RANKS"] = str(world.local_ranks)
    try:
        small, large = hint(16 * 1024, world.ranks), hint(32 * 1024, world.ranks)
    finally:
        if before is None:
            del os.environ["DEEP_MOE_LOCAL_RANKS"]
        else:
            os.environ["DEEP_MOE_LOCAL_RANKS"] = before
    each = (large - small) / (
        16 * 1024 * 9
    )  # what a byte of a row adds; a row has an eighth of its bytes in scales
    return int(small - each * 16 * 1024 * 9 + each * row_bytes * rows)


# ---- every row of the list of hostile inputs ----
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_high_throughput(case: Case, world: World) -> None:
    case = world.case(case)
    run(world.program(high_throughput(case)), case.ranks, "thread")


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT[::6], ids=str)
def test_high_throughput_between_processes(case: Case, world: World) -> None:
    case = world.case(case)
    run(world.program(high_throughput(case)), case.ranks)


@pytest.mark.parametrize("world", [SQUARE], ids=str)
@pytest.mark.parametrize("case", LOW_LATENCY, ids=str)
def test_low_latency(case: Case, world: World) -> None:
    case = world.case(case)
    run(world.program(low_latency(case)), case.ranks, "thread")


@pytest.mark.parametrize("world", [SQUARE, WIDE], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_models(model: dict[str, Any], world: World) -> None:
    given = model_inputs(model, TOKENS[: world.ranks])
    calls = [Dispatch(given), Combine(0), Dispatch(given, path="fused"), Combine(2, seed=1)]
    run(world.program(Program(calls)), world.ranks, "thread")


# ---- what the rings have to bear ----
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_rings_of_few_rows_go_round_many_times(world: World, form: str) -> None:
    """Slots of one or two rows: tokens are many times what the rings hold, in both directions."""
    case = world.case(Case("round", (700, 1, 300, 500), hidden=128, experts=16, topk=6))
    program = world.program(high_throughput(case), ring_bytes(world, 512, rows=2))
    run(program, case.ranks, form)


def test_rows_come_in_waves_between_nodes() -> None:
    """Heaps that hold a part of what arrives: places are windows, combine's staging is a ring."""
    given = Case("waves", (900, 700, 800, 600), hidden=1024, experts=8, topk=6).inputs()
    program = Program(
        [Dispatch(given), Combine(0, biases=1), CachedDispatch(0, given.case.rows(3)), Combine(0, seed=2)]
    )

    def rank_main(comm: Any, rank: int) -> Any:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(1_500_000 + 300_000 * rank)
        with cut_into_nodes(comm, 2):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        return execute(program, rank, [buffer])

    check(replace(program, local_ranks=2), run_ranks(rank_main, 4))


@pytest.mark.parametrize("num_rdma_bytes", [0, 1 << 20])
def test_results_repeat_bit_for_bit(num_rdma_bytes: int, form: str) -> None:
    case = Case("repeat", (300, 200, 250, 100), topk=8, experts=32)
    given = case.inputs()
    calls: list[Any] = []
    for _ in range(4):
        calls += [Dispatch(given, path="fused"), Combine(len(calls), biases=2)]
    results = run(SQUARE.program(Program(calls), num_rdma_bytes), 4, form)
    for of_rank in results:
        for call in range(2, len(calls)):
            for part in ("x", "weights"):
                assert torch.equal(of_rank[call][part], of_rank[call % 2][part])


def test_second_hop_is_rounded() -> None:
    """What another node holds of a token is summed there first: one row comes back, rounded."""
    case = Case("hop", (64, 64, 64, 64), topk=8, experts=16)
    calls = [Dispatch(case.inputs(), path="fused"), Combine(0)]
    run(SQUARE.program(Program(calls)), 4, "thread")  # compared with the reference in there
    with pytest.raises(AssertionError, match="combined_x"):
        check(Program(calls), run(SQUARE.program(Program(calls)), 4, "thread"))


@pytest.mark.parametrize("cached", [False, True])
def test_a_row_crosses_once_a_node(cached: bool) -> None:
    """The handle says what a rank forwarded: a row for each token of its peers that went to its node."""
    given = Case("once", (40, 30, 20, 10), topk=8, experts=16).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 2):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        sent = fused(buffer, given)
        if cached:
            buffer.dispatch(given.x[rank], handle=sent[4])
        handle = sent[4]
        return handle.recv_rdma_rank_prefix_sum, handle.send_nvl_index, handle.send_rdma_index

    results = run_ranks(rank_main, 4, form="thread")
    in_rank = [reference.layout(idx, 16, 4).is_token_in_rank for idx in given.topk_idx]
    for rank, (prefix, index, positions) in enumerate(results):
        node, peer = rank // 2, (rank + 2) % 4
        goes = in_rank[peer][:, 2 * node : 2 * node + 2]
        rows = int(goes.any(1).sum())
        assert prefix.tolist() == ([0, rows] if node == 0 else [rows, rows])
        assert torch.equal(index >= 0, goes[goes.any(1)])
        assert positions[:, node].eq(-1).all()
        assert torch.equal(
            positions[:, 1 - node] >= 0, in_rank[rank][:, 2 * (1 - node) : 4 - 2 * node].any(1)
        )


@pytest.mark.parametrize("path", ["v1", "fused"])
def test_no_sync_dispatch_pads_its_tail(path: str, form: str) -> None:
    calls: list[Any] = []
    for tokens, seed in (((30, 34, 5, 20), 0), ((0, 0, 0, 0), 2), ((3, 0, 1, 0), 3)):
        given = Case("padded", tokens, seed=seed, routing="mixed").inputs()
        calls += [Dispatch(given, path, worst=128), Combine(len(calls), in_heap=True)]
        calls += [CachedDispatch(len(calls) - 2, given.case.rows(seed + 1), plain_handle=True)]
    run(SQUARE.program(Program(calls)), 4, form)


def test_two_buffers_and_both_modes_side_by_side(form: str) -> None:
    case = Case("side", (20, 9, 14, 0), hidden=256)
    one, other = case.inputs(), case.but(hidden=1024, experts=10, seed=4).inputs()
    calls: list[Any] = [
        Dispatch(one),
        Dispatch(other, buffer=1),
        *good_program(4).calls[2:3],
        Combine(1, buffer=1),
        Combine(0),
        Dispatch(other, buffer=1, alignment=16),
        Combine(5, buffer=1),
    ]
    options = [BufferOptions(), BufferOptions(1 << 20, 4 << 20)]
    run(SQUARE.program(Program(calls, options)), 4, form)
