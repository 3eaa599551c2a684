"""The protocol between nodes under spin: each model holds, and each mistake in it is found (docs/models)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.models import check

pytestmark = pytest.mark.tools("spin", "gcc")
MODELS = Path(check.__file__).parent


@pytest.mark.parametrize("model", check.MISTAKES)
def test_model_holds(model: str) -> None:
    result = check.check(model)
    assert result.violation is None
    assert result.states > 50


@pytest.mark.parametrize(("model", "mistake"), [run for run in check.runs() if run[1]])
def test_mistake_is_found(model: str, mistake: str) -> None:
    assert check.check(model, mistake).violation is not None


@pytest.mark.parametrize("model", check.MISTAKES)
def test_every_mistake_of_a_model_is_listed(model: str) -> None:
    """A name that the model does not know would turn nothing on."""
    text = (MODELS / f"{model}.pml").read_text()
    assert set(re.findall(r"(?m)^#ifn?def (\w+)", text)) == set(check.MISTAKES[model])


def test_every_model_is_checked() -> None:
    assert {path.stem for path in MODELS.glob("*.pml")} == set(check.MISTAKES)
