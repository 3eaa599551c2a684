"""Worlds of ranks that go round the GPUs: threads of one process, or processes.

The test process itself never uses CUDA, so that ranks may be forked from it. They stay, as those of `workers`
do; a world with other settings has processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from . import device, workers
from .device import on_cpu, on_gpu, side_stream
from .program import Program, check, cut_into_nodes, execute
from .ranks import Job

__all__ = ["CONNECTIONS_1", "ONE", "VECTOR", "WORLDS", "World", "on_cpu", "on_gpu", "side_stream"]

MAX_THREADS = 12
FEW, MANY = 2, 8  # processes that are started together

Settings = tuple[tuple[str, str], ...]  # environment of the processes

VECTOR: Settings = (("DEEP_MOE_COPY_ENGINE", "0"),)  # the paths of sm_80
CONNECTIONS_1: Settings = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)


@dataclass(frozen=True)
class World:
    """How many ranks go round the GPUs, in which form, with which settings."""

    form: str  # "thread" or "process"
    ranks: int
    settings: Settings = ()
    exact: bool = False  # processes for this number of ranks alone: NVSHMEM serves one group a process

    def __str__(self) -> str:
        settings = [f"{key.lower()}={value}" for key, value in self.settings]
        return "-".join([str(self.ranks), self.form, *settings])

    def run(self, job: Job, argument: Any = None, timeout: float = 40.0) -> list[Any]:
        """Run `job(comm, rank, argument)` on all ranks; tensors of the results come back on the CPU."""
        return self.run_each(job, [argument] * self.ranks, timeout)

    def run_each(self, job: Job, arguments: Sequence[Any], timeout: float = 40.0) -> list[Any]:
        """The same with an argument for each rank."""
        most = MAX_THREADS if self.form == "thread" else FEW if self.ranks <= FEW else MANY
        most = self.ranks if self.exact else most
        name = f"gpu {self.form} {most} {self.settings}"
        shared = workers._workers.setdefault(name, GpuWorkers(self.form, most, self.settings))
        return shared.run(on_stream, [(job, argument) for argument in arguments], timeout)

    def run_program(self, program: Program, timeout: float = 40.0) -> list[Any]:
        """Run a program on all ranks and check everything; gives the results by rank, then by call."""
        arguments = [program.only(rank) for rank in range(self.ranks)]
        results = self.run_each(run_program_on_rank, arguments, timeout)
        check(program, results)
        return results


WORLDS = [World("thread", 1), World("thread", 2), World("thread", 4), World("process", 2)]
ONE = WORLDS[0]


class GpuWorkers(workers.Workers):
    """Ranks that are warm before they get their first job."""

    def __init__(self, form: str, max_ranks: int, settings: Settings) -> None:
        super().__init__(form, max_ranks)
        self._settings = settings

    def _serve(self, rank: int, pipe: Connection, links: Sequence[Connection]) -> bytes:
        os.environ.update(self._settings)
        device.prepare(self.form, range(self.max_ranks) if self.form == "thread" else range(rank, rank + 1))
        return super()._serve(rank, pipe, links)


def on_stream(comm: Any, rank: int, work: tuple[Job, Any]) -> Any:
    job, argument = work
    with device.at_home(rank, comm.Get_size()):
        result = on_cpu(job(comm, rank, argument))
        torch.cuda.current_stream().synchronize()
        comm.allgather(None)  # nobody frees memory or loads code while another still works
    return result


def run_program_on_rank(comm: Any, rank: int, program: Program) -> Any:
    with cut_into_nodes(comm, program.local_ranks, program.machines):
        buffers = [options.make(comm) for options in program.buffers]
    assert all(buffer.device.type == "cuda" for buffer in buffers)
    try:
        return execute(program, rank, buffers)
    finally:
        for buffer in buffers:
            buffer.destroy()
