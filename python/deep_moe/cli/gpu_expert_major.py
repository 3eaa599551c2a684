"""Rows by expert on GPUs: their dispatch and combine, beside plain ones and torch's permute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..buffer import Buffer
from ..events import cuda
from .gpu_world import World
from .inputs import Inputs
from .options import BenchOptions

REPEATS = 4  # calls a sample
WARM_BYTES = 24  # of torch's memory for each element of a rank's rows by expert: what the permutes take


class ExpertMajor:
    """The calls of one rank. Rows by expert are those of the permute, bit for bit; else it raises.

    The permute sorts the received ids, stably, and gathers rows and weights; on the way back rows are
    weighted and scattered in float32.
    """

    def __init__(self, world: World, options: BenchOptions, inputs: Inputs, buffer: Buffer) -> None:
        self._world, self._options, self._buffer, self._x = world, options, buffer, inputs.x
        self._call: dict[str, Any] = {
            "topk_idx": inputs.topk_idx,
            "topk_weights": inputs.topk_weights,
            "num_experts": options.experts,
        }

    def measure(self) -> list[dict[str, Any]]:
        """Collective: an entry a call, with the microseconds of each sample on this rank."""
        self._world.phase("time rows by expert")
        Buffer.set_num_sms(self._options.num_sms[-1])
        self._world.quiet()
        plain = self._buffer.dispatch(self._x, **self._call)
        ours = self._dispatch(1)
        self._world.quiet()  # to ask the driver for memory may wait for the kernels of all ranks
        self._entries, self._received = sum(plain[3]), len(plain[0])
        torch.empty(WARM_BYTES * self._entries * self._options.hidden, dtype=torch.uint8, device="cuda")
        self._world.quiet()
        rows, self._order, self._factors, handle = self._permuted()
        self._world.quiet()
        if not torch.equal(ours[0], rows) or not torch.equal(ours[2], self._factors):
            raise RuntimeError("rows by expert are not those of a dispatch and a stable sort of its ids")
        plain_rows = plain[
            0
        ].clone()  # like the permuted ones no part of the heap, so that combine copies them
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: self._buffer.dispatch(self._x, **self._call),
            "dispatch, expert-major": lambda: self._dispatch(1),
            "dispatch, expert-major, aligned to 128": lambda: self._dispatch(128),
            "dispatch, sort and gather": self._permuted,
            "combine": lambda: self._buffer.combine(plain_rows, plain[4]),
            "combine, expert-major, weighted": lambda: self._buffer.combine(
                rows, ours[4], row_weights=ours[2]
            ),
            "weigh and scatter, combine": lambda: self._unpermuted(rows, handle),
        }
        ranks, sms = self._options.ranks, self._options.num_sms[-1]
        common = {"ranks": ranks, "num_sms": sms, "received": self._received, "entries": self._entries}
        return [{"call": name, **common, "us": self._time(call)} for name, call in calls.items()]

    def _dispatch(self, alignment: int) -> Any:
        return self._buffer.dispatch(self._x, **self._call, expert_alignment=alignment, expert_major=True)

    def _permuted(self) -> tuple[Any, ...]:
        rows, ids, weights, _, handle, _ = self._buffer.dispatch(self._x, **self._call)
        flat = ids.flatten()
        order = torch.sort(flat, stable=True).indices[
            len(flat) - self._entries :
        ]  # behind those of no expert
        return rows[order // self._options.topk], order, weights.flatten()[order], handle

    def _unpermuted(self, y: torch.Tensor, handle: Any) -> Any:
        total = torch.zeros(self._received, self._options.hidden, dtype=torch.float32, device="cuda")
        total.index_add_(0, self._order // self._options.topk, y.float() * self._factors.unsqueeze(1))
        return self._buffer.combine(total.to(y.dtype), handle)

    def _time(self, call: Callable[[], Any]) -> list[float]:
        times = []
        for sample in range(self._options.warmup + self._options.iters):
            self._world.at_rest()
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPEATS):
                call()
            end.record()
            self._world.at_rest()
            if sample >= self._options.warmup:
                times.append(1e3 * begin.elapsed_time(end) / REPEATS)
        return times
