"""Ways to run the same chains of calls: from C++, from Python, by NCCL. All give microseconds a chain.

Each has ``prepare``, which is called while all ranks are at rest, and ``run``, which is collective and runs
the chain once, so that the ranks start together, then ``count`` times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .. import _C
from ..buffer import Buffer
from ..events import cuda
from .collectives import collective_combine, collective_dispatch
from .gpu_plan import CopyShape
from .inputs import Inputs

Times = tuple[float, float, float]  # by events on the stream; until the last call has returned; until the end
NO_COPY = CopyShape(12, 4, False)


class Driver(Protocol):
    """How a chain is run. ``name`` is what the table calls it."""

    name: str

    def prepare(self, steps: tuple[str, ...], num_sms: int) -> None:
        """Gets ready. No kernel that waits for a peer may be running."""

    def run(self, count: int) -> Times:
        """Collective."""

    def combined(self) -> torch.Tensor | None:
        """Rows of the last combine."""


class CppCalls:
    """From C++, or inside CUDA graphs of ``graph_repeats`` chains, or the plain copies."""

    def __init__(self, rank: _C.BenchRank, graph_repeats: int = 0, copy: CopyShape = NO_COPY) -> None:
        self._rank, self._graph_repeats, self._copy = rank, graph_repeats, copy
        self.name = "graph" if graph_repeats else "C++"

    def prepare(self, steps: tuple[str, ...], num_sms: int) -> None:
        """See Driver."""
        copy = self._copy
        self._rank.prepare(steps, num_sms, self._graph_repeats, copy.warps, copy.stages, copy.tickets)

    def run(self, count: int) -> Times:
        """See Driver; ``count`` graphs where there are graphs."""
        return self._rank.run(count)

    def combined(self) -> torch.Tensor | None:
        """See Driver."""
        return self._rank.combined()


class Timed:
    """Runs a Python function as a chain."""

    def __init__(self) -> None:
        self._chain: Callable[[], object] = lambda: None

    def run(self, count: int) -> Times:
        """See Driver."""
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        gc.disable()
        try:
            self._chain()
            begin.record()
            start = time.perf_counter()
            for _ in range(count):
                self._chain()
            issued = time.perf_counter()
            end.record()
            torch.cuda.current_stream().synchronize()
            idle = time.perf_counter()
        finally:
            gc.enable()
        scale = 1e6 / count
        return 1e3 * begin.elapsed_time(end) / count, scale * (issued - start), scale * (idle - start)


class PythonCalls(Timed):
    """Through :class:`deep_moe.Buffer`."""

    name = "Python"

    def __init__(self, buffer: Buffer, payload: Any, inputs: Inputs, experts: int) -> None:
        super().__init__()
        self._buffer, self._payload, self._inputs, self._experts = buffer, payload, inputs, experts
        self._first = self._last = self._dispatch()
        self._combined: torch.Tensor | None = None
        torch.cuda.current_stream().synchronize()

    def _dispatch(self) -> Any:
        inputs = self._inputs
        return self._buffer.dispatch(
            self._payload,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=self._experts,
        )

    def _step(self, name: str) -> None:
        if name == "dispatch":
            self._last = None
            self._last = self._dispatch()
        elif name == "dispatch_by_handle":
            self._last = None
            self._last = self._buffer.dispatch(self._payload, handle=self._first[4])
        elif name == "combine":
            rows = self._first[0] if self._last is None else self._last[0]
            self._combined = self._buffer.combine(rows, self._first[4])[0]
        else:
            raise ValueError(f"steps: got {name}; allowed: dispatch, dispatch_by_handle, combine")

    def prepare(self, steps: tuple[str, ...], num_sms: int) -> None:
        """See Driver."""
        Buffer.set_num_sms(num_sms)
        self._last = None

        def chain() -> None:
            for step in steps:
                self._step(step)

        self._chain = chain

    def combined(self) -> torch.Tensor | None:
        """See Driver."""
        return self._combined


class NcclCalls(Timed):
    """The same exchange by ``all_to_all_single``, rows gathered before and summed after by torch."""

    name = "NCCL"

    def __init__(self, group: Any, inputs: Inputs, experts: int) -> None:
        super().__init__()
        self._group, self._inputs, self._experts = group, inputs, experts
        self._combined: torch.Tensor | None = None

    def prepare(self, steps: tuple[str, ...], num_sms: int) -> None:
        """See Driver; NCCL chooses its SMs itself."""
        inputs = self._inputs

        def chain() -> None:
            rows, handle = collective_dispatch(
                inputs.x, inputs.topk_idx, inputs.topk_weights, self._experts, self._group
            )
            if "combine" in steps:
                self._combined = collective_combine(rows.x, handle)

        self._chain = chain

    def combined(self) -> torch.Tensor | None:
        """See Driver."""
        return self._combined
