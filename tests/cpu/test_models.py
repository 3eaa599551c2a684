"""The shapes of every published model of the package's list, and many rank counts."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch

from ..support.high_throughput import Combine, Dispatch
from ..support.inputs import Case, Inputs, gate, random_rows, rng
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import Program, run

MODELS: list[dict[str, Any]] = json.loads((resources.files("deep_moe") / "models.json").read_text())

TOKENS = (5, 9, 7, 6, 8, 5, 0, 9)  # of eight ranks; four take the first four


def model_inputs(model: dict[str, Any], tokens: tuple[int, ...]) -> Inputs:
    experts, hidden, topk = model["num_experts"], model["hidden"], model["topk"]
    x, idx, weights = [], [], []
    for rank, count in enumerate(tokens):
        gen = rng(len(model["name"]), rank)
        scores = torch.randn(count, experts, generator=gen)
        ids, of_ids = gate(scores, topk, model["groups"], model["topk_groups"])
        x.append(random_rows(gen, count, hidden, torch.bfloat16))
        idx.append(ids)
        weights.append(of_ids)
    return Inputs(list(x), idx, weights, experts, hidden, torch.bfloat16)


def test_the_list_is_whole() -> None:
    assert len(MODELS) >= 40 and len({model["name"] for model in MODELS}) == len(MODELS)
    for model in MODELS:
        assert 1 <= model["topk"] <= model["num_experts"], model
        if model["groups"]:
            each = model["num_experts"] // model["groups"]
            assert (
                model["num_experts"] % model["groups"] == 0 and model["topk"] <= each * model["topk_groups"]
            ), model


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_high_throughput(model: dict[str, Any], ranks: int) -> None:
    given = model_inputs(model, TOKENS[:ranks])
    run(Program([Dispatch(given), Combine(0), Dispatch(given, path="fused"), Combine(2, seed=1)]), ranks)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["name"])
def test_low_latency(model: dict[str, Any], ranks: int) -> None:
    """Two tokens a rank at most: the packed rows are as many as all experts could get."""
    given = model_inputs(model, (2, 1, 0, 2, 1, 2, 2, 1)[:ranks])
    fp8 = model["hidden"] % 128 == 0
    calls = [LowLatencyDispatch(given, 2, use_fp8=fp8, hook="now"), LowLatencyCombine(0)]
    run(Program(calls), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8, 12])
def test_rank_counts(ranks: int, form: str) -> None:
    case = Case("ranks", tuple((7 * rank + 3) % 11 for rank in range(ranks)), hidden=256, experts=25, topk=6)
    given = case.inputs()
    calls = [Dispatch(given), Combine(0), LowLatencyDispatch(given, 11, use_fp8=True), LowLatencyCombine(2)]
    run(Program(calls), ranks, form)
