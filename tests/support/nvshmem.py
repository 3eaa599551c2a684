"""Ranks on GPUs whose nodes exchange over NVSHMEM: processes, which may share one GPU."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from .gpu import World

STATUS = "from deep_moe import _network; print(_network.status()['problem'])"


@functools.cache
def problem() -> str:
    """Why NVSHMEM cannot be used here; empty: it can. The test process, which is forked, never loads it."""
    done = subprocess.run([sys.executable, "-c", STATUS], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def needs_nvshmem() -> None:
    """Skip the test where there is none."""
    if problem():
        pytest.skip(problem())


def over_nvshmem(ranks: int) -> World:
    """So many ranks, in processes of their own."""
    return World("process", ranks, (("DEEP_MOE_NETWORK", "nvshmem"),), exact=True)
