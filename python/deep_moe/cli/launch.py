"""Starts the rank processes of a run, follows their events, and ends them all whatever happens."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

GRACE_SECONDS = 1.0
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"  # noqa: E501

OnEvent = Callable[[int, dict[str, Any]], None]


class RankFailedError(RuntimeError):
    """A rank process failed; the text says which, why, and holds its traceback."""


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[str]
    log: Path
    phase: str = "start"
    result: dict[str, Any] | None = None
    error: str = ""
    traceback: str = ""
    has_ended: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def tail(self) -> str:
        """Returns the end of what the rank wrote to standard error."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return "\n".join(text.splitlines()[-20:])


def rank_environment() -> dict[str, str]:
    """Returns a rank process's environment: one thread a math library, gloo on the loopback device."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment


def run_ranks(
    num_ranks: int,
    options_json: str,
    timeout: float,
    on_event: OnEvent,
    module: str = "deep_moe.cli.worker",
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs ``module`` once a rank and returns the ranks' results, and what they wrote to standard error.

    ``environment`` is added to that of the rank processes.

    The first rank that fails, or ``timeout`` seconds without an end, ends all of them and raises
    RankFailedError.
    """
    events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="deep_moe_bench_") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                ranks.append(_start(rank, options_json, Path(folder), module, events, environment or {}))
            _follow(ranks, events, time.monotonic() + timeout, timeout, on_event)
            results = [rank.result for rank in ranks if rank.result is not None]
            return results, [rank.log.read_text(encoding="utf-8", errors="replace") for rank in ranks]
        finally:
            _end(ranks)


def _start(
    rank: int,
    options_json: str,
    folder: Path,
    module: str,
    events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]],
    environment: Mapping[str, str],
) -> _Rank:
    log = folder / f"rank{rank}.err"
    command = [
        sys.executable,
        "-c",
        BOOT.format(module=module),
        json.dumps(sys.path),
        str(rank),
        options_json,
        str(folder),
    ]
    with open(log, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=rank_environment() | dict(environment),
        )

    def read(stream: IO[str]) -> None:
        for line in stream:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"print": line}
            events.put((rank, event if isinstance(event, dict) else {"print": line}))
        events.put((rank, None))

    assert process.stdout is not None
    thread = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    thread.start()
    return _Rank(rank, process, log, threads=[thread])


def _follow(
    ranks: list[_Rank],
    events: queue.SimpleQueue[tuple[int, dict[str, Any] | None]],
    deadline: float,
    timeout: float,
    on_event: OnEvent,
) -> None:
    failed: _Rank | None = None
    while not all(rank.has_ended for rank in ranks):
        try:
            index, event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        rank = ranks[index]
        if event is None:
            rank.has_ended = True
            code = _exit_code(rank)
            if code != 0 or rank.result is None:
                rank.error = rank.error or _describe_exit(code)
        elif "error" in event:
            rank.error, rank.traceback = str(event["error"]), str(event.get("traceback", ""))
        elif "result" in event:
            rank.result = event["result"]
        else:
            rank.phase = str(event.get("phase", rank.phase))
            on_event(index, event)
        if rank.error and failed is None:
            failed = rank
            deadline = min(
                deadline, time.monotonic() + GRACE_SECONDS
            )  # what the others say belongs to the report
    if failed is not None:
        raise RankFailedError(_failure_text(failed, ranks))
    late = [rank for rank in ranks if not rank.has_ended]
    if late:
        phases = "; ".join(f"rank {rank.rank}: {rank.phase}" for rank in late)
        raise RankFailedError(
            f"the run did not end within {timeout:g} s (--timeout) and was stopped; last seen: {phases}"
        )


def _exit_code(rank: _Rank) -> int:
    try:
        return rank.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        rank.process.kill()
        return rank.process.wait()


def _describe_exit(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with exit code {code} and no result"


def _failure_text(failed: _Rank, ranks: list[_Rank]) -> str:
    lines = [f"rank {failed.rank} failed (phase: {failed.phase}): {failed.error}"]
    lines += [failed.traceback.rstrip()] if failed.traceback else []
    tail = failed.tail()
    lines += [f"its standard error ends with:\n{tail}"] if tail else []
    lines += [
        f"rank {rank.rank} then failed too: {rank.error}"
        for rank in ranks
        if rank.error and rank is not failed
    ]
    return "\n".join(lines)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        for thread in rank.threads:
            thread.join(timeout=5)
        for stream in (rank.process.stdin, rank.process.stdout):
            if stream is not None:
                stream.close()
