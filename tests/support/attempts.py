"""Calls that may fail: what came of them, and what must be said in the error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .device import settle
from .high_throughput import Combine, Dispatch
from .inputs import Case
from .low_latency import LowLatencyCombine, LowLatencyDispatch
from .program import Program


@dataclass
class Attempt:
    """What came of a call: a value or an error, and after how long."""

    value: Any
    error: BaseException | None
    seconds: float

    def must_be(self, kind: type[BaseException], *patterns: str) -> None:
        """The call raised an error of this kind whose text matches all patterns."""
        assert self.error is not None, f"returned {self.value!r} instead of raising {kind.__name__}"
        assert isinstance(self.error, kind), f"{self.error!r} is no {kind.__name__}"
        text = str(self.error)
        missing = [pattern for pattern in patterns if not re.search(pattern, text)]
        assert not missing, f"{missing} not found in: {text}"


def attempt(call: Callable[[], Any]) -> Attempt:
    started = time.monotonic()
    try:
        value, error = call(), None
    except Exception as raised:
        value, error = None, raised.with_traceback(None)  # a traceback would keep the call's tensors alive
    return Attempt(value, error, time.monotonic() - started)


def attempt_when_late(comm: Any, buffer: Any, call: Callable[[], Any], seconds: float) -> Attempt:
    """Makes the call so long after the other ranks; then all reset the Buffer. Collective."""
    settle(buffer)
    comm.allgather(None)
    time.sleep(seconds)

    def whole() -> None:
        call()
        settle(buffer)
        buffer.check()

    tried = attempt(whole)
    comm.allgather(None)
    buffer.reset()
    return tried


def good_program(ranks: int = 2) -> Program:
    """A small exchange in both modes, to show that a Buffer works."""
    given = Case("good", tuple(range(9, 9 + ranks)), hidden=256, experts=8).inputs()
    return Program(
        [
            Dispatch(given, path="fused"),
            Combine(0),
            LowLatencyDispatch(given, 16),
            LowLatencyCombine(2, hook="now"),
        ]
    )


def good_high_throughput(ranks: int = 2) -> Program:
    """The first half of it."""
    return Program(good_program(ranks).calls[:2])


def words(*numbers: Any) -> Sequence[str]:
    """Patterns that find these numbers or names as whole words."""
    return [rf"(?<![\w-]){re.escape(str(number))}(?!\w)" for number in numbers]
