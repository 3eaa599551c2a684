"""Ranks that stay: a job costs two messages and no fork, for tests that run hundreds of small examples."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from .ranks import Job, PipeComm, RanksError, collect, expand, fork, guarded, pack, run_threads, show_stack
from .wire import dumps, loads

MAX_RANKS = 12


class Workers:
    """Up to MAX_RANKS persistent ranks of one form, started when first used, and anew after a failure."""

    def __init__(self, form: str, max_ranks: int = MAX_RANKS) -> None:
        self.form, self.max_ranks = form, max_ranks
        self._pids: list[int] = []
        self._pipes: list[Connection] = []

    def run(self, job: Job, arguments: Sequence[Any], timeout: float = 60.0) -> list[Any]:
        """Run `job(comm, rank, arguments[rank])` on as many ranks as there are arguments."""
        num_ranks = len(arguments)
        assert num_ranks <= self.max_ranks
        if not self._pids:
            self._start()
        if self.form == "thread":
            self._pipes[0].send_bytes(dumps((job, list(arguments))))
        else:
            for pipe, argument in zip(self._pipes, arguments, strict=False):
                pipe.send_bytes(dumps((job, argument, num_ranks)))
        children, each = (1, num_ranks) if self.form == "thread" else (num_ranks, 1)
        answers = collect(self._pipes[:children], timeout, self._explain)
        outcomes = [one for answer in answers for one in expand(answer, each)]
        if any(outcome.error is not None for outcome in outcomes):
            self.close()
            raise RanksError(outcomes)
        return [outcome.value for outcome in outcomes]

    def _explain(self, child: int, hangs: bool) -> str:
        if hangs:
            return f"no answer in time ({show_stack(self._pids[child])})"
        return "ended without an answer"

    def _start(self) -> None:
        children = 1 if self.form == "thread" else self.max_ranks
        pairs = [Pipe() for _ in range(children)]
        links = [Pipe() for _ in range(children - 1)]
        all_links = [end for pair in links for end in pair]
        for child, (_, theirs) in enumerate(pairs):
            mine = [ours for ours, _ in links] if child == 0 else [links[child - 1][1]]
            unused = [end for pair in pairs for end in pair if end is not theirs]
            unused += [end for end in all_links if end not in mine]
            self._pids.append(fork(lambda c=child, t=theirs, m=mine: self._serve(c, t, m), theirs, unused))
        for end in [theirs for _, theirs in pairs] + all_links:
            end.close()
        self._pipes = [ours for ours, _ in pairs]

    def _serve(self, rank: int, pipe: Connection, links: Sequence[Connection]) -> bytes:
        while message := pipe.recv_bytes():
            pipe.send_bytes(self._do(message, rank, links))
        return b""

    def _do(self, message: bytes, rank: int, links: Sequence[Connection]) -> bytes:
        if self.form == "thread":
            job, arguments = loads(message)
            return pack(run_threads(lambda comm, r: job(comm, r, arguments[r]), len(arguments)))

        def one_rank() -> Any:
            job, argument, num_ranks = loads(message)
            return job(PipeComm(rank, num_ranks, links), rank, argument)

        return pack([guarded(one_rank)])

    def close(self) -> None:
        for pid, pipe in zip(self._pids, self._pipes, strict=True):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
        self._pids, self._pipes = [], []


_workers: dict[str, Workers] = {}


def workers(form: str) -> Workers:
    """The shared set of one form."""
    return _workers.setdefault(form, Workers(form))


def close_all() -> None:
    for one in _workers.values():
        one.close()
