"""The shapes of every published model of the package's list, on ranks that go round the GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from ..cpu.test_models import MODELS, TOKENS, model_inputs
from ..support.high_throughput import Combine, Dispatch
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import BufferOptions, Program, run

pytestmark = pytest.mark.gpus(1)

MANY = (700, 523)  # tokens of two ranks, for some of the models
SOME = ("DeepSeek-V3", "Nemotron-3-Super-latent", "gpt-oss-120b", "ERNIE-4.5-300B")


def program_of(model: dict[str, Any], tokens: tuple[int, ...]) -> Program:
    given = model_inputs(model, tokens)
    calls = [Dispatch(given), Combine(0), Dispatch(given, path="fused"), Combine(2, seed=1)]
    return Program(calls, (BufferOptions(num_bytes=32 << 20),))


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_models(model: dict[str, Any], ranks: int) -> None:
    run(program_of(model, TOKENS[:ranks]), ranks, "gpu thread")


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_models_at_low_latency(model: dict[str, Any], ranks: int) -> None:
    """Two tokens a rank at most; rows as fp8 where they are whole blocks, and as they are."""
    given = model_inputs(model, (2, 1, 0, 2, 1, 2, 2, 1)[:ranks])
    fp8 = model["hidden"] % 128 == 0
    calls = [
        LowLatencyDispatch(given, 2, use_fp8=fp8, hook="now"),
        LowLatencyCombine(0),
        LowLatencyDispatch(given, 3, weights=True),
        LowLatencyCombine(2, seed=1, hook="now"),
    ]
    run(Program(calls), ranks, "gpu thread")


@pytest.mark.parametrize("model", [one for one in MODELS if one["name"] in SOME], ids=lambda one: one["name"])
def test_models_with_many_tokens(model: dict[str, Any]) -> None:
    run(program_of(model, MANY), 2, "gpu thread")
