"""Low-latency calls of GPU ranks on several nodes, put straight to every rank over the network.

Over mapped memory (ranks are threads) and over NVSHMEM (processes). Without DEEP_MOE_NETWORK rows of one
machine go straight from GPU to GPU: test_nodes.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu.test_cases_round_trip import LOW_LATENCY, low_latency
from ..cpu.test_low_latency import GIVEN, check_masked, inputs_of, send
from ..cpu.test_nodes import World
from ..support.attempts import attempt, good_program, words
from ..support.compare import same_bits
from ..support.gpu import World as Gpu
from ..support.gpu import run_program_on_rank
from ..support.inputs import Case
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.nvshmem import needs_nvshmem
from ..support.program import BufferOptions, Call, Program, check, execute
from . import test_low_latency as one_node
from . import test_low_latency_failures as failures
from . import test_low_latency_graphs as graphs

pytestmark = pytest.mark.gpus(1)

PAIR, SQUARE, LINE, WIDE = World(2, 1), World(2, 2), World(3, 1), World(4, 2)
OVER_BOTH = [
    *(pytest.param(world, "mapped", id=f"{world}-mapped") for world in (PAIR, SQUARE, LINE, WIDE)),
    *(pytest.param(world, "nvshmem", id=f"{world}-nvshmem") for world in (PAIR, SQUARE)),
]


def ranks_of(world: World, network: str = "mapped") -> Gpu:
    settings = (("DEEP_MOE_NETWORK", network), ("DEEP_MOE_LOCAL_RANKS", str(world.local_ranks)))
    return Gpu(
        "thread" if network == "mapped" else "process", world.ranks, settings, exact=network == "nvshmem"
    )


@pytest.fixture(autouse=True)
def _network_is_there(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("network") == "nvshmem":
        needs_nvshmem()


def run(world: World, network: str, program: Program) -> list[Any]:
    arguments = [program.only(rank) for rank in range(world.ranks)]
    results = ranks_of(world, network).run_each(run_program_on_rank, arguments)
    check(replace(program, local_ranks=world.local_ranks), results)
    return results


def check_good(world: World, results: list[Any], program: Program | None = None) -> None:
    program = program or good_program(world.ranks)
    check(replace(program, local_ranks=world.local_ranks), results)


ROUND_TRIPS = [
    pytest.param(case, world, network, id=f"{world}-{network}-{case}")
    for world, network, step in (
        (PAIR, "mapped", 1),
        (SQUARE, "mapped", 1),
        (LINE, "mapped", 4),
        (WIDE, "mapped", 4),
        (PAIR, "nvshmem", 4),
        (SQUARE, "nvshmem", 4),
    )
    for case in LOW_LATENCY[::step]
]


@pytest.mark.parametrize(("case", "world", "network"), ROUND_TRIPS)
def test_low_latency(case: Case, world: World, network: str) -> None:
    run(world, network, low_latency(world.case(case)))


@pytest.mark.parametrize(("world", "network"), OVER_BOTH)
def test_both_modes_and_all_payloads_on_one_buffer(world: World, network: str) -> None:
    run(world, network, one_node.every_kind(world.ranks))


def test_sums_are_those_of_one_node() -> None:
    """Bit for bit, where the holders reduce and where rows come by expert."""
    given = Case("same", (40, 31, 8, 25), hidden=1024, topk=6, experts=24).inputs()
    program = Program(
        [
            LowLatencyDispatch(given, 40),
            LowLatencyCombine(0),
            LowLatencyDispatch(given, 40, hook="now"),
            LowLatencyCombine(2, hook="now"),
            LowLatencyDispatch(given, 40, weights=True),
            LowLatencyCombine(4),
        ]
    )
    between = run(SQUARE, "mapped", program)
    within = Gpu("thread", 4).run_program(program)
    for rank in range(4):
        for call in (1, 3, 5):
            same_bits(between[rank][call]["x"], within[rank][call]["x"], f"rank {rank}, call {call}")


@pytest.mark.parametrize("mode", graphs.MODES)
@pytest.mark.parametrize("world", [PAIR, SQUARE], ids=str)
def test_graphs(world: World, mode: str) -> None:
    rounds = graphs.rounds_of(world.ranks)
    results = ranks_of(world).run(graphs.job_graph, (mode, rounds))
    for turn, given in enumerate([*rounds, rounds[-1]]):
        graphs.check_round(given, mode, [seen[turn] for seen in results], f"replay {turn}")


def test_one_rank_replays_while_others_call() -> None:
    rounds = graphs.rounds_of(4)
    results = ranks_of(SQUARE).run(graphs.job_beside, rounds)
    for turn, given in enumerate([*rounds, *rounds]):
        graphs.check_round(given, "weights", [seen[turn] for seen in results], f"turn {turn}")


def test_hooks_on_other_streams() -> None:
    given = Case("streams", (64, 50), hidden=1024, experts=8, topk=3).inputs()
    results = ranks_of(PAIR).run(one_node.job_streams, given)
    one_node.check_plain(given, 64, results, pre_reduced=False)


def test_dropped_hooks_hold_nothing_up() -> None:
    check_good(PAIR, ranks_of(PAIR).run(one_node.job_dropped_hook))


def job_refused_in_flight(comm: Any, rank: int, _: Any) -> Any:
    """Calls that this rank refuses come while others are in flight, and take their slots in turn."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    sent = [send(buffer, GIVEN, return_recv_hook=True) for _ in range(3)]
    refused = [attempt(lambda: send(buffer, GIVEN, use_ue8m0=True)) for _ in range(6)]
    for one in sent:
        one[4]()
    rows = [one_node.packed(one[0], one[1]) for one in sent]
    return refused, rows, execute(good_program(), rank, [buffer])


def test_refused_calls_with_others_in_flight() -> None:
    results = ranks_of(PAIR).run(job_refused_in_flight)
    for refused, rows, _ in results:
        for one in refused:
            one.must_be(ValueError, "use_ue8m0")
        for one in rows[1:]:
            same_bits(one, rows[0], "rows of calls in flight")
    check_good(PAIR, [good for *_, good in results])


# ---- memory ----
def job_small(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, 0, 1 << 20, low_latency_mode=True, comm=comm, timeout=20)
    x, idx, _ = inputs_of(buffer, GIVEN)
    tried = [attempt(lambda: buffer.low_latency_dispatch(x, idx, 4000, 8, use_fp8=False)) for _ in range(5)]
    return tried, execute(good_program(), rank, [buffer])


def test_too_little_memory_names_the_bytes() -> None:
    results = ranks_of(PAIR).run(job_small)
    for tried, _ in results:
        for one in tried:
            one.must_be(deep_moe.BufferTooSmallError, "num_rdma_bytes", "low_latency_mode", *words(1 << 20))
    check_good(PAIR, [good for _, good in results])


def job_hint(comm: Any, rank: int, _: Any) -> Any:
    size = deep_moe.Buffer.get_low_latency_rdma_size_hint(128, 2048, comm.Get_size(), 64)
    given = Case("hint", (128, 3, 0, 128), hidden=2048, experts=64, topk=8, routing="hot").inputs()
    program = Program(
        [
            LowLatencyDispatch(given, 128, hook="now"),
            LowLatencyCombine(0, hook="now"),
            LowLatencyDispatch(given, 128, weights=True),
            LowLatencyCombine(2),
        ]
    )
    buffer = BufferOptions(num_ll_bytes=size).make(comm)
    return program, execute(program, rank, [buffer])


def test_the_size_hint_has_room_for_rows_by_expert() -> None:
    results = ranks_of(SQUARE).run(job_hint)
    check_good(SQUARE, [done for _, done in results], results[0][0])


@pytest.mark.parametrize(("world", "network"), OVER_BOTH)
def test_logarithms(world: World, network: str) -> None:
    """Bit for bit those of the CPU; calls with neither weights nor a hook send rows by expert, unlike it."""
    case = Case("codes", (31, 24, 0, 17, 9, 5, 12, 3)[: world.ranks], hidden=1152, experts=9, topk=5)
    calls: list[Call] = []
    alike = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for weights, hook in ((True, "none"), (True, "late"), (False, "late"), (False, "none")):
            calls.append(
                LowLatencyDispatch(case.but(seed=len(calls), dtype=dtype).inputs(), 32, weights=weights)
            )
            if weights or hook != "none":
                alike.append(len(calls))
            calls.append(LowLatencyCombine(len(calls) - 1, seed=len(calls), hook=hook, logfmt=True))
    on_the_cpu = one_node.run(Program(calls, [BufferOptions(device="cpu")]), world.ranks, "thread")
    for rank, (mine, theirs) in enumerate(zip(run(world, network, Program(calls)), on_the_cpu, strict=True)):
        for call in alike:
            same_bits(mine[call]["x"], theirs[call]["x"], f"rank {rank}, call {call}")


# ---- what goes wrong ----
@pytest.mark.parametrize("mode", ["dispatch", "hook", "combine"])
def test_a_sleeper_is_named_and_reset_mends(mode: str) -> None:
    (tried, again, checked, good0), (late, _, _, good1) = ranks_of(PAIR).run(failures.job_sleeper, mode)
    for one in (tried, again, checked):
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b", "low latency")
    assert late.error is None or isinstance(late.error, deep_moe.Error), late
    check_good(PAIR, [good0, good1])


def test_hooks_from_before_a_reset() -> None:
    results = ranks_of(PAIR).run(failures.job_hooks_and_reset)
    for tried, _ in results:
        for one in tried:
            one.must_be(deep_moe.Error, "reset")
    check_good(PAIR, [good for _, good in results])


@pytest.mark.parametrize("caps", [(128, 64), (12, 13)])
def test_caps_that_differ_are_named_on_both_ranks(caps: tuple[int, int]) -> None:
    results = ranks_of(PAIR).run(failures.job_other_caps, caps)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, *words(*caps))
    check_good(PAIR, [good for _, good in results])


@pytest.mark.parametrize("name", ["dispatch-combine", "handles", "fp8", "weights", "logfmt"])
def test_calls_that_differ_are_named_on_both_ranks(name: str) -> None:
    results = ranks_of(PAIR).run(failures.job_mismatch, name)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, r"rank 0\b", r"rank 1\b", "low_latency")
    check_good(PAIR, [good for _, good in results])


def test_a_late_error_is_thrown_once() -> None:
    (first, good0), (second, good1) = ranks_of(PAIR).run(failures.job_late_error)
    assert [type(error) for error in second] == [ValueError] + [type(None)] * 4, second
    assert [type(error) for error in first] == [type(None), deep_moe.PeerRefusedError] + [type(None)] * 3
    check_good(PAIR, [good0, good1])


def test_replays_honour_masks() -> None:
    results = ranks_of(LINE).run(failures.job_masked_replay)
    check_masked([whole for whole, _ in results], set())
    check_masked([part for _, part in results], {2})


def job_masked(comm: Any, rank: int, _: Any) -> Any:
    """A silent rank is masked, the others go round all slots without it, and then it takes part again."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=1.5, enable_shrink=True)
    given = failures.THREE.inputs()
    whole = failures.masked_exchange(buffer, given)
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    parts = [failures.masked_exchange(buffer, given) for _ in range(5)] if rank != 2 else [None] * 5
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    buffer.low_latency_clean_mask_buffer()
    return whole, parts, failures.masked_exchange(buffer, given)


def test_a_silent_rank_is_masked_and_comes_back() -> None:
    results = ranks_of(LINE).run(job_masked)
    check_masked([whole for whole, *_ in results], set())
    for turn in range(5):
        check_masked([parts[turn] for _, parts, _ in results], {2})
    check_masked([again for *_, again in results], set())
