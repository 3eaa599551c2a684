"""Processes on GPUs that are killed or stopped in mid-call: the others get an error in time and go on.

Ranks are forked for each test, for one of them ends with it.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch

import deep_moe

from ..cpu.test_crashes import changed, check_survival, fresh_tensors, known_tensors
from ..cpu.test_failures import fused
from ..support.attempts import Attempt, attempt, good_high_throughput
from ..support.device import on_gpu
from ..support.inputs import Case
from ..support.program import check, execute
from ..support.ranks import NoAnswerError, Ranks
from ..support.system import Flag

pytestmark = pytest.mark.gpus(1)

RANKS = 3
FORM = "gpu process"
LARGE = Case("crashes", (256,) * RANKS, hidden=2048, experts=9)
SMALL = Case("small", (40,) * RANKS, hidden=512, experts=9)
TIMEOUT = 4.0


def until_it_fails(buffer: deep_moe.Buffer, case: Case, seconds: float = 20.0) -> Attempt:
    """Exchange, with and without waiting for counts, until a call raises, and give that error."""
    given, rank = case.inputs(), buffer.rank
    x, idx = on_gpu(given.x[rank]), on_gpu(given.topk_idx[rank])

    def exchange() -> None:
        sent = fused(buffer, given)
        buffer.combine(sent[0], sent[4], topk_weights=sent[2])
        worst = buffer.dispatch(x, topk_idx=idx, num_experts=given.experts, num_worst_tokens=sum(case.tokens))
        buffer.combine(worst[0], worst[4])
        torch.cuda.current_stream().synchronize()

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tried = attempt(exchange)
        if tried.error is not None:
            return tried
    return Attempt(None, None, seconds)


def the_gpu_works() -> bool:
    """torch's operations, and a new Buffer beside the failed one."""
    a = torch.arange(64.0, device="cuda").reshape(8, 8)
    product = bool(torch.equal((a @ a).cpu(), a.cpu() @ a.cpu()))
    (alone,) = deep_moe.thread_comms(1)
    good = execute(good_high_throughput(1), 0, [deep_moe.Buffer(None, comm=alone)])
    check(good_high_throughput(1), [good])
    return product


@pytest.mark.parametrize("victim", range(RANKS))
def test_f2_killed_rank_is_named(victim: int, shared_memory: None) -> None:
    """In mid-call; the survivors say who, in time, keep their tensors, and the GPU works for them."""
    after = random.Random(victim).uniform(0.0, 0.3)
    with Flag() as started:

        def rank_main(comm: Any, rank: int) -> Any:
            buffer = deep_moe.Buffer(None, comm=comm, timeout=TIMEOUT)
            tensors = known_tensors(buffer)
            fused(buffer, SMALL.inputs())
            torch.cuda.current_stream().synchronize()
            started.up()
            tried = until_it_fails(buffer, LARGE if victim else SMALL)
            failed_at = time.monotonic()
            again = attempt(buffer.check)
            damage = changed(tensors)
            buffer.destroy()
            return tried, again, failed_at, damage, the_gpu_works()

        with Ranks(rank_main, RANKS, FORM) as ranks:
            started.wait(RANKS)
            time.sleep(after)
            ranks.kill(victim)
            killed_at = time.monotonic()
            outcomes = ranks.wait(40)
    assert isinstance(outcomes[victim].error, NoAnswerError), outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error is None, f"rank {rank}: {outcome}"
        tried, again, failed_at, damage, works = outcome.value
        for one in (tried, again):
            assert isinstance(one.error, (deep_moe.PeerLostError, deep_moe.DeepMoeTimeoutError)), one
            assert f"rank {victim}" in str(one.error), f"rank {victim} was killed, but: {one.error}"
        assert failed_at - killed_at < TIMEOUT + 2.0
        assert not damage and works


@pytest.mark.parametrize("number", range(2))
def test_stopped_rank_that_goes_on_changes_no_live_tensor(number: int) -> None:
    """A rank is stopped in mid-call; the others time out and use their memory for other things; it wakes."""
    with Flag() as started, Flag() as failed:

        def rank_main(comm: Any, rank: int) -> Any:
            buffer = deep_moe.Buffer(None, comm=comm, timeout=0.6)
            tensors = known_tensors(buffer)
            fused(buffer, LARGE.inputs())
            torch.cuda.current_stream().synchronize()
            started.up()
            tried = until_it_fails(buffer, LARGE)
            tensors += fresh_tensors(buffer, 12)
            failed.up()
            comm.allgather("awake, and its call has ended")
            time.sleep(0.1)
            damage = changed(tensors)
            buffer.reset()
            new = fresh_tensors(buffer, 12)
            assert len(new) == 12
            good = execute(good_high_throughput(RANKS), rank, [buffer])
            return tried, damage + changed(tensors + new), good

        with Ranks(rank_main, RANKS, FORM) as ranks:
            started.wait(RANKS)
            time.sleep(random.Random(number).uniform(0.0, 0.2))
            ranks.kill(2, signal.SIGSTOP)
            failed.wait(2)
            time.sleep(0.05)
            ranks.kill(2, signal.SIGCONT)
            outcomes = ranks.wait(40)
    check_survival(outcomes, good_high_throughput(RANKS))


def test_f3_exception_on_one_rank_and_exit_without_destroy(shared_memory: None) -> None:
    """The rank that raises ends, with a live Buffer; its peer gets an error that names it, and ends."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=TIMEOUT)
        kept.append((buffer, fused(buffer, Case("leave", (9, 8)).inputs())))
        torch.cuda.current_stream().synchronize()
        if rank == 1:
            raise ValueError("on purpose")
        return until_it_fails(buffer, Case("leave", (9, 8)))

    kept: list[Any] = []
    with Ranks(rank_main, 2, FORM) as ranks:
        survivor, leaver = ranks.wait(30)
    assert "on purpose" in str(leaver.error)
    assert survivor.error is None, survivor
    assert isinstance(survivor.value.error, (deep_moe.PeerLostError, deep_moe.DeepMoeTimeoutError))
    assert "rank 1" in str(survivor.value.error)
