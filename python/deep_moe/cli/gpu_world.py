"""A rank of a run on GPUs: a process of its own, or a thread beside the others; its streams, its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import Comm
from ..events import cuda
from .timing import SharedBarrier

Emit = Callable[[dict[str, Any]], None]


@dataclass
class World:
    """What the jobs of one rank share. Its stream is current on its thread, and no other rank's."""

    rank: int
    ranks: int
    device: torch.device
    comm: Comm
    barrier: SharedBarrier
    side: torch.cuda.Stream  # of high priority, like that of the calls
    processes: bool
    emit: Emit

    def at_rest(self) -> None:
        """Collective: returns when no rank has work on its stream; all leave at one moment."""
        torch.cuda.current_stream().synchronize()
        self.barrier.wait()

    def quiet(self) -> None:
        """Collective: like :meth:`at_rest`, but those who wait use no processor time meanwhile."""
        torch.cuda.current_stream().synchronize()
        self.comm.allgather(None)

    def phase(self, text: str) -> None:
        """Tells the parent what is being done."""
        if self.rank == 0:
            self.emit({"phase": text})

    def share(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Collective: the ranks' tensors, in rank order, as memory that this GPU's kernels may use."""
        if not self.processes:
            return self.comm.allgather(tensor)
        from torch.multiprocessing import reductions

        reduce: Any = reductions.reduce_tensor

        shared = []
        for rank, (make, arguments) in enumerate(self.comm.allgather(reduce(tensor))):
            if rank == self.rank:
                shared.append(tensor)
                continue
            # Opened from this rank's GPU: opened from its own it is out of reach of kernels here.
            names = list(inspect.signature(make).parameters)
            shared.append(make(**dict(zip(names, arguments, strict=True), storage_device=self.device.index)))
        torch.cuda.synchronize()
        return shared


def warm_stream(priority: int = 0) -> torch.cuda.Stream:
    """A stream that has run something."""
    stream: torch.cuda.Stream = cuda.Stream(priority=priority)
    with torch.cuda.stream(stream):
        torch.zeros(1, device="cuda")
    stream.synchronize()
    return stream
