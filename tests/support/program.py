"""Programs: lists of calls that every rank makes in the same order, checked against the reference.

A program is data. `run` executes it on all ranks, as processes or as threads, and then compares everything
that every rank holds at the end with what the reference says. Results are read after the last call, so a call
that damages a tensor handed out by an earlier one is caught too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import deep_moe

from .device import OnDevice, on_cpu
from .workers import workers


@dataclass(frozen=True)
class BufferOptions:
    """How a program makes one of its Buffers."""

    num_bytes: int = 0
    num_ll_bytes: int = 0
    timeout: float = 20.0
    memory: str = ""  # on GPUs the kind that ranks share: "fd" or "ipc"
    device: str | None = None

    def make(self, comm: Any) -> deep_moe.Buffer:
        if self.memory:
            os.environ["DEEP_MOE_DEVICE_MEMORY"] = self.memory
        try:
            return self._make(comm)
        finally:
            os.environ.pop("DEEP_MOE_DEVICE_MEMORY", None)

    def _make(self, comm: Any) -> deep_moe.Buffer:
        return deep_moe.Buffer(
            None,
            self.num_bytes,
            self.num_ll_bytes,
            low_latency_mode=self.num_ll_bytes > 0,
            explicitly_destroy=True,
            comm=comm,
            timeout=self.timeout,
            device=self.device,
        )


class Call:
    """One call of a program, on Buffer number `buffer`; `of`, in subclasses, is the call that it answers."""

    buffer: int = 0

    def only(self, rank: int) -> Call:
        """The call without the inputs of other ranks."""
        return self

    def run(self, here: Here) -> Any:
        """Make the call on one rank; what it returns stays alive to the end of the program."""
        raise NotImplementedError

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        """What one rank holds at the end of the program."""
        raise NotImplementedError

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> Any:
        """Compare the ranks' results; what it returns is this call's entry of `expected`, for later calls."""
        raise NotImplementedError


@dataclass
class Here:
    """One rank while it runs a program."""

    rank: int
    num_ranks: int
    calls: Sequence[Call]
    buffers: list[deep_moe.Buffer]
    kept: list[Any] = field(default_factory=list)
    pending: list[tuple[int, Callable[[], None]]] = field(
        default_factory=list
    )  # hooks not yet called, by call

    def defer(self, hook: Callable[[], None]) -> None:
        """Keep the hook of the call that runs now."""
        self.pending.append((len(self.kept), hook))

    def make_room(self) -> None:
        """At most three calls may be in flight: call the oldest hook before a fourth."""
        if len(self.pending) >= 3:
            self.settle(self.pending[0][0])

    def settle(self, call: int) -> None:
        """Call the hook of this call, if it still has one."""
        for entry in [entry for entry in self.pending if entry[0] == call]:
            self.pending.remove(entry)
            entry[1]()


@dataclass(frozen=True)
class Program:
    calls: Sequence[Call]
    buffers: Sequence[BufferOptions] = (BufferOptions(),)
    newest_hook_first: bool = False  # in which order the hooks left over at the end are called
    local_ranks: int = 0  # ranks of a node; 0: all ranks are on one
    machines: bool = False  # nodes are on machines of their own

    def only(self, rank: int) -> Program:
        return replace(self, calls=[call.only(rank) for call in self.calls])


class Expected(list[Any]):
    """What each call of a program so far has left for later ones to be checked against."""

    def __init__(self, local_ranks: int) -> None:
        super().__init__()
        self.local_ranks = local_ranks

    def nodes(self, num_ranks: int) -> list[int]:
        """Each rank's node."""
        return [rank // (self.local_ranks or num_ranks) for rank in range(num_ranks)]


@contextlib.contextmanager
def cut_into_nodes(comm: Any, local_ranks: int, machines: bool = False) -> Iterator[None]:
    """Buffers made in here see nodes of so many ranks. Ranks may be threads, which share an environment.

    With `machines`, for processes: each node is on another machine in earnest.
    """
    if not local_ranks:
        yield
        return
    name, value = "DEEP_MOE_LOCAL_RANKS", str(local_ranks)
    if machines:
        name, value = "DEEP_MOE_HOST_ID", f"host {comm.Get_rank() // local_ranks}"
    comm.allgather(None)
    os.environ[name] = value
    comm.allgather(None)
    try:
        yield
        comm.allgather(None)
    finally:
        os.environ.pop(name, None)


def run_on_rank(comm: Any, rank: int, program: Program) -> list[dict[str, Any]]:
    with cut_into_nodes(comm, program.local_ranks, program.machines):
        buffers = [options.make(comm) for options in program.buffers]
    try:
        return execute(program, rank, buffers)
    finally:
        for buffer in buffers:
            buffer.destroy()


def execute(program: Program, rank: int, buffers: list[deep_moe.Buffer]) -> list[dict[str, Any]]:
    """Run a program on one rank, with Buffers that are there; `check` then takes the results of all ranks."""
    on_a_gpu = buffers[0].device.type == "cuda"
    moving: list[Any] = [OnDevice(buffer) if on_a_gpu else buffer for buffer in buffers]
    here = Here(rank, buffers[0].group_size, program.calls, moving)
    for call in program.calls:
        here.kept.append(call.run(here))
    while here.pending:
        here.settle(here.pending[-1 if program.newest_hook_first else 0][0])
    collected = [call.collect(here, kept) for call, kept in zip(program.calls, here.kept, strict=True)]
    return [on_cpu(one) for one in collected] if on_a_gpu else collected


def run(
    program: Program, num_ranks: int, form: str = "process", timeout: float = 60.0
) -> list[list[dict[str, Any]]]:
    """Run a program on all ranks and check everything; gives the results by rank, then by call.

    Forms "gpu thread" and "gpu process": on ranks that go round the GPUs.
    """
    if form.startswith("gpu "):
        from .gpu import World

        return World(form.removeprefix("gpu "), num_ranks).run_program(program, timeout)
    results = workers(form).run(run_on_rank, [program.only(rank) for rank in range(num_ranks)], timeout)
    check(program, results)
    return results


def check(program: Program, results: Sequence[Sequence[dict[str, Any]]]) -> None:
    expected = Expected(program.local_ranks)
    for index, call in enumerate(program.calls):
        of_call = [result[index] for result in results]
        expected.append(call.check(of_call, expected, f"call {index} ({type(call).__name__})"))


def packed(blocks: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The used rows of all expert blocks, one below the other."""
    used = torch.arange(blocks.shape[1], device=blocks.device).unsqueeze(0) < count.unsqueeze(1)
    return blocks[used]
