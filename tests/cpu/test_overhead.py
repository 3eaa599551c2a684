"""What the library costs where it does nothing: at import, and for a dispatch of one token on one rank."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

import deep_moe

from ..support.ranks import run_ranks
from .test_cases_life import python

IMPORT_SECONDS = 0.1
DISPATCH_SECONDS = 30e-6


def slack() -> float:
    """Between 1 on an idle machine and 4: how much slower than that a busy one may be."""
    return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def test_import_is_quick() -> None:
    """Beyond torch, by the processor's clock, which other programs disturb little."""
    code = (
        "import time, torch; start = time.process_time(); import deep_moe; print(time.process_time() - start)"
    )
    python(code)  # leaves compiled files for the others
    seconds = [float(python(code).stdout) for _ in range(5)]
    assert 0.0 < statistics.median(seconds) < IMPORT_SECONDS * slack(), seconds


def test_import_loads_little() -> None:
    """Nothing of the command line, and no second array library's extras, comes with the package."""
    code = "import sys, torch; old = set(sys.modules); import deep_moe; print(*(set(sys.modules) - old))"
    loaded = python(code).stdout.split()
    assert "deep_moe.buffer" in loaded
    heavy = {"typer", "rich", "matplotlib", "click", "deep_moe.cli", "deep_moe.reference"}
    assert not heavy & {name.split(".")[0] for name in loaded} | heavy & set(loaded), sorted(loaded)


def test_dispatch_of_one_token_is_quick() -> None:
    def rank_main(comm: Any, rank: int) -> float:
        buffer = deep_moe.Buffer(None, comm=comm)
        x, idx, weights = torch.ones(1, 512).bfloat16(), torch.tensor([[0, 3]]), torch.ones(1, 2)
        seconds = []
        for _ in range(2000):
            start = time.perf_counter()
            buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=4)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    (median,) = run_ranks(rank_main, 1)
    assert 0.0 < median < DISPATCH_SECONDS * slack(), f"{median * 1e6:.1f} us"
