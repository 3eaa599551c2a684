"""Low-latency calls on a GPU that go wrong: late ranks, other calls, lost peers; masks let others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu import test_low_latency as on_cpus
from ..cpu.test_cases_refused import CASE as REFUSED
from ..cpu.test_low_latency import CASE, GIVEN, THREE, check_masked, inputs_of, masked_exchange, send
from ..support.attempts import attempt, good_high_throughput, good_program, words
from ..support.device import captured
from ..support.gpu import World
from ..support.inputs import Inputs
from ..support.program import check, execute
from ..support.ranks import Ranks
from .test_failures import tried_to_the_end

pytestmark = pytest.mark.gpus(1)

TWO = World("thread", 2)


def world_of(form: str, ranks: int = 2) -> World:
    return World(form.removeprefix("gpu "), ranks)


def pair_of(buffer: deep_moe.Buffer, given: Inputs) -> Any:
    low = send(buffer, given)
    _, idx, weights = inputs_of(buffer, given)
    return buffer.low_latency_combine(low[0], idx, weights, low[2])[0]


# ---- late and lost ranks ----
def job_sleeper(comm: Any, rank: int, mode: str) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=0.3)
    low = send(buffer, GIVEN)
    _, idx, weights = inputs_of(buffer, GIVEN)
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: send(buffer, GIVEN),
        "hook": lambda: send(buffer, GIVEN, return_recv_hook=True)[4](),
        "combine": lambda: buffer.low_latency_combine(low[0], idx, weights, low[2]),
    }
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 1:
        time.sleep(0.7)
    tried = tried_to_the_end(buffer, calls[mode])
    again = attempt(lambda: send(buffer, GIVEN))
    checked = attempt(buffer.check)
    comm.allgather(None)
    buffer.reset()
    buffer.check()
    return tried, again, checked, execute(good_program(), rank, [buffer])


@pytest.mark.parametrize("mode", ["dispatch", "hook", "combine"])
def test_f1_sleeper_is_named_and_reset_mends(mode: str, form: str) -> None:
    (tried, again, checked, good0), (late, _, _, good1) = world_of(form).run(job_sleeper, mode)
    for one in (tried, again, checked):
        one.must_be(deep_moe.DeepMoeTimeoutError, r"rank 1\b", "low latency")
    assert 0.2 < tried.seconds < 3.0 and again.seconds < 0.3, (tried, again)
    # What rank 0 sent before it gave up has arrived.
    assert late.error is None or isinstance(late.error, deep_moe.Error), late
    check(good_program(), [good0, good1])


def job_patient(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    if rank == 1:
        time.sleep(0.7)
    return execute(good_program(), rank, [buffer])


def test_f1_longer_timeout_waits_for_the_sleeper(form: str) -> None:
    check(good_program(), world_of(form).run(job_patient))


def job_hooks_and_reset(comm: Any, rank: int, _: Any) -> Any:
    """Calls in flight do not survive a reset, and their hooks say so."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    hooks = [send(buffer, GIVEN, return_recv_hook=True)[4] for _ in range(3)]
    buffer.reset()
    tried = [attempt(hook) for hook in hooks]
    return tried, execute(good_program(), rank, [buffer])


def test_hooks_from_before_a_reset() -> None:
    results = TWO.run(job_hooks_and_reset)
    for tried, _ in results:
        for one in tried:
            one.must_be(deep_moe.Error, "reset")
    check(good_program(), [good for _, good in results])


def job_one_destroys(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10, explicitly_destroy=True)
    low = send(buffer, GIVEN)
    _, idx, weights = inputs_of(buffer, GIVEN)
    copy = low[0].clone()
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    if rank == 1:
        buffer.destroy()
    comm.allgather(None)
    lost = None
    if rank == 0:
        lost = tried_to_the_end(buffer, lambda: buffer.low_latency_combine(low[0], idx, weights, low[2]))
    buffer.destroy()
    used = attempt(lambda: send(buffer, GIVEN))
    return lost, used, bool((copy == low[0]).logical_or(copy.isnan()).all())


def test_b1_destroy_needs_no_peer(form: str) -> None:
    (lost, used0, kept0), (_, used1, kept1) = world_of(form).run(job_one_destroys)
    assert kept0 and kept1
    lost.must_be(deep_moe.PeerLostError, r"rank 1\b")
    assert lost.seconds < 5.0
    for used in (used0, used1):
        used.must_be(deep_moe.DestroyedError)


# ---- calls that differ ----
def job_other_caps(comm: Any, rank: int, caps: tuple[int, int]) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    x, idx, _ = inputs_of(buffer, REFUSED.inputs())
    tried = tried_to_the_end(
        buffer, lambda: buffer.low_latency_dispatch(x, idx, caps[rank], 16, use_fp8=False)
    )
    return tried, execute(good_program(), rank, [buffer])


@pytest.mark.parametrize("caps", [(128, 64), (12, 13)])
def test_u3_caps_that_differ_are_named_on_both_ranks(caps: tuple[int, int], form: str) -> None:
    results = world_of(form).run(job_other_caps, caps)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, *words(*caps))
    check(good_program(), [good for _, good in results])


def job_mismatch(comm: Any, rank: int, name: str) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    first = send(buffer, GIVEN)
    second = send(buffer, GIVEN, topk_weights=inputs_of(buffer, GIVEN)[2])
    x, idx, weights = inputs_of(buffer, GIVEN)
    y = second[0].nan_to_num()
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "dispatch-combine": (
            lambda: send(buffer, GIVEN),
            lambda: buffer.low_latency_combine(y, idx, weights, second[2]),
        ),
        "handles": (
            lambda: buffer.low_latency_combine(y, idx, weights, first[2]),
            lambda: buffer.low_latency_combine(y, idx, weights, second[2]),
        ),
        "fp8": (lambda: send(buffer, GIVEN), lambda: buffer.low_latency_dispatch(x, idx, 12, 8)),
        "modes": (
            lambda: send(buffer, GIVEN),
            lambda: buffer.dispatch(x, topk_idx=idx, num_experts=8, num_worst_tokens=24),
        ),
        "weights": (
            lambda: send(buffer, GIVEN),
            lambda: send(buffer, GIVEN, topk_weights=weights),
        ),
        "logfmt": (
            lambda: buffer.low_latency_combine(y, idx, weights, second[2]),
            lambda: buffer.low_latency_combine(y, idx, weights, second[2], use_logfmt=True),
        ),
    }
    return tried_to_the_end(buffer, calls[name][rank]), execute(good_program(), rank, [buffer])


@pytest.mark.parametrize("name", ["dispatch-combine", "handles", "fp8", "modes", "weights", "logfmt"])
def test_calls_that_differ_are_named_on_both_ranks(name: str) -> None:
    results = TWO.run(job_mismatch, name)
    for tried, _ in results:
        tried.must_be(deep_moe.CallMismatchError, r"rank 0\b", r"rank 1\b", "low_latency")
        assert tried.seconds < 5.0
    check(good_program(), [good for _, good in results])


def job_late_error(comm: Any, rank: int, _: Any) -> Any:
    """Nobody looks for what went wrong: each rank hears of it once, and no refusal follows another."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    x, idx, weights = inputs_of(buffer, GIVEN)
    cap = 12 if rank == 0 else 3
    low = send(buffer, GIVEN)
    torch.cuda.current_stream().synchronize()
    refused = attempt(lambda: buffer.low_latency_dispatch(x, idx, cap, 8, use_fp8=False))
    torch.cuda.current_stream().synchronize()
    tried = []
    for _ in range(4):
        tried.append(attempt(lambda: buffer.low_latency_combine(low[0], idx, weights, low[2])[0]))
        torch.cuda.current_stream().synchronize()
    return [refused.error, *(one.error for one in tried)], execute(good_program(), rank, [buffer])


def test_a_late_error_is_thrown_once() -> None:
    (first, good0), (second, good1) = TWO.run(job_late_error)
    assert [type(error) for error in second] == [ValueError] + [type(None)] * 4, second
    assert [type(error) for error in first] == [type(None), deep_moe.PeerRefusedError] + [type(None)] * 3
    check(good_program(), [good0, good1])


# ---- masks ----
@pytest.mark.parametrize("call", on_cpus.MASKS)
def test_masks_need_enable_shrink(call: str) -> None:
    on_cpus.test_masks_need_enable_shrink(call, "gpu thread")


def test_masked_rank_is_left_out(form: str) -> None:
    on_cpus.test_masked_rank_is_left_out(form)


def test_silent_rank_is_masked_instead_of_a_failure(form: str) -> None:
    on_cpus.test_silent_rank_is_masked_instead_of_a_failure(form)


def job_masked_hooks(comm: Any, rank: int, _: Any) -> Any:
    """The same by halves, by expert; and growth of the staging without the masked rank."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=5, enable_shrink=True)
    given = THREE.inputs()
    masked_exchange(buffer, given)
    result = None
    if rank != 2:
        buffer.low_latency_update_mask_buffer(2, True)
        x, idx, weights = inputs_of(buffer, given)
        low = buffer.low_latency_dispatch(x, idx, 1000, 9, use_fp8=False, return_recv_hook=True)
        low[4]()
        back = buffer.low_latency_combine(low[0], idx, weights, low[2], return_recv_hook=True)
        back[2]()
        refused = attempt(lambda: buffer.dispatch(x, topk_idx=idx, num_experts=9))
        result = on_cpus.packed(low[0], low[1]), low[1], back[0], refused
    comm.allgather(None)
    buffer.low_latency_update_mask_buffer(0 if rank else 1, False)
    return result, masked_exchange(buffer, given), execute(good_high_throughput(3), rank, [buffer])


def test_masked_rank_is_left_out_by_halves_and_of_growth() -> None:
    results = World("thread", 3).run(job_masked_hooks)
    halves = [part and (*part[:3], [0, 0, 1]) for part, *_ in results]
    check_masked(halves, {2}, pre_reduced=False)
    for part, *_ in results[:2]:
        part[3].must_be(deep_moe.Error, "masked", "low_latency_clean_mask_buffer")
    check_masked([whole for _, whole, _ in results], set())
    check(good_high_throughput(3), [good for *_, good in results])


def job_masked_replay(comm: Any, rank: int, _: Any) -> Any:
    """Graphs captured before honour a mask that comes later."""
    buffer = deep_moe.Buffer(None, 64 << 20, comm=comm, timeout=5, enable_shrink=True)
    given = THREE.inputs()
    x, idx, weights = inputs_of(buffer, given)

    def layer() -> Any:
        low = buffer.low_latency_dispatch(x, idx, 12, 9, use_fp8=False)
        return low[0], low[1], buffer.low_latency_combine(low[0], idx, weights, low[2])[0]

    graph, outputs = captured(comm, rank, layer)
    seen = []
    for masked in (False, True):
        if masked and rank != 2:
            buffer.low_latency_update_mask_buffer(2, True)
        if not masked or rank != 2:
            graph.replay()
        mask = torch.zeros(3, dtype=torch.int32, device="cuda")
        buffer.low_latency_query_mask_buffer(mask)
        rows = on_cpus.packed(outputs[0], outputs[1])
        seen.append((rows, outputs[1].clone(), outputs[2].clone(), mask.tolist()))
    torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    return seen


def test_replays_honour_masks() -> None:
    results = World("thread", 3).run(job_masked_replay)
    check_masked([whole for whole, _ in results], set())
    check_masked([part for _, part in results], {2})


def test_killed_rank_is_masked() -> None:
    """The process of rank 2 ends in the midst: the others mask it when they notice, before the deadline."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=15, enable_shrink=True)
        masked_exchange(buffer, THREE.inputs())
        comm.allgather(None)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        tried = [attempt(lambda: masked_exchange(buffer, THREE.inputs())) for _ in range(3)]
        torch.cuda.current_stream().synchronize()
        return tried

    with Ranks(rank_main, 3, "gpu process") as ranks:
        outcomes = ranks.wait(40)
    assert outcomes[0].error is None and outcomes[1].error is None, outcomes[:2]
    for which in range(3):
        attempts = [outcomes[rank].value[which] for rank in range(2)]
        assert all(one.error is None and one.seconds < 10.0 for one in attempts), attempts
        check_masked([*(one.value for one in attempts), None], {2})


def test_case_of_this_file_sends_to_every_rank() -> None:
    """What the tests above rely on."""
    for idx in CASE.inputs().topk_idx:
        assert bool((idx < 4).any()) and bool((idx >= 4).any())
