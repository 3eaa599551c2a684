"""Ranks on a GPU that are late or make other calls: errors that name them, and reset(), which mends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu.test_failures import CASE, MORE_EXPERTS, OTHER_TOPK, OTHER_TYPE, USUAL, WIDE, fused
from ..support.attempts import Attempt, attempt, good_high_throughput
from ..support.gpu import World, on_gpu
from ..support.inputs import Inputs
from ..support.program import check, execute

pytestmark = pytest.mark.gpus(1)

TWO = World("thread", 2)
WAIT = r"(announcement|counts|rows|read|dispatch|combine)"


def world_of(form: str) -> World:
    return World(form.removeprefix("gpu "), 2)


def tried_to_the_end(buffer: deep_moe.Buffer, call: Callable[[], Any]) -> Attempt:
    """The call, its work on the GPU, and what that reports: not every call waits for its own work."""

    def whole() -> None:
        call()
        torch.cuda.current_stream().synchronize()
        buffer.check()

    return attempt(whole)


def job_sleeper(comm: Any, rank: int, mode: str) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=0.3)
    given = CASE.inputs()
    sent = fused(buffer, given)
    x = on_gpu(given.x[rank])
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: fused(buffer, given),
        "cached": lambda: buffer.dispatch(x, handle=sent[4]),
        "worst": lambda: buffer.dispatch(
            x, topk_idx=on_gpu(given.topk_idx[rank]), num_experts=16, num_worst_tokens=24
        ),
        "combine": lambda: buffer.combine(sent[0], sent[4]),
    }
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 1:
        time.sleep(0.7)
    tried = tried_to_the_end(buffer, calls[mode])
    again = attempt(lambda: fused(buffer, given))
    checked = attempt(buffer.check)
    comm.allgather(None)
    buffer.reset()
    buffer.check()
    return tried, again, checked, execute(good_high_throughput(), rank, [buffer])


@pytest.mark.parametrize("mode", ["dispatch", "cached", "worst", "combine"])
def test_f1_sleeper_is_named_and_reset_mends(mode: str, form: str) -> None:
    """The timeout is shorter than the sleep: rank 0 names rank 1 and the phase; reset() on both mends it."""
    (tried, again, checked, good0), (late, late_again, _, good1) = world_of(form).run(job_sleeper, mode)
    for one in (tried, again, checked):
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b", WAIT)
    assert 0.2 < tried.seconds < 3.0 and again.seconds < 0.3, (tried, again)
    late.must_be(deep_moe.Error)
    late_again.must_be(deep_moe.Error)
    check(good_high_throughput(), [good0, good1])


def job_patient(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    if rank == 1:
        time.sleep(0.7)
    return execute(good_high_throughput(), rank, [buffer])


def test_f1_longer_timeout_waits_for_the_sleeper(form: str) -> None:
    check(good_high_throughput(), world_of(form).run(job_patient))


def job_reset_alone(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=0.4)
    tried = []
    if rank == 0:
        tried = [attempt(lambda: fused(buffer, USUAL)), attempt(buffer.reset)]
    comm.allgather(None)
    buffer.reset()
    return tried, execute(good_high_throughput(), rank, [buffer])


def test_f1_reset_itself_times_out_where_a_rank_stays_away(form: str) -> None:
    (tried, good0), (_, good1) = world_of(form).run(job_reset_alone)
    for one in tried:
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b")
    check(good_high_throughput(), [good0, good1])


def job_many_resets(comm: Any, rank: int, rounds: int) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=0.2)
    good = []
    for turn in range(rounds):
        late = turn % 2
        if rank == late:
            time.sleep(0.35)
        tried = tried_to_the_end(buffer, lambda: fused(buffer, USUAL))
        assert isinstance(tried.error, deep_moe.Error), tried
        comm.allgather(None)
        buffer.reset()
        good.append(execute(good_high_throughput(), rank, [buffer]))
    return good, buffer.memory_stats()


def test_reset_again_and_again() -> None:
    """Each rank is late in turn; every reset gives a Buffer that works, and all of its memory."""
    results = TWO.run(job_many_resets, 4)
    for turn in range(4):
        check(good_high_throughput(), [good[turn] for good, _ in results])
    for _, stats in results:
        assert stats["quarantined_bytes"] == 0, stats


def job_late_call(comm: Any, rank: int, _: Any) -> Any:
    """The sleeper calls when the other has given up and uses its memory for other things."""
    buffer = deep_moe.Buffer(None, 16 << 20, comm=comm, timeout=0.4)
    rows = fused(buffer, USUAL)[0]
    tensors = [rows, *filled(buffer, 3)]
    copies = [tensor.clone() for tensor in tensors]
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 1:
        time.sleep(0.8)
    tried = tried_to_the_end(buffer, lambda: fused(buffer, USUAL))
    comm.allgather("awake, and its call has ended")
    time.sleep(0.1)
    damage = [
        number for number, (one, copy) in enumerate(zip(tensors, copies, strict=True)) if changed(one, copy)
    ]
    buffer.reset()
    new = filled(buffer, 12)
    good = execute(good_high_throughput(), rank, [buffer])
    damage += [number for number, one in enumerate(new) if bool((one != number + 17).any())]
    return tried, damage, good


def filled(buffer: deep_moe.Buffer, count: int) -> list[torch.Tensor]:
    return [buffer.empty((257 * 1024 + number,), torch.uint8).fill_(number + 17) for number in range(count)]


def changed(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return not torch.equal(tensor, copy)


def test_sleeping_rank_that_calls_late_changes_no_live_tensor(form: str) -> None:
    (tried, damage0, good0), (late, damage1, good1) = world_of(form).run(job_late_call)
    tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b")
    late.must_be(deep_moe.Error)
    assert not damage0 and not damage1
    check(good_high_throughput(), [good0, good1])


# What rank 0 calls, what rank 1 calls, what both must read: inputs of a dispatch, or a call along a handle.
MISMATCHES: dict[str, tuple[Any, Any, list[str]]] = {
    "dispatch-combine": (USUAL, "combine", ["dispatch", "combine"]),
    "dispatch-cached": (USUAL, "cached", ["dispatch", "cached|handle"]),
    "hidden": (USUAL, WIDE, ["512|1024", "1024|2048"]),
    "experts": (USUAL, MORE_EXPERTS, ["16", "24"]),
    "topk": (USUAL, OTHER_TOPK, ["4", "5"]),
    "type": (USUAL, OTHER_TYPE, ["bfloat16", "float16"]),
    "weights-or-not": ("combine with weights", "combine", ["combine"]),
}


def job_mismatch(comm: Any, rank: int, name: str) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    sent = fused(buffer, USUAL)
    mine = MISMATCHES[name][rank]

    def call() -> Any:
        if isinstance(mine, Inputs):
            return fused(buffer, mine)
        if mine == "cached":
            return buffer.dispatch(on_gpu(USUAL.x[rank]), handle=sent[4])
        return buffer.combine(sent[0], sent[4], topk_weights=sent[2] if mine.endswith("weights") else None)

    return tried_to_the_end(buffer, call), execute(good_high_throughput(), rank, [buffer])


@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_differ_are_named_on_both_ranks(name: str, form: str) -> None:
    results = world_of(form).run(job_mismatch, name)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, *MISMATCHES[name][2], r"rank [01]\b")
        assert tried.seconds < 5.0
    check(good_high_throughput(), [good for _, good in results])


def job_destroyed(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10, explicitly_destroy=True)
    sent = fused(buffer, USUAL)
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    buffer.destroy()
    buffer.destroy()
    x, idx = on_gpu(USUAL.x[rank]), on_gpu(USUAL.topk_idx[rank])
    calls: dict[str, Callable[[], Any]] = {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, 16),
        "dispatch": lambda: buffer.dispatch(x, topk_idx=idx, num_experts=16),
        "cached dispatch": lambda: buffer.dispatch(x, handle=sent[4]),
        "combine": lambda: buffer.combine(sent[0], sent[4]),
        "empty": lambda: buffer.empty((2, 2), torch.float32),
        "get_local_buffer_tensor": lambda: buffer.get_local_buffer_tensor(torch.uint8),
        "memory_stats": buffer.memory_stats,
        "reset": buffer.reset,
        "check": buffer.check,
    }
    return {name: attempt(call) for name, call in calls.items()}


def test_b1_destroy_twice_and_use_after_destroy(form: str) -> None:
    for tried in world_of(form).run(job_destroyed):
        for name, one in tried.items():
            assert isinstance(one.error, deep_moe.DestroyedError), f"{name}: {one}"
            assert "destroy" in str(one.error), f"{name}: {one.error}"


def job_one_destroys(comm: Any, rank: int, _: Any) -> Any:
    """Destroying is local: the other keeps its rows, and learns at once that it is alone."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    sent = fused(buffer, USUAL)
    copy = sent[0].clone()
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 1:
        buffer.destroy()
    comm.allgather(None)
    lost = tried_to_the_end(buffer, lambda: buffer.combine(sent[0], sent[4])) if rank == 0 else None
    buffer.destroy()
    return lost, torch.equal(copy, sent[0])


def test_b1_destroy_needs_no_peer(form: str) -> None:
    (lost, kept0), (_, kept1) = world_of(form).run(job_one_destroys)
    assert kept0 and kept1
    lost.must_be(deep_moe.PeerLostError, r"rank 1\b")
    assert lost.seconds < 5.0
