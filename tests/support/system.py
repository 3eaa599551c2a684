"""What a process holds of the system (memory, mappings, children), and flags for the test to wait for."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from pathlib import Path

import torch


def memfds() -> int:
    """Open descriptors of anonymous files in memory."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone by now
            count += "memfd:" in os.readlink(f"/proc/self/fd/{entry}")
    return count


def memfd_mappings() -> int:
    """Mappings of anonymous files in memory."""
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def children() -> set[int]:
    """Child processes of this process, dead ones that nobody has waited for among them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


@functools.lru_cache
def num_gpus() -> int:
    """CUDA devices; a child counts, for processes forked from one that has used CUDA cannot use it."""
    pid = os.fork()
    if pid == 0:
        os._exit(min(torch.cuda.device_count(), 100))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def gpu_name(rank: int) -> str:
    """What torch calls the GPU of a rank: ranks go round the GPUs."""
    return f"cuda:{rank % num_gpus()}"


def first_gpu() -> str:
    """CUDA_VISIBLE_DEVICES that leaves one GPU of those that there are."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class Flag:
    """Ranks raise it; the test waits until it was raised often enough. Made before the ranks are forked."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def up(self) -> None:
        os.write(self._write, b".")

    def wait(self, times: int, timeout: float = 20.0) -> None:
        for seen in range(times):
            ready, _, _ = select.select([self._read], [], [], timeout)
            assert ready, f"{seen} ranks of {times} came so far within {timeout} s"
            os.read(self._read, 1)

    def __enter__(self) -> Flag:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)
