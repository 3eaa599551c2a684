"""Run a function on R ranks: each a process, or each a thread of one process.

The test process itself never holds a Buffer. Ranks live in forked children, so that a rank that hangs or dies
takes nothing with it. Children are always reaped; on a time-out they are killed, with a message that says
where they were.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .wire import dumps, loads

FORMS = ("process", "thread")
GPU_FORMS = ("gpu thread", "gpu process")
GRACE = 8.0  # seconds that the other ranks get to finish after one has raised

RankFunction = Callable[[Any, int], Any]
Job = Callable[[Any, int, Any], Any]  # a function of a module: (comm, rank, argument) -> result


class PipeComm:
    """An all-gather between forked processes over pipes; rank 0 collects and hands out."""

    def __init__(self, rank: int, size: int, links: Sequence[Connection]) -> None:
        self._rank, self._size, self._links = rank, size, links

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, item: Any) -> list[Any]:
        if self._rank == 0:
            items = [item, *(loads(link.recv_bytes()) for link in self._links[: self._size - 1])]
            for link in self._links[: self._size - 1]:
                link.send_bytes(dumps(items))
            return items
        self._links[0].send_bytes(dumps(item))
        gathered: list[Any] = loads(self._links[0].recv_bytes())
        return gathered


@dataclass
class Outcome:
    """How one rank ended: with a value, with an exception, or without a word (killed, or still running)."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""

    def __str__(self) -> str:
        return self.trace or f"returned {self.value!r}"


class RanksError(Exception):
    """Some ranks raised, died or hung. `outcomes` has all ranks."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        ranks: dict[str, list[int]] = {}  # by what went wrong
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                ranks.setdefault(str(outcome), []).append(rank)
        super().__init__("\n".join(f"--- ranks {of} ---\n{text}" for text, of in ranks.items()))


class NoAnswerError(Exception):
    """A rank ended, or was ended, without an answer."""


def guarded(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=call())
    except BaseException as error:  # an interrupt in a rank is an outcome too
        return Outcome(error=error, trace=traceback.format_exc())


def pack(outcomes: Sequence[Outcome]) -> bytes:
    try:
        packed = dumps(outcomes)
        loads(packed)
        return packed
    except Exception:  # a value or an exception that does not pickle
        plain = [
            Outcome(error=NoAnswerError(f"{o.error!r}, {type(o.value)}"), trace=str(o)) for o in outcomes
        ]
        return dumps(plain)


def fork(body: Callable[[], bytes], reply: Connection, close: Sequence[Connection] = ()) -> int:
    """Fork a child that sends what `body` returns and ends at once; give its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        torch.set_num_threads(1)
        for connection in close:
            connection.close()
        answer = body()
        if answer:
            reply.send_bytes(answer)
    finally:
        os._exit(0)


def run_threads(function: Callable[[Any, int], Any], num_ranks: int) -> list[Outcome]:
    """Run the ranks as threads of this process."""
    import deep_moe

    outcomes: list[Outcome | None] = [None] * num_ranks
    comms = deep_moe.thread_comms(num_ranks)

    def body(rank: int) -> None:
        outcomes[rank] = guarded(lambda: function(comms[rank], rank))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    give_up = float("inf")
    while any(thread.is_alive() for thread in threads) and time.monotonic() < give_up:
        for thread in threads:
            thread.join(0.002)
        if give_up == float("inf") and any(o is not None and o.error is not None for o in outcomes):
            give_up = time.monotonic() + GRACE
    hung = Outcome(error=NoAnswerError("still running"), trace="still running after another rank had raised")
    return [hung if o is None else o for o in outcomes]


def show_stack(pid: int) -> str:
    """Let a hanging child write its Python stacks to stderr."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    return f"process {pid}; its stack is in the captured stderr"


def collect(
    pipes: Sequence[Connection], timeout: float, explain: Callable[[int, bool], str]
) -> list[list[Outcome] | str]:
    """The answer of each child, or why there is none. After a first failure the others get GRACE seconds."""
    end = time.monotonic() + timeout
    waiting = dict(enumerate(pipes))
    answers: dict[int, list[Outcome] | str] = {}
    while waiting and (left := end - time.monotonic()) > 0:
        for connection in wait(list(waiting.values()), left):
            child = next(c for c, pipe in waiting.items() if pipe is connection)
            del waiting[child]
            try:
                answers[child] = loads(pipes[child].recv_bytes())
            except (EOFError, ConnectionError):
                answers[child] = explain(child, False)
            if any(outcome.error is not None for outcome in expand(answers[child], 1)):
                end = min(end, time.monotonic() + GRACE)
    for child in waiting:
        answers[child] = explain(child, True)
    return [answers[child] for child in range(len(pipes))]


def expand(answer: list[Outcome] | str, num_ranks: int) -> list[Outcome]:
    """The outcomes of the ranks of one child that gave this answer."""
    if isinstance(answer, str):
        return [Outcome(error=NoAnswerError(answer), trace=answer)] * num_ranks
    return answer


class Ranks:
    """Ranks that run `function(comm, rank)` once, started and not yet waited for. A context manager.

    Forms "gpu thread" and "gpu process": each with a current stream of its own on a GPU that they may share.
    """

    def __init__(self, function: RankFunction, num_ranks: int, form: str = "process") -> None:
        if form.startswith("gpu "):
            from .device import on_its_stream

            form = form.removeprefix("gpu ")
            function = on_its_stream(function, form)
        self.num_ranks, self.form = num_ranks, form
        if form == "thread":
            self._start([lambda: pack(run_threads(function, num_ranks))], [])
            return
        links = [Pipe() for _ in range(num_ranks - 1)]

        def body(rank: int) -> bytes:
            mine = [ours for ours, _ in links] if rank == 0 else [links[rank - 1][1]]
            for end in [end for pair in links for end in pair]:
                if end not in mine:
                    end.close()
            return pack([guarded(lambda: function(PipeComm(rank, num_ranks, mine), rank))])

        self._start([lambda rank=rank: body(rank) for rank in range(num_ranks)], links)

    def _start(
        self, bodies: Sequence[Callable[[], bytes]], links: Sequence[tuple[Connection, Connection]]
    ) -> None:
        replies = [Pipe() for _ in bodies]
        self.pids: list[int] = []
        self._reaped: dict[int, int] = {}
        for body, (_, reply) in zip(bodies, replies, strict=True):
            others = [end for pair in replies for end in pair if end is not reply]
            self.pids.append(fork(body, reply, others))
        for end in [reply for _, reply in replies] + [end for pair in links for end in pair]:
            end.close()
        self._answers = [answer for answer, _ in replies]

    def wait(self, timeout: float = 60.0) -> list[Outcome]:
        """Wait for all, kill who does not answer, reap all."""
        answers = collect(self._answers, timeout, self._explain)
        self.close()
        each = self.num_ranks if self.form == "thread" else 1
        return [one for answer in answers for one in expand(answer, each)]

    def _explain(self, child: int, hangs: bool) -> str:
        if hangs:
            return f"no answer in time: killed ({self._where(child)})"
        return f"ended without an answer ({self._reap(child)})"

    def _where(self, child: int) -> str:
        return show_stack(self.pids[child])

    def _reap(self, child: int) -> str:
        if child not in self._reaped:
            self._reaped[child] = os.waitpid(self.pids[child], 0)[1]
        code = os.waitstatus_to_exitcode(self._reaped[child])
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self, rank: int, what: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], what)

    def close(self) -> None:
        for child, answer in enumerate(self._answers):
            if child not in self._reaped:
                os.kill(self.pids[child], signal.SIGKILL)
                self._reap(child)
            answer.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_ranks(
    function: RankFunction, num_ranks: int, *, form: str = "process", timeout: float = 60.0
) -> list[Any]:
    """Run `function(comm, rank)` on all ranks, give the results; RanksError if one raises, dies or hangs."""
    with Ranks(function, num_ranks, form) as ranks:
        outcomes = ranks.wait(timeout)
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksError(outcomes)
    return [outcome.value for outcome in outcomes]


def run_job(
    job: Job, argument: Any = None, *, ranks: int = 2, form: str = "process", timeout: float = 60.0
) -> list[Any]:
    """Run `job(comm, rank, argument)` on all ranks; those on GPUs stay for the next job (`support.gpu`)."""
    if form.startswith("gpu "):
        from .gpu import World

        return World(form.removeprefix("gpu "), ranks).run(job, argument, timeout)
    return run_ranks(lambda comm, rank: job(comm, rank, argument), ranks, form=form, timeout=timeout)
