"""Shapes of published models, by name."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MODELS_FILE = Path(__file__).resolve().parent.parent / "models.json"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model's MoE layer; ``groups`` is 0 where its gate knows no groups."""

    name: str
    hidden: int
    num_experts: int
    topk: int
    groups: int
    topk_groups: int


@lru_cache(maxsize=1)
def load_models() -> tuple[ModelShape, ...]:
    """Returns all shapes that ship with the package."""
    return tuple(ModelShape(**entry) for entry in json.loads(MODELS_FILE.read_text(encoding="utf-8")))


def find_model(name: str) -> ModelShape:
    """Returns the shape called ``name`` in any case; the ValueError for an unknown one offers others."""
    models = {model.name.lower(): model for model in load_models()}
    if name.lower() in models:
        return models[name.lower()]
    near = difflib.get_close_matches(name.lower(), models, n=4, cutoff=0.4)
    near += [key for key in models if name.lower() in key and key not in near]
    offered = ", ".join(models[key].name for key in near) or ", ".join(
        model.name for model in models.values()
    )
    raise ValueError(f"model: got {name!r}, which is not in the list; try one of: {offered}")
