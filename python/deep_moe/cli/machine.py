"""What this machine and this build are: for the bench's choices, its JSON file and the doctor."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from ..tuning import cpu_model
from .options import BenchOptions


def build_info() -> dict[str, Any]:
    """Returns what the native module says about itself."""
    from .. import _C

    return dict(_C.build_info())


def can_use_cuda() -> bool:
    """Whether this build can move tokens between GPUs and there are GPUs."""
    return bool(build_info().get("cuda_transport", False)) and torch.cuda.is_available()


def num_gpus() -> int:
    """Returns the number of GPUs that this process may use."""
    return int(torch.cuda.device_count())


def pick_device(asked: str) -> str:
    """Returns ``cpu`` or ``cuda`` for ``auto``, ``cpu`` or ``cuda``; what cannot be had is a ValueError."""
    if asked == "cpu":
        return "cpu"
    if can_use_cuda():
        return "cuda"
    if asked == "cuda":
        raise ValueError(
            "device: got cuda, but this build and machine cannot move tokens between GPUs "
            "(deep-moe doctor says what is missing); allowed here: cpu, auto"
        )
    return "cpu"


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(field: str) -> int:
    """Returns a figure of /proc/meminfo such as ``MemTotal`` or ``MemAvailable`` in bytes, or 0."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


class BusyMeter:
    """Measures what share of the machine's processors other programs have used since it was made."""

    def __init__(self) -> None:
        self._begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Returns seconds of all processors together, the busy ones of them, and those of this program."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0, 0.0, 0.0
        ticks = [int(word) for word in stat.read_text(encoding="utf-8").splitlines()[0].split()[1:9]]
        seconds = [tick / os.sysconf("SC_CLK_TCK") for tick in ticks]
        idle = seconds[3] + seconds[4]
        return sum(seconds), sum(seconds) - idle, sum(os.times()[:4])

    def others(self) -> float:
        """Returns the share, 0 to 1; ended child processes count as this program. 0 where it is unknown."""
        total, busy, own = (now - begin for now, begin in zip(self._read(), self._begin, strict=True))
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0


def describe_machine(device: str) -> dict[str, Any]:
    """Returns what the JSON file says about the machine."""
    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": num_cores(),
        "memory_bytes": memory_bytes("MemTotal"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if device == "cuda":
        machine["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return machine


def describe_versions() -> dict[str, str]:
    """Returns the versions that may matter for a figure."""
    from .. import __version__

    return {"deep_moe": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}


def needed_bytes(options: BenchOptions) -> int:
    """Estimates the memory that a run on the CPU takes, all ranks together."""
    element = options.row_bytes // options.hidden
    row = options.hidden
    worst_rows = options.ranks * options.tokens
    each = 300 << 20  # the process itself
    each += row * options.experts * (4 + 8 * options.ffn // options.ranks)  # gate, local experts
    each += options.tokens * row * (element + 16)
    if "ht" in options.modes:
        each += worst_rows * row * (5 * element + 8)
    if "ll" in options.modes:
        packed = -(-options.experts // options.ranks) * options.ranks * options.ll_tokens
        each += packed * row * (4 * element + 1)
    return each * options.ranks


def require_memory(options: BenchOptions) -> None:
    """Raises ValueError if a run on the CPU would not fit into the memory that is free now."""
    free, needed = memory_bytes("MemAvailable"), needed_bytes(options)
    if options.device == "cpu" and free and needed > free:
        raise ValueError(
            f"the run needs about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free; "
            "take fewer --tokens, --ll-tokens or --ranks, a smaller --hidden, or --mode ht"
        )
