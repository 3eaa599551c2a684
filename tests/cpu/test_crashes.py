"""Ranks killed or stopped in mid-call: the others get an error in time; no memory is harmed or lost."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import Attempt, attempt, good_program
from ..support.inputs import Case
from ..support.program import Program, check, execute
from ..support.ranks import NoAnswerError, Outcome, Ranks, run_ranks
from ..support.system import Flag, children, memfd_mappings, memfds
from .test_failures import fused

RANKS = 3
CASE = Case("crashes", (256,) * RANKS, hidden=2048, experts=9)
SMALL = Case("small", (40,) * RANKS, hidden=512, experts=9)
TIMEOUT = 5.0  # of the Buffers in tests of killed ranks; the socket says it at once, so waits are far shorter
ROUNDS = int(os.environ.get("DEEP_MOE_KILL_ROUNDS", "50"))


def until_it_fails(buffer: deep_moe.Buffer, case: Case, seconds: float = 20.0) -> Attempt:
    """Exchange in both modes until a call raises, and give that error."""
    given, rank = case.inputs(), buffer.rank
    x, idx, weights = given.x[rank], given.topk_idx[rank], given.topk_weights[rank]

    def exchange() -> None:
        sent = fused(buffer, given)
        buffer.combine(sent[0], sent[4], topk_weights=sent[2])
        low = buffer.low_latency_dispatch(x[:16], idx[:16], 16, given.experts, use_fp8=False)
        buffer.low_latency_combine(low[0], idx[:16], weights[:16], low[2])

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tried = attempt(exchange)
        if tried.error is not None:
            return tried
    return Attempt(None, None, seconds)


def kill_one(victim: int, after: float, case: Case = SMALL) -> list[Any]:
    """Kill a rank that long after all began to exchange; gives what the survivors saw."""
    with Flag() as started:

        def rank_main(comm: Any, rank: int) -> Any:
            before = memfds(), memfd_mappings()
            buffer = deep_moe.Buffer(None, comm=comm, timeout=TIMEOUT)
            started.up()
            tried = until_it_fails(buffer, case)
            failed_at = time.monotonic()
            again = attempt(buffer.check)
            buffer.destroy()
            del buffer
            gc.collect()
            return tried, again, failed_at, before, (memfds(), memfd_mappings())

        with Ranks(rank_main, RANKS) as ranks:
            started.wait(RANKS)
            time.sleep(after)
            ranks.kill(victim)
            killed_at = time.monotonic()
            outcomes = ranks.wait(30)
    assert isinstance(outcomes[victim].error, NoAnswerError), outcomes[victim]
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in survivors:
        assert outcome.error is None, str(outcome)
        tried, again, failed_at, before, after_all = outcome.value
        for one in (tried, again):
            assert isinstance(one.error, (deep_moe.PeerLostError, deep_moe.DeepMoeTimeoutError)), one
            assert f"rank {victim}" in str(one.error), f"rank {victim} was killed, but: {one.error}"
        assert failed_at - killed_at < TIMEOUT + 1.0
        assert after_all == before, f"memory left: (descriptors, mappings) {before} before, {after_all} after"
    return [outcome.value for outcome in survivors]


@pytest.mark.parametrize("victim", range(RANKS))
def test_f2_killed_rank_is_named_at_once(victim: int, shared_memory: None) -> None:
    """Killed in mid-dispatch: the socket closes, so nobody waits for the time-out."""
    for tried, *_ in kill_one(victim, 0.02, CASE):
        assert isinstance(tried.error, deep_moe.PeerLostError), tried


@pytest.mark.slow
def test_f2_killed_at_random_points(shared_memory: None) -> None:
    """DEEP_MOE_KILL_ROUNDS times (50): a random rank after a random part of 30 ms."""
    chance = random.Random(2)
    before = children()
    for number in range(ROUNDS):
        victim, after = chance.randrange(RANKS), chance.uniform(0.0, 0.03)
        try:
            kill_one(victim, after)
        except AssertionError as error:
            raise AssertionError(
                f"round {number}, rank {victim} killed after {after * 1e3:.1f} ms"
            ) from error
    assert children() == before, "processes are left"


def known_tensors(buffer: deep_moe.Buffer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Live tensors in the heap, with copies of what is in them: received rows, and ones filled here."""
    rows = fused(buffer, CASE.inputs())[0]
    return [(rows, rows.clone()), *fresh_tensors(buffer, 3)]


def fresh_tensors(buffer: deep_moe.Buffer, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """New tensors of the heap; as many as a Buffer gives, which may be none after a failure."""
    fresh = []
    for number in range(count):
        with contextlib.suppress(deep_moe.DeepMoeTimeoutError, deep_moe.PeerLostError):
            tensor = buffer.empty((257 * 1024 + number,), torch.uint8).fill_(number + 17)
            fresh.append((tensor, tensor.clone()))
    return fresh


def changed(tensors: list[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return [number for number, (tensor, copy) in enumerate(tensors) if not torch.equal(tensor, copy)]


def check_survival(outcomes: list[Outcome], program: Program) -> None:
    """Rank 2 was stopped: who waits for it says so, no tensor has changed, and all ran the program then.

    Who is a call ahead of another one that waits for it may be the first to give up, and names that one.
    """
    waited = []
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome}"
        tried, damage, _ = outcome.value
        assert not damage, f"rank {rank}: tensors {damage} were changed by the rank that woke"
        tried.must_be(deep_moe.Error)
        if rank != 2:
            tried.must_be(deep_moe.DeepMoeTimeoutError)
            waited.append(rank)
    errors = [str(outcomes[rank].value[0].error) for rank in waited]
    by_name = [rank for rank, text in zip(waited, errors, strict=True) if re.search(r"rank 2\b", text)]
    assert by_name, errors
    for text in errors:
        assert re.search(rf"rank ({'|'.join(map(str, [2, *by_name]))})\b", text), errors
    check(program, [outcome.value[2] for outcome in outcomes])


def after_the_failure(buffer: deep_moe.Buffer, comm: Any, tensors: list[Any]) -> tuple[list[int], Any]:
    """All ranks are awake or about to be: what has changed by then, and a good exchange after a reset."""
    comm.allgather("awake")  # the sleeper comes here when it has woken and its call has ended
    time.sleep(0.1)
    damage = changed(tensors)
    buffer.reset()
    new = fresh_tensors(buffer, 12)
    assert len(new) == 12
    good = execute(good_program(RANKS), buffer.rank, [buffer])
    return damage + changed(tensors + new), good


@pytest.mark.parametrize("number", range(6))
def test_stopped_rank_that_goes_on_changes_no_live_tensor(number: int) -> None:
    """A rank is stopped in mid-call; the others time out and use their memory for other things; it wakes."""
    chance = random.Random(number)
    with Flag() as started, Flag() as failed:

        def rank_main(comm: Any, rank: int) -> Any:
            buffer = deep_moe.Buffer(None, comm=comm, timeout=0.6)
            tensors = known_tensors(buffer)
            started.up()
            tried = until_it_fails(buffer, CASE)
            tensors += fresh_tensors(buffer, 12)
            failed.up()
            return tried, *after_the_failure(buffer, comm, tensors)

        with Ranks(rank_main, RANKS) as ranks:
            started.wait(RANKS)
            time.sleep(chance.uniform(0.0, 0.04))
            ranks.kill(2, signal.SIGSTOP)
            failed.wait(2)
            time.sleep(0.05)
            ranks.kill(2, signal.SIGCONT)
            outcomes = ranks.wait(30)
    check_survival(outcomes, good_program(RANKS))


def test_sleeping_rank_that_calls_late_changes_no_live_tensor(form: str) -> None:
    """The sleeper calls after the others' time-out, when they have used the memory for other things."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=0.5)
        tensors = known_tensors(buffer)
        comm.allgather(None)
        if rank == 2:
            time.sleep(1.5)
        tried = attempt(lambda: fused(buffer, CASE.inputs()))
        tried.value = None
        tensors += fresh_tensors(buffer, 12)
        return tried, *after_the_failure(buffer, comm, tensors)

    results = run_ranks(rank_main, RANKS, form=form)
    for rank, (tried, damage, _) in enumerate(results):
        tried.must_be(deep_moe.Error)
        assert not damage, f"rank {rank}: tensors {damage} were changed"
    for tried, _, _ in results[:2]:
        tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 2\b")
    check(good_program(RANKS), [good for _, _, good in results])


def test_survivors_can_go_on_without_the_lost_rank() -> None:
    """A new Buffer among the survivors works beside the failed one, which still owns live tensors."""
    with Flag() as started, Flag() as died:

        def rank_main(comm: Any, rank: int) -> Any:
            buffer = deep_moe.Buffer(None, comm=comm, timeout=TIMEOUT)
            tensors = known_tensors(buffer)
            started.up()
            tried = until_it_fails(buffer, SMALL)
            died.up()
            inner = deep_moe.thread_comms(1)[0]
            alone = execute(good_program(1), 0, [deep_moe.Buffer(None, comm=inner)])
            return tried, changed(tensors), alone

        with Ranks(rank_main, RANKS) as ranks:
            started.wait(RANKS)
            ranks.kill(1)
            died.wait(2)
            outcomes = ranks.wait(30)
    for rank in (0, 2):
        tried, damage, alone = outcomes[rank].value
        tried.must_be(deep_moe.PeerLostError, r"rank 1\b")
        assert not damage
        check(good_program(1), [alone])
