"""Chains of steps to time, and the checks of what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .timing import CopyBuffers, PlainCopy, StepTimer

PAIR = ("dispatch", "combine")
ROUNDS = 5


@dataclass
class Check:
    """One comparison: the largest relative error seen and the largest allowed."""

    name: str
    error: float
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; passed where the error is a number within the tolerance."""
        passed = self.error <= self.tolerance
        return {"name": self.name, "error": self.error, "tolerance": self.tolerance, "passed": passed}


def nothing() -> None:
    """Does nothing."""


@dataclass
class Chain:
    """Steps that are timed one after another, with the rows and bytes that they move on this rank.

    ``kind`` is ``deep_moe``, ``memcpy``, ``gloo`` or ``layer``; ``limit`` names the memcpy chains of the same
    bytes. ``before`` drops what the last run has left, ``verify`` checks it; ``marks`` are the clock's.
    """

    name: str
    kind: str
    limit: str
    step_names: tuple[str, ...]
    steps: list[Callable[[], object]]
    before: Callable[[], object] = nothing
    verify: Callable[[], Check] | None = None
    rows: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    marks: list[list[float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the report needs."""
        return {
            "name": self.name,
            "kind": self.kind,
            "limit": self.limit,
            "steps": list(self.step_names),
            "rows": self.rows,
            "link_bytes": self.link_bytes,
            "marks": self.marks,
        }


def time_chains(
    chains: list[Chain], timer: StepTimer, rounds: list[tuple[int, int]], report: Callable[[str], None]
) -> list[Check]:
    """Times all chains in turn, round by round, so that a busy moment of the machine hits none of them alone.

    Returns the checks of what the chains gave in the last round.
    """
    checks = []
    for index, (iters, warmup) in enumerate(rounds):
        for chain in chains:
            report(f"time {chain.name}")
            chain.marks += timer.run(chain.steps, chain.before, iters, warmup)
            if chain.verify is not None and index == len(rounds) - 1:
                checks.append(chain.verify())
            chain.before()
    return checks


def copy_chains(buffers: CopyBuffers, limit: str, dispatch_bytes: int, combine_bytes: int) -> list[Chain]:
    """Makes the memcpy of the bytes of dispatch, combine and a pair, in two ways; the faster is the limit.

    ``combine_bytes`` is half of all that combine reads and writes, for a memcpy of n bytes reads n and
    writes n. Each is a chain of its own, as copying ranks do not keep step with each other.
    """
    chains = []
    for whole in (False, True):
        dispatch = PlainCopy(buffers, "dispatch", dispatch_bytes, whole)
        combine = PlainCopy(buffers, "combine", combine_bytes, whole)
        name = f"memcpy {'as a whole' if whole else 'in 1 MB pieces'} ({limit})"
        for step, copies in (("dispatch", [dispatch]), ("combine", [combine]), ("pair", [dispatch, combine])):
            prepare = partial(_prepare_all, copies)
            chains.append(Chain(name, "memcpy", limit, (step,), [partial(_run_all, copies)], prepare))
    return chains


def _prepare_all(copies: list[PlainCopy]) -> None:
    for copy in copies:
        copy.prepare()


def _run_all(copies: list[PlainCopy]) -> None:
    for copy in copies:
        copy()
