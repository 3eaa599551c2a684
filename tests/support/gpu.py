"""Ranks on one GPU: threads of one process, or processes.

The test process itself never uses CUDA, so that others may still be forked from it. Ranks stay, as those of
`workers` do, in processes that are spawned when first used. Each rank has a current stream of its own: on one
that they share, each would wait for the other's call. And a copy to or from ordinary host memory holds the
driver until the work in front of it is done, which may be a kernel that waits for another rank: so a stream
is waited for before anything is copied on it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

import deep_moe

from . import workers
from .program import Program, check, execute

MAX_THREADS = 4
MAX_PROCESSES = 2
WARM_BYTES = 64 << 20

Job = Callable[[Any, int, Any], Any]  # a function of a module: (comm, rank, argument) -> result


@dataclass(frozen=True)
class World:
    """How many ranks share the GPU, and in which form."""

    form: str  # "thread" or "process"
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks}-{self.form}"

    def run(self, job: Job, argument: Any = None, timeout: float = 40.0) -> list[Any]:
        """Run `job(comm, rank, argument)` on all ranks; tensors of the results come back on the CPU."""
        return self.run_each(job, [argument] * self.ranks, timeout)

    def run_each(self, job: Job, arguments: Sequence[Any], timeout: float = 40.0) -> list[Any]:
        """The same with an argument for each rank."""
        shared = workers._workers.setdefault(f"gpu {self.form}", GpuWorkers(self.form))
        return shared.run(on_stream, [(job, argument) for argument in arguments], timeout)

    def run_program(self, program: Program, timeout: float = 40.0) -> None:
        """Run a program on all ranks and check everything."""
        arguments = [program.only(rank) for rank in range(self.ranks)]
        check(program, self.run_each(run_program_on_rank, arguments, timeout))


WORLDS = [World("thread", 1), World("thread", 2), World("thread", 4), World("process", 2)]
ONE = WORLDS[0]


class GpuWorkers(workers.Workers):
    """Spawned ranks, warm before they get their first job."""

    def _start(self) -> None:
        spawn = get_context("spawn")
        children = 1 if self.form == "thread" else MAX_PROCESSES
        pairs = [Pipe() for _ in range(children)]
        links = [Pipe() for _ in range(children - 1)]
        for child, (_, theirs) in enumerate(pairs):
            mine = [ours for ours, _ in links] if child == 0 else [links[child - 1][1]]
            process = spawn.Process(target=serve, args=(self.form, child, theirs, mine), daemon=True)
            process.start()
            assert process.pid is not None
            self._pids.append(process.pid)
        for end in [theirs for _, theirs in pairs] + [end for link in links for end in link]:
            end.close()
        self._pipes = [ours for ours, _ in pairs]


def serve(form: str, child: int, pipe: Connection, links: Sequence[Connection]) -> None:
    """The life of a spawned process: jobs, until the pipe closes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test process
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    # Code that is loaded when first used may wait for a kernel that waits for a rank that is loading it; and
    # streams that share a hardware queue wait for each other.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    torch.set_num_threads(1)
    for _ in range(MAX_THREADS if form == "thread" else 1):
        streams.append(warm_stream())
        side_streams.append(warm_stream())
    torch.cuda.synchronize()
    try:
        workers.Workers(form)._serve(child, pipe, links)
    except EOFError:
        os._exit(0)


streams: list[torch.cuda.Stream] = []  # the current ones of this process's ranks
side_streams: list[torch.cuda.Stream] = []  # their second ones


def side_stream() -> torch.cuda.Stream:
    """A second stream of this rank. (torch gives the same few new ones to everybody, again and again.)"""
    return side_streams[streams.index(torch.cuda.current_stream())]


def warm_stream() -> torch.cuda.Stream:
    """A stream with memory of torch's to hand out: asking the driver for more may wait for other ranks."""
    stream: torch.cuda.Stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        held = [
            torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (WARM_BYTES, 1 << 20, 1 << 10)
        ]
        del held
        torch.cuda._sleep(1000)
        stream.synchronize()
    return stream


def on_stream(comm: Any, rank: int, work: tuple[Job, Any]) -> Any:
    job, argument = work
    with torch.cuda.stream(streams[rank % len(streams)]):
        result = on_cpu(job(comm, rank, argument))
        torch.cuda.current_stream().synchronize()
        comm.allgather(None)  # nobody frees memory or loads code while another still works
    return result


def run_program_on_rank(comm: Any, rank: int, program: Program) -> Any:
    buffers = [options.make(comm) for options in program.buffers]
    assert all(buffer.device.type == "cuda" for buffer in buffers)
    moving: list[Any] = [OnDevice(buffer) for buffer in buffers]
    try:
        return on_cpu(execute(program, rank, moving))
    finally:
        for buffer in buffers:
            buffer.destroy()


class OnDevice:
    """A Buffer on a GPU whose high-throughput calls take CPU tensors: copies of them travel."""

    def __init__(self, buffer: deep_moe.Buffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._buffer, name)
        if name not in ("get_dispatch_layout", "dispatch", "combine"):
            return member

        def call(*arguments: Any, **named: Any) -> Any:
            given = [on_gpu(argument) for argument in arguments]
            result = member(*given, **{key: on_gpu(argument) for key, argument in named.items()})
            torch.cuda.current_stream().synchronize()  # the program may look at it
            return result

        return call


def on_gpu(argument: Any) -> Any:
    """Tensors and pairs of tensors on the current device, strides kept; all else (handles) as it is."""
    if isinstance(argument, torch.Tensor):
        if argument.is_cuda:
            return argument
        torch.cuda.current_stream().synchronize()
        moved = torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device=torch.cuda.current_device()
        )
        return moved.copy_(argument)
    if isinstance(argument, tuple) and len(argument) == 2:
        return tuple(on_gpu(part) for part in argument)
    return argument


def on_cpu(result: Any) -> Any:
    """The same with all tensors in it on the CPU."""
    if isinstance(result, torch.Tensor):
        torch.cuda.current_stream().synchronize()
        return result.detach().cpu()
    if isinstance(result, dict):
        return {key: on_cpu(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)(on_cpu(part) for part in result)
    return result
