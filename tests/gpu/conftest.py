"""The two forms of ranks on one GPU, for tests that take a form."""

from __future__ import annotations

import pytest

from ..support.ranks import GPU_FORMS


@pytest.fixture(params=GPU_FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Ranks on one GPU: threads of one process, at the same time, or processes that take turns."""
    return str(request.param)
