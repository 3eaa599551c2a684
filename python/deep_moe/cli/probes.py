"""What the doctor really tries: shared memory between processes, the CPU backend, the CUDA driver, limits."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HUGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
PROBE_BYTES = 1 << 20
THREAD_SECONDS = 60.0


def try_shared_memory() -> str:
    """Makes a memfd, fills it, hands it through a socket, reads it there; returns "" or what went wrong."""
    if not hasattr(os, "memfd_create"):
        return "the system has no memfd_create"
    try:
        fd = os.memfd_create("deep_moe_probe")
        try:
            return _pass_and_read(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def _pass_and_read(fd: int) -> str:
    os.ftruncate(fd, PROBE_BYTES)
    os.posix_fallocate(fd, 0, PROBE_BYTES)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right, mmap.mmap(fd, PROBE_BYTES) as written:
        written[-4:] = b"rows"
        socket.send_fds(left, [b"!"], [fd])
        _, fds, _, _ = socket.recv_fds(right, 1, 1)
        if len(fds) != 1:
            return "a file descriptor sent over a socket did not arrive"
        try:
            with mmap.mmap(fds[0], PROBE_BYTES) as read:
                return "" if read[-4:] == b"rows" else "a second mapping does not show what was written"
        finally:
            os.close(fds[0])


def huge_page_setting(path: Path = HUGE_PAGE_FILE) -> str:
    """Returns the chosen word of the kernel's setting for huge pages of shared memory, "" where there is
    none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.split("[", 1)[1].split("]", 1)[0] if "[" in text else text.strip()


def limit(name: str) -> int:
    """Returns this process's soft limit of that name, -1 for none."""
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return -1 if soft == resource.RLIM_INFINITY else int(soft)


def try_cpu_backend() -> str:
    """Lets two ranks (threads of this process) dispatch and combine a few rows; returns "" or what went
    wrong.
    """
    import deep_moe

    comms = deep_moe.thread_comms(2)
    problems: list[str] = ["did not end"] * 2

    def work(rank: int) -> None:
        try:
            problems[rank] = _exchange(comms[rank], rank)
        except Exception as error:
            problems[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREAD_SECONDS)
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)


def _exchange(comm: Any, rank: int) -> str:
    import torch

    from .. import Buffer

    buffer = Buffer(None, comm=comm, device="cpu", timeout=THREAD_SECONDS / 2, explicitly_destroy=True)
    try:
        x = torch.arange(4 * 64, dtype=torch.float32).view(4, 64).add(1000 * rank).to(torch.bfloat16)
        topk_idx = torch.tensor([[0, 1], [2, 3], [0, 3], [-1, 1]])
        weights = torch.full((4, 2), 0.5)
        result = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=4)
        combined = buffer.combine(result[0], result[4])[0]
        expected = (x.float() * torch.tensor([1.0, 1.0, 2.0, 1.0]).unsqueeze(1)).to(x.dtype)
        return "" if torch.equal(combined, expected) else "the rows that came back are not those that left"
    finally:
        buffer.destroy()


@dataclass
class CudaProbe:
    """What the driver says; ``problem`` is "" where it answers. ``blocked`` lists pairs of GPUs without peer
    access.
    """

    problem: str = ""
    version: int = 0
    gpus: list[str] = field(default_factory=list)
    blocked: list[tuple[int, int]] = field(default_factory=list)


def probe_cuda(library: str = "libcuda.so.1") -> CudaProbe:
    """Asks the CUDA driver for its version, the GPUs and their peer access; makes no CUDA context."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return CudaProbe(problem=f"{library} is not on this machine")
    status = driver.cuInit(0)
    if status == 100:
        return CudaProbe(version=_driver_int(driver.cuDriverGetVersion))
    if status != 0:
        return CudaProbe(problem=f"cuInit failed with error {status}")
    probe = CudaProbe(version=_driver_int(driver.cuDriverGetVersion))
    devices = [
        _driver_int(driver.cuDeviceGet, index) for index in range(_driver_int(driver.cuDeviceGetCount))
    ]
    for device in devices:
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), device)
        probe.gpus.append(name.value.decode(errors="replace"))
    for a, first in enumerate(devices):
        for b, second in enumerate(devices):
            if a != b and not _driver_int(driver.cuDeviceCanAccessPeer, first, second):
                probe.blocked.append((a, b))
    return probe


def _driver_int(function: Any, *arguments: int) -> int:
    value = ctypes.c_int(0)
    function(ctypes.byref(value), *arguments)
    return value.value
