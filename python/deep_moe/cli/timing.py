"""Timing chained steps on all ranks at once: a barrier in shared memory, a clock, the plain-copy limit."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

PIECE_BYTES = 1 << 20
BARRIER_STRIDE = 16  # int64 words a rank: two cache lines, so that ranks do not share one
POLL_SECONDS = 20e-6
START_NS, SPIN_NS = (
    400_000,
    150_000,
)  # a start lies so far ahead that sleepers see it; the end of the wait is spun

Step = Callable[[], object]


class SharedBarrier:
    """A common start of processes over one small shared file, ``path``, that does not exist before.

    Ranks sleep until all are there, so that where there are more processes than cores none of them has used
    up its turn, and then all leave at one moment of the machine's clock that rank 0 sets.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, timeout: float) -> None:
        self._rank, self._timeout, self._round = rank, timeout, 0
        num_bytes = (num_ranks + 2) * BARRIER_STRIDE * 8
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.ftruncate(file.fileno(), num_bytes)
            words = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.int64)[::BARRIER_STRIDE]
        self._arrived, self._start, self._start_round = words[:num_ranks], words[-2:-1], words[-1:]

    def wait(self) -> None:
        """Returns when all ranks have called it equally often; a TimeoutError names those missing."""
        self._round += 1
        self._arrived[self._rank] = self._round
        deadline = time.monotonic() + self._timeout
        while int(self._start_round[0]) < self._round:
            if self._rank == 0 and int(self._arrived.min()) >= self._round:
                self._start[0] = time.perf_counter_ns() + START_NS
                self._start_round[0] = self._round
                break
            time.sleep(POLL_SECONDS)
            if time.monotonic() > deadline:
                missing = [rank for rank, seen in enumerate(self._arrived.tolist()) if seen < self._round]
                raise TimeoutError(
                    f"rank {self._rank} waited {self._timeout:g} s at a barrier for ranks {missing}"
                )
        start = int(self._start[0])
        while (left := start - time.perf_counter_ns()) > 0:
            if left > SPIN_NS:
                time.sleep((left - SPIN_NS) * 1e-9)
            else:
                os.sched_yield()


class StepTimer:
    """Times chains of steps; every rank must time the same chains in the same order."""

    def __init__(self, barrier: SharedBarrier, device: torch.device, tick: Callable[[], None]) -> None:
        self._barrier, self._device, self._tick = barrier, device, tick

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e6

    def run(self, steps: Sequence[Step], before: Step, iters: int, warmup: int) -> list[list[float]]:
        """Runs ``steps`` one after another, each time behind a barrier; returns the clock's marks in us.

        For each iteration (the warm-up is left out) the start, and the end of each step. ``before`` runs
        ahead of the barrier.
        """
        marks_of_iterations = []
        for iteration in range(warmup + iters):
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
            if iteration >= warmup:
                marks_of_iterations.append(marks)
        return marks_of_iterations


def split_rounds(iters: int, warmup: int, rounds: int) -> list[tuple[int, int]]:
    """Splits ``iters`` into at most ``rounds`` rounds of (iterations, warm-up); later rounds warm up once."""
    rounds = min(rounds, iters)
    return [
        (iters * (i + 1) // rounds - iters * i // rounds, warmup if i == 0 else min(warmup, 1))
        for i in range(rounds)
    ]


class CopyBuffers:
    """Pairs of warm buffers, one pair a slot, that all plain copies of a run share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sizes: dict[str, int] = {}
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, slot: str, num_bytes: int) -> None:
        """Says, before the first copy, that a copy in ``slot`` will need ``num_bytes``."""
        self._sizes[slot] = max(self._sizes.get(slot, 0), num_bytes)

    def get(self, slot: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target and the source of ``slot``, both written to."""
        if slot not in self._buffers:
            target = torch.zeros(self._sizes[slot], dtype=torch.uint8, device=self.device)
            self._buffers[slot] = target, torch.ones_like(target)
        return self._buffers[slot]


class PlainCopy:
    """A memcpy of ``num_bytes`` between warm buffers, either as a whole or in pieces of 1 MB."""

    def __init__(self, buffers: CopyBuffers, slot: str, num_bytes: int, whole: bool) -> None:
        self._buffers, self._slot, self._num_bytes, self._whole = buffers, slot, num_bytes, whole
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        buffers.reserve(slot, num_bytes)

    def prepare(self) -> None:
        """Finds the buffers; call it before the first copy."""
        if self._tensors or self._arrays or not self._num_bytes:
            return
        target, source = self._buffers.get(self._slot)
        piece = self._num_bytes if self._whole else PIECE_BYTES
        ends = [(at, min(at + piece, self._num_bytes)) for at in range(0, self._num_bytes, piece)]
        tensors = [(target[begin:end], source[begin:end]) for begin, end in ends]
        if self._whole or target.device.type != "cpu":
            self._tensors = tensors
        else:  # numpy calls memcpy with less around it
            self._arrays = [(to.numpy(), of.numpy()) for to, of in tensors]

    def __call__(self) -> None:
        """Copies."""
        for to_array, of_array in self._arrays:
            np.copyto(to_array, of_array)
        for to_tensor, of_tensor in self._tensors:
            to_tensor.copy_(of_tensor)


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
