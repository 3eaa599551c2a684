"""GPU ranks whose nodes exchange over NVSHMEM: on one machine, and, in earnest but for the GPU, on several.

DEEP_MOE_HOST_ID puts ranks of this host on different machines: their hosts speak over TCP, rows go over
NVSHMEM, and nothing else is shared. NVSHMEM reaches the one GPU that the processes share by itself.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..cpu.test_cases_round_trip import HIGH_THROUGHPUT, high_throughput
from ..cpu.test_failures import fused
from ..cpu.test_models import MODELS, TOKENS, model_inputs
from ..cpu.test_nodes import SQUARE, World
from ..support.attempts import Attempt, attempt, attempt_when_late, good_high_throughput, good_program, words
from ..support.device import on_gpu
from ..support.gpu import World as Gpu
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.nvshmem import needs_nvshmem, over_nvshmem
from ..support.program import Program, check, cut_into_nodes, execute
from ..support.ranks import NoAnswerError, Ranks, run_ranks
from ..support.system import Flag
from .test_crashes import until_it_fails
from .test_low_latency import every_kind

pytestmark = pytest.mark.gpus(1)

WORLDS = [World(2, 1), SQUARE, World(4, 1), World(2, 4), World(4, 2), World(8, 1)]
FOUR = Gpu("process", 4, exact=True)  # on two machines that is the network without being asked for
GIVEN = Case("given", (60, 50, 40, 30), topk=6).inputs()


@pytest.fixture(autouse=True)
def nvshmem() -> None:
    needs_nvshmem()


def across(
    comm: Any, local_ranks: int = 2, *args: Any, timeout: float = 20, **options: Any
) -> deep_moe.Buffer:
    """A Buffer whose nodes are on machines of their own."""
    with cut_into_nodes(comm, local_ranks, machines=True):
        return deep_moe.Buffer(None, *args, comm=comm, timeout=timeout, **options)


def good(results: Any, ranks: int = 4) -> None:
    check(replace(good_high_throughput(ranks), local_ranks=2), results)


# ---- rows ----
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT[::20], ids=str)
def test_nodes_of_one_machine(case: Case, world: World) -> None:
    """Buffers one after the other, which take the same memory of NVSHMEM."""
    over_nvshmem(world.ranks).run_program(world.program(high_throughput(world.case(case))))


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_two_machines(case: Case) -> None:
    program = replace(SQUARE.program(high_throughput(SQUARE.case(case))), machines=True)
    FOUR.run_program(program)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("case", HIGH_THROUGHPUT[4::20], ids=str)
def test_machines(case: Case, world: World) -> None:
    program = replace(world.program(high_throughput(world.case(case))), machines=True)
    over_nvshmem(world.ranks).run_program(program)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_models(model: dict[str, Any]) -> None:
    given = model_inputs(model, TOKENS[: SQUARE.ranks])
    calls = [Dispatch(given), Combine(0), Dispatch(given, path="fused"), Combine(2, seed=1)]
    FOUR.run_program(replace(SQUARE.program(Program(calls)), machines=True))


def job_repeat(comm: Any, rank: int, _: None) -> Any:
    buffer = across(comm)
    rows = []
    for _ in range(3):
        sent = fused(buffer, GIVEN)
        rows.append((sent[0].clone(), *buffer.combine(sent[0], sent[4], topk_weights=sent[2])[:2]))
    return rows


def test_results_repeat_bit_for_bit() -> None:
    for rows in FOUR.run(job_repeat):
        for again in rows[1:]:
            assert all(torch.equal(one, other) for one, other in zip(rows[0], again, strict=True))


def job_order(comm: Any, rank: int, order: str) -> Any:
    os.environ["DEEP_MOE_HOST_ID"] = order[rank]
    try:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    finally:
        del os.environ["DEEP_MOE_HOST_ID"]
    place = buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()
    sent = fused(buffer, GIVEN)
    return place, sent[0], buffer.combine(sent[0], sent[4])[0]


@pytest.mark.parametrize("order", ["abab", "baab"])
def test_ranks_in_any_order_over_the_machines(order: str) -> None:
    nodes = [int(name != order[0]) for name in order]
    received = reference.dispatch(GIVEN.x, GIVEN.topk_idx, GIVEN.experts, GIVEN.topk_weights)
    in_rank = [reference.layout(idx, GIVEN.experts, 4).is_token_in_rank for idx in GIVEN.topk_idx]
    sums = reference.combine([one.x for one in received], in_rank, nodes=nodes)
    for rank, (place, rows, combined) in enumerate(FOUR.run(job_order, order)):
        assert place == (2, nodes[rank])
        assert torch.equal(rows, received[rank].x) and torch.equal(combined, sums[rank][0])


# ---- what all hosts do together ----
def job_grow(comm: Any, rank: int, _: None) -> Any:
    buffer = across(comm, 2, 4096)
    grown = execute(growing(), rank, [buffer])
    return grown, buffer.memory_stats()


def growing() -> Program:
    given = Case("grow", (300, 0, 120, 77), hidden=1024, topk=6, experts=16).inputs()
    return Program([Dispatch(given), Combine(0), CachedDispatch(0, given.case.rows(3)), Combine(0, seed=2)])


def test_heaps_grow_together() -> None:
    """What arrives does not fit: all ranks learn it, on all machines, and rows move once there is room."""
    check(replace(growing(), local_ranks=2), [grown for grown, _ in FOUR.run(job_grow)])


def job_full(comm: Any, rank: int, _: None) -> Any:
    # A Buffer over the network takes 32 MiB of its heap for low latency, when it is made.
    os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str((100 if rank != 2 else 35) << 20)
    try:
        buffer = across(comm)
        tried = attempt(lambda: fused(buffer, Case("full", (400,) * 4, hidden=2048, experts=8).inputs()))
    finally:
        del os.environ["DEEP_MOE_MAX_HEAP_BYTES"]
    return tried, execute(good_high_throughput(4), rank, [buffer])


def test_a_heap_that_cannot_grow_is_named_on_all_machines() -> None:
    results = FOUR.run(job_full)
    for tried, _ in results:
        tried.must_be(deep_moe.BufferTooSmallError, "DEEP_MOE_MAX_HEAP_BYTES")
    good([one for _, one in results])


def job_refused(comm: Any, rank: int, _: None) -> Any:
    buffer = across(comm)
    tried = []
    for bad in range(4):
        if rank == bad:
            x, idx = on_gpu(GIVEN.x[rank]), on_gpu(GIVEN.topk_idx[rank])
            tried.append(attempt(lambda: buffer.dispatch(x, topk_idx=idx)))  # noqa: B023
        else:
            tried.append(attempt(lambda: fused(buffer, GIVEN)))
    return tried, execute(good_high_throughput(4), rank, [buffer])


def test_a_refusal_is_heard_on_all_machines() -> None:
    results = FOUR.run(job_refused)
    for rank, (tried, _) in enumerate(results):
        for bad, one in enumerate(tried):
            one.must_be(ValueError if rank == bad else deep_moe.PeerRefusedError, "num_experts")
    good([one for _, one in results])


def job_mismatch(comm: Any, rank: int, _: None) -> Any:
    buffer = across(comm)
    usual = Case("usual", (9, 6, 5, 8), experts=8, topk=3)
    given = (usual.but(hidden=1024) if rank == 3 else usual).inputs()
    return attempt(lambda: fused(buffer, given)), execute(good_high_throughput(4), rank, [buffer])


def test_another_call_on_one_machine_is_noticed_by_all() -> None:
    results = FOUR.run(job_mismatch)
    for rank, (tried, _) in enumerate(results):
        named = rf"rank {3 if rank < 3 else '[0-2]'}\b"
        tried.must_be(deep_moe.CallMismatchError, named, "dispatch", "2048", "1024")
    good([one for _, one in results])


def job_late(comm: Any, rank: int, late: str) -> Any:
    buffer = across(comm, timeout=1.5)
    sent = fused(buffer, GIVEN)
    calls = {"dispatch": lambda: fused(buffer, GIVEN), "combine": lambda: buffer.combine(sent[0], sent[4])}
    tried = attempt_when_late(comm, buffer, calls[late], 3.5 if rank == 3 else 0)
    return tried, execute(good_high_throughput(4), rank, [buffer])


@pytest.mark.parametrize("late", ["dispatch", "combine"])
def test_a_late_rank_fails_all_machines_and_reset_mends(late: str) -> None:
    results = FOUR.run(job_late, late)
    for tried, _ in results[:3]:
        tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 3\b")
    good([one for _, one in results])


def job_destroy(comm: Any, rank: int, _: None) -> Any:
    buffer = across(comm)
    fused(buffer, GIVEN)
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 0:
        return buffer.destroy()
    return until_it_fails(buffer, GIVEN.case)


def test_a_destroyed_buffer_is_heard_of_on_all_machines() -> None:
    for rank, tried in enumerate(FOUR.run(job_destroy)):
        if rank > 0:
            tried.must_be(deep_moe.PeerLostError, "rank [012]")
            assert tried.seconds < 5
    assert FOUR.run(job_destroy)[3].error is not None  # and the next Buffer takes the same memory


def test_a_killed_rank_is_named_on_all_machines() -> None:
    """(What lies in /dev/shm is not looked at: NVSHMEM and the driver leave files of their own there.)"""
    with Flag() as started:

        def rank_main(comm: Any, rank: int) -> Any:
            buffer = across(comm, timeout=20)
            fused(buffer, GIVEN)
            torch.cuda.current_stream().synchronize()
            started.up()
            tried = until_it_fails(buffer, GIVEN.case)
            failed_at = time.monotonic()
            buffer.destroy()
            return tried, failed_at

        with Ranks(rank_main, 4, "gpu process") as ranks:
            started.wait(4, 40)
            time.sleep(random.Random(3).uniform(0.0, 0.3))
            ranks.kill(3)
            killed_at = time.monotonic()
            outcomes = ranks.wait(40)
    assert isinstance(outcomes[3].error, NoAnswerError), outcomes[3]
    for rank, outcome in enumerate(outcomes[:3]):
        assert outcome.error is None, f"rank {rank}: {outcome}"
        tried, failed_at = outcome.value
        assert isinstance(tried.error, deep_moe.PeerLostError), tried
        assert failed_at - killed_at < 8.0


# ---- who is where ----
def job_log(comm: Any, rank: int, local_ranks: int) -> Any:
    os.environ["DEEP_MOE_LOG"] = "1"
    before = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            across(comm, local_ranks)
        finally:
            os.dup2(before, 2)
            os.close(before)
            del os.environ["DEEP_MOE_LOG"]
        file.seek(0)
        return file.read()


def test_the_log_says_how_ranks_reach_each_other() -> None:
    for rank, text in enumerate(FOUR.run(job_log, 2)):
        (line,) = [line for line in text.splitlines() if line.startswith("deep_moe: ")]
        assert f"rank {rank} " in line and f"node {rank // 2} of 2" in line
        for part in ("network: NVSHMEM 3.4", "over TCP by ", "NVSHMEM_REMOTE_TRANSPORT=none"):
            assert part in line, line


def job_both_modes(comm: Any, rank: int, ranks_a_machine: int) -> Any:
    buffer = across(comm, ranks_a_machine, 0, 64 << 20, low_latency_mode=True)
    return execute(every_kind(4), rank, [buffer])


@pytest.mark.parametrize("ranks_a_machine", [1, 2])
def test_both_modes_and_all_payloads_on_one_buffer(ranks_a_machine: int) -> None:
    results = FOUR.run(job_both_modes, ranks_a_machine)
    check(replace(every_kind(4), local_ranks=ranks_a_machine), results)


def placed(comm: Any, rank: int, environment: list[dict[str, str]]) -> Attempt:
    """A Buffer with these variables, by rank."""
    os.environ.update(environment[rank])
    try:
        return attempt(lambda: fused(deep_moe.Buffer(None, comm=comm, timeout=20), GIVEN) and None)
    finally:
        for name in environment[rank]:
            del os.environ[name]


@pytest.mark.parametrize(
    ("hosts", "more", "kind", "patterns"),
    [
        ("aaab", {}, ValueError, ("equally many", r"nodes of 3, 1\b")),
        (
            "aabb",
            {"DEEP_MOE_NODE": "rack"},
            deep_moe.UnavailableError,
            ("one node", "two machines", *words(0, 2)),
        ),
        ("aabb", {"DEEP_MOE_NETWORK": "mapped"}, ValueError, ("DEEP_MOE_NETWORK=mapped",)),
        ("aabb", {"DEEP_MOE_SOCKET_IFNAME": "none0"}, Exception, ("DEEP_MOE_SOCKET_IFNAME", "none0")),
    ],
)
def test_machines_that_do_not_fit_are_refused_everywhere(
    hosts: str, more: dict[str, str], kind: type[Exception], patterns: tuple[str, ...]
) -> None:
    environment = [{"DEEP_MOE_HOST_ID": host} | more for host in hosts]
    for tried in Gpu("process", 4).run(placed, environment):
        tried.must_be(kind, *patterns)


# ---- without NVSHMEM ----
def job_without(comm: Any, rank: int, _: None) -> Any:
    buffer = deep_moe.Buffer(None, num_rdma_bytes=64 << 20, low_latency_mode=True, comm=comm, timeout=20)
    ordinary = execute(good_program(2), rank, [buffer])
    return ordinary, attempt(lambda: across(comm, 1))


def test_without_nvshmem_one_line_names_the_package() -> None:
    """Both modes work inside a node."""
    none = Gpu("process", 2, (("DEEP_MOE_NVSHMEM_PLUGIN", "/nonexistent/plugin.so"),), exact=True)
    results = none.run(job_without)
    check(good_program(2), [ordinary for ordinary, _ in results])
    for _, tried in results:
        tried.must_be(deep_moe.UnavailableError, "nvidia-nvshmem-cu1[23]>=3.4.5,<3.5")
        assert len(str(tried.error).splitlines()) == 1


def test_one_rank_without_nvshmem_is_named_on_all() -> None:
    def rank_main(comm: Any, rank: int) -> Attempt:
        if rank == 1:
            os.environ["DEEP_MOE_NVSHMEM_PLUGIN"] = "/nonexistent/plugin.so"
        return attempt(lambda: across(comm, 1))

    for rank, tried in enumerate(run_ranks(rank_main, 2, form="gpu process")):
        tried.must_be(
            deep_moe.UnavailableError, "nvidia-nvshmem", *([] if rank == 1 else ["rank 1 could not"])
        )
