"""Ranks that are late, make other calls, raise, are interrupted, or fork."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import attempt, good_program, words
from ..support.device import where
from ..support.inputs import Case, Inputs
from ..support.program import check, execute
from ..support.ranks import Ranks, run_ranks
from ..support.system import Flag
from ..support.wire import dumps, loads
from .test_cases_life import python

CASE = Case("failures", (12, 12))
ROOT = Path(__file__).parents[2]


def fused(buffer: deep_moe.Buffer, given: Inputs) -> Any:
    rank = buffer.rank
    return buffer.dispatch(
        where(buffer, given.x[rank]),
        topk_idx=where(buffer, given.topk_idx[rank]),
        topk_weights=where(buffer, given.topk_weights[rank]),
        num_experts=given.experts,
    )


def low(buffer: deep_moe.Buffer, given: Inputs, cap: int = 12, **options: Any) -> Any:
    rank = buffer.rank
    return buffer.low_latency_dispatch(
        given.x[rank], given.topk_idx[rank], cap, given.experts, use_fp8=False, **options
    )


# ---- late ranks ----
@pytest.mark.parametrize("mode", ["dispatch", "combine", "low_latency_dispatch", "low_latency_combine"])
def test_f1_sleeper_is_named_and_reset_mends(mode: str, form: str) -> None:
    """The timeout is shorter than the sleep: rank 0 names rank 1 and the phase; reset() on both mends it."""
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=0.8)
        sent, packed = fused(buffer, given), low(buffer, given)
        idx, weights = given.topk_idx[rank], given.topk_weights[rank]
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: fused(buffer, given),
            "combine": lambda: buffer.combine(sent[0], sent[4]),
            "low_latency_dispatch": lambda: low(buffer, given),
            "low_latency_combine": lambda: buffer.low_latency_combine(packed[0], idx, weights, packed[2]),
        }
        comm.allgather(None)
        if rank == 1:
            time.sleep(1.8)
        tried = attempt(calls[mode])
        tried.value = None
        again = attempt(lambda: fused(buffer, given))
        checked = attempt(buffer.check)
        comm.allgather(None)
        buffer.reset()
        buffer.check()
        return tried, again, checked, execute(good_program(), rank, [buffer])

    (tried, again, checked, good0), (late, late_again, _, good1) = run_ranks(rank_main, 2, form=form)
    for one in (tried, again, checked):
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b", mode)
    assert 0.7 < tried.seconds < 5.0 and again.seconds < 0.7, (tried, again)
    if not mode.startswith("low_latency"):  # there the late rank finds all it needs, sent before it came
        late.must_be(deep_moe.Error)
    late_again.must_be(deep_moe.Error)
    check(good_program(), [good0, good1])


def test_f1_longer_timeout_waits_for_the_sleeper(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        if rank == 1:
            time.sleep(0.7)
        return execute(good_program(), rank, [buffer])

    check(good_program(), run_ranks(rank_main, 2, form=form))


def test_f1_late_hook_names_who_is_waited_for(form: str) -> None:
    """The sleeper has not even sent when the hook of rank 0 is called."""
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=0.5)
        low(buffer, given)  # the staging is there from now on
        comm.allgather(None)
        if rank == 1:
            time.sleep(1.2)
        result = attempt(lambda: low(buffer, given, return_recv_hook=True))
        tried = attempt(result.value[4]) if result.value else result
        tried.value = None
        comm.allgather(None)
        buffer.reset()
        return tried, execute(good_program(), rank, [buffer])

    (tried, good0), (_, good1) = run_ranks(rank_main, 2, form=form)
    tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b", "low_latency_dispatch")
    check(good_program(), [good0, good1])


def test_f1_reset_itself_times_out_where_a_rank_stays_away(form: str) -> None:
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=0.4)
        tried = [attempt(lambda: fused(buffer, given)), attempt(buffer.reset)] if rank == 0 else []
        comm.allgather(None)
        buffer.reset()
        return tried, execute(good_program(), rank, [buffer])

    (tried, good0), (_, good1) = run_ranks(rank_main, 2, form=form)
    for one in tried:
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b")
    check(good_program(), [good0, good1])


# ---- calls that differ ----
WIDE = CASE.but(hidden=1024).inputs()
MORE_EXPERTS = CASE.but(experts=24).inputs()
OTHER_TYPE = CASE.but(dtype=torch.float16).inputs()
OTHER_TOPK = CASE.but(topk=5).inputs()
USUAL = CASE.inputs()

MISMATCHES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any], list[str]]] = {
    # (what rank 0 calls, what rank 1 calls, what both must read); calls get (buffer, an earlier dispatch)
    "dispatch-combine": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: buffer.combine(sent[0], sent[4]),
        ["dispatch", "combine"],
    ),
    "dispatch-cached": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: buffer.dispatch(USUAL.x[1], handle=sent[4]),
        ["dispatch", "cached|handle"],
    ),
    "dispatch-low-latency": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: low(buffer, USUAL),
        ["dispatch", "low_latency_dispatch"],
    ),
    "hidden": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: fused(buffer, WIDE),
        ["512|1024", "1024|2048"],
    ),
    "experts": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: fused(buffer, MORE_EXPERTS),
        ["16", "24"],
    ),
    "topk": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: fused(buffer, OTHER_TOPK),
        ["4", "5"],
    ),
    "type": (
        lambda buffer, sent: fused(buffer, USUAL),
        lambda buffer, sent: fused(buffer, OTHER_TYPE),
        ["bfloat16", "float16"],
    ),
    "low-latency-hidden": (
        lambda buffer, sent: low(buffer, USUAL),
        lambda buffer, sent: low(buffer, WIDE),
        ["512|1024", "1024|2048"],
    ),
    "weights-or-not": (
        lambda buffer, sent: buffer.combine(sent[0], sent[4], topk_weights=sent[2]),
        lambda buffer, sent: buffer.combine(sent[0], sent[4]),
        ["combine"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_differ_are_named_on_both_ranks(name: str, form: str) -> None:
    *calls, says = MISMATCHES[name]

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        sent = fused(buffer, USUAL)
        tried = attempt(lambda: calls[rank](buffer, sent))
        tried.value = None
        return tried, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, *says, r"rank [01]\b")
        assert tried.seconds < 5.0
    check(good_program(), [good for _, good in results])


def test_too_many_calls_in_flight_are_refused_before_sending(form: str) -> None:
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        flying = [low(buffer, given, return_recv_hook=True) for _ in range(3)]
        fourth = attempt(lambda: low(buffer, given, return_recv_hook=True))
        for one in flying:
            one[4]()
        twice = attempt(flying[0][4])
        comm.allgather(None)
        return fourth, twice, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for fourth, twice, _ in results:
        fourth.must_be(deep_moe.Error, *words(3))
        twice.must_be(RuntimeError, "hook")
        assert fourth.seconds < 5.0
    check(good_program(), [good for _, _, good in results])


# ---- ranks that raise, leave, are interrupted ----
TWO_RANKS = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from multiprocessing import Pipe
import torch, deep_moe
from tests.support.ranks import PipeComm

def rank_main(comm):
    buffer = deep_moe.Buffer(None, comm=comm, timeout=4)
    x, idx = torch.ones(4, 16), torch.tensor([[0], [1], [0], [1]])
    received = buffer.dispatch(x, topk_idx=idx, num_experts=2)
    if comm.Get_rank() == 1:
        raise ValueError("on purpose")
    try:
        buffer.dispatch(x, topk_idx=idx, num_experts=2)
    except deep_moe.Error as error:
        print(type(error).__name__, error)
    globals()["kept"] = buffer, received  # alive while the interpreter ends
"""
AS_PROCESSES = """
ends = Pipe()
child = os.fork()
rank = 0 if child else 1
rank_main(PipeComm(rank, 2, [ends[rank]]))
os.waitpid(child, 0)
"""
AS_THREADS = """
threads = [threading.Thread(target=rank_main, args=(comm,)) for comm in deep_moe.thread_comms(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.parametrize("form", [AS_PROCESSES, AS_THREADS], ids=["process", "thread"])
def test_f3_exception_on_one_rank_and_exit_without_destroy(form: str, shared_memory: None) -> None:
    started = time.monotonic()
    done = python(TWO_RANKS + form)
    assert done.returncode == 0, done.stderr
    assert "on purpose" in done.stderr and "rank 1" in done.stdout, (done.stdout, done.stderr)
    assert time.monotonic() - started < 40.0


def test_waiting_can_be_interrupted() -> None:
    """Ctrl-C ends a wait for a peer, long before the time-out, and the rank can go on."""
    given = CASE.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        buffer = deep_moe.Buffer(None, comm=comm, timeout=60)
        comm.allgather(None)
        started = time.monotonic()
        interrupted = False
        if rank == 0:
            waiting.up()
            try:
                fused(buffer, given)
            except KeyboardInterrupt:
                interrupted = True
        comm.allgather(None)
        return interrupted, time.monotonic() - started

    with Flag() as waiting, Ranks(rank_main, 2) as ranks:
        waiting.wait(1)
        time.sleep(0.3)
        ranks.kill(0, signal.SIGINT)
        outcomes = ranks.wait(30)
    interrupted, seconds = outcomes[0].value
    assert interrupted and seconds < 5.0, outcomes[0]


# ---- forked children ----
def test_forked_child_may_not_use_the_buffer_and_does_no_harm() -> None:
    given = CASE.inputs()

    def in_child(buffer: deep_moe.Buffer, tensors: list[Any]) -> bytes:
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: fused(buffer, given),
            "combine": lambda: buffer.combine(tensors[0][0], tensors[0][4]),
            "low_latency_dispatch": lambda: low(buffer, given),
            "reset": buffer.reset,
            "empty": lambda: buffer.empty((4,), torch.float32),
        }
        tried = {name: attempt(call) for name, call in calls.items()}
        tensors.clear()  # frees heap tensors in the wrong process
        gc.collect()
        attempt(buffer.destroy)
        return dumps(tried)

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        tensors = [fused(buffer, given), buffer.empty((64,), torch.float32).fill_(rank)]
        rows = tensors[0][0].clone()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, in_child(buffer, tensors))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            tried = loads(file.read())
        os.waitpid(pid, 0)
        unharmed = torch.equal(rows, tensors[0][0]) and bool((tensors[1] == rank).all())
        return tried, unharmed, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2)
    for tried, unharmed, _ in results:
        assert unharmed
        for name, one in tried.items():
            assert isinstance(one.error, deep_moe.ForkedProcessError), f"{name}: {one}"
    check(good_program(), [good for _, _, good in results])


def test_forked_child_can_make_buffers_of_its_own() -> None:
    """After a fork from a process that has a Buffer, the children are new ranks like any others."""

    def rank_main(comm: Any, rank: int) -> Any:
        (alone,) = deep_moe.thread_comms(1)
        outer = deep_moe.Buffer(None, comm=alone)
        inner = run_ranks(lambda c, r: execute(good_program(), r, [deep_moe.Buffer(None, comm=c)]), 2)
        check(good_program(), inner)
        return execute(good_program(1), 0, [outer])

    check(good_program(1), [run_ranks(rank_main, 1)[0]])
