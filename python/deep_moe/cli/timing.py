"""Timing chained steps on all ranks at once: a barrier in shared memory, a clock, the plain-copy limit."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

PIECE_BYTES = 1 << 20
BARRIER_STRIDE = 16  # int64 words a rank: two cache lines, so that ranks do not share one

Step = Callable[[], object]


class SharedBarrier:
    """A barrier of processes over one small shared file.

    Waiters spin and yield their core, so that all ranks leave within microseconds of each other, also where
    there are more ranks than cores; the processes of a run share one ``path`` that does not exist before.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, timeout: float) -> None:
        self._rank, self._timeout, self._round = rank, timeout, 0
        num_bytes = num_ranks * BARRIER_STRIDE * 8
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.ftruncate(file.fileno(), num_bytes)
            self._words = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.int64)[::BARRIER_STRIDE]

    def wait(self) -> None:
        """Returns when all ranks have called it equally often; a TimeoutError names those missing."""
        self._round += 1
        self._words[self._rank] = self._round
        deadline = time.monotonic() + self._timeout
        while int(self._words.min()) < self._round:
            os.sched_yield()
            if time.monotonic() > deadline:
                missing = [rank for rank, seen in enumerate(self._words.tolist()) if seen < self._round]
                raise TimeoutError(
                    f"rank {self._rank} waited {self._timeout:g} s at a barrier for ranks {missing}"
                )


class StepTimer:
    """Times chains of steps; every rank must time the same chains in the same order."""

    def __init__(
        self, barrier: SharedBarrier, device: torch.device, iters: int, warmup: int, tick: Callable[[], None]
    ) -> None:
        self._barrier, self._device = barrier, device
        self._iters, self._warmup, self._tick = iters, warmup, tick

    @property
    def runs_a_chain(self) -> int:
        """How often a chain runs, the warm-up included."""
        return self._warmup + self._iters

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e6

    def chain(self, steps: Sequence[Step], before: Step | None = None) -> list[list[float]]:
        """Runs ``steps`` one after another, each chain behind a barrier; returns the clock's marks in us.

        For each iteration (the warm-up is left out) the start, and the end of each step. ``before`` runs
        ahead of the barrier.
        """
        marks_of_iterations = []
        for iteration in range(self.runs_a_chain):
            if before is not None:
                before()
            self._tick()
            gc.disable()
            try:
                self._now()
                self._barrier.wait()
                marks = [self._now()]
                for step in steps:
                    step()
                    marks.append(self._now())
            finally:
                gc.enable()
            if iteration >= self._warmup:
                marks_of_iterations.append(marks)
        return marks_of_iterations


class PlainCopy:
    """A memcpy of ``num_bytes`` between two warm buffers, either as a whole or in pieces of 1 MB."""

    def __init__(self, num_bytes: int, device: torch.device, whole: bool) -> None:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        piece = max(num_bytes, 1) if whole else PIECE_BYTES
        self.pieces = [
            (target[at : at + piece], source[at : at + piece]) for at in range(0, num_bytes, piece)
        ]
        self._arrays = (
            [(t.numpy(), s.numpy()) for t, s in self.pieces] if device.type == "cpu" and not whole else []
        )

    def __call__(self) -> None:
        for array, source_array in self._arrays:
            np.copyto(array, source_array)
        if not self._arrays:
            for target, source in self.pieces:
                target.copy_(source)


def chain_times(marks_of_ranks: Sequence[Sequence[Sequence[float]]]) -> tuple[list[list[float]], list[float]]:
    """Returns the times of each step, and those of the whole chain, a value an iteration.

    The whole is from the first rank's start to the last rank's end; a step ends when the last rank has ended
    it and begins where the step before has ended, so that the steps add up to the whole. The ranks are
    processes of one machine and share its monotonic clock.
    """
    steps: list[list[float]] = [[] for _ in marks_of_ranks[0][0][1:]]
    whole = []
    for marks_of_iteration in zip(*marks_of_ranks, strict=True):
        starts, *ends_of_steps = zip(*marks_of_iteration, strict=True)
        ends = [min(starts), *(max(ends) for ends in ends_of_steps)]
        for step, times in enumerate(steps):
            times.append(ends[step + 1] - ends[step])
        whole.append(ends[-1] - ends[0])
    return steps, whole


def median(values: Sequence[float]) -> float:
    """Returns the middle of ``values`` (the mean of the middle two)."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
