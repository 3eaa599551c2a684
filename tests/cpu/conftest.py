"""Tests of this folder see no GPU, so that a Buffer without device= is on the CPU wherever they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_gpu() -> Iterator[None]:
    """For the tests and for the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield
