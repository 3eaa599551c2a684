"""The two forms of ranks on GPUs, for tests that take a form."""

from __future__ import annotations

import pytest

from ..support.ranks import GPU_FORMS


@pytest.fixture(params=GPU_FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Threads of one process, at the same time; or processes, which take turns on a GPU that they share."""
    return str(request.param)


@pytest.fixture
def process_form() -> str:
    """Processes alone."""
    return "gpu process"
