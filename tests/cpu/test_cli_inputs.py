"""What the bench routes: text, gates, made-up skews, traces, models, and the options that choose."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deep_moe.cli.gate import choose, gate_weight, load_trace, made_up_routes, run_gate, trace_routes
from deep_moe.cli.inputs import make_inputs
from deep_moe.cli.machine import BusyMeter
from deep_moe.cli.models import find_model, load_models
from deep_moe.cli.options import BenchOptions, resolve
from deep_moe.cli.text import embed, load_tokens, tokenise, window, word_vector

CPU = torch.device("cpu")


def test_tokenise_keeps_words_whole_and_marks_apart() -> None:
    assert tokenise("The miller's\n 2nd wheel, Ferenc!") == [
        "the",
        "miller's",
        "2nd",
        "wheel",
        ",",
        "ferenc",
        "!",
    ]
    assert tokenise("Größe 東京") == ["größe", "東京"]
    assert tokenise(" \n") == []


def test_default_text_is_long_and_skewed() -> None:
    tokens = load_tokens(None)
    counts = sorted((tokens.count(word) for word in set(tokens)), reverse=True)
    assert len(tokens) > 5000
    assert len(counts) > 1000
    assert sum(counts[:20]) > 0.3 * len(tokens)


def test_text_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n ")
    with pytest.raises(ValueError, match="at least one word"):
        load_tokens(str(tmp_path / "empty.txt"))


def test_window_starts_again_at_the_end() -> None:
    assert window(["a", "b", "c"], 2, 5) == ["c", "a", "b", "c", "a"]


def test_embeddings_depend_on_the_word_and_the_one_before() -> None:
    x = embed(["the", "sea", "the", "sea", "a", "sea"], 64)
    assert torch.equal(x[1], x[3])
    assert not torch.equal(x[1], x[5])
    assert torch.equal(word_vector("sea", 64), word_vector("sea", 64))
    assert 0.7 < float(embed(load_tokens(None)[:500], 256).var()) < 1.3
    assert embed([], 8).shape == (0, 8)


def slow_choose(scores: list[float], topk: int, groups: int, topk_groups: int) -> list[int]:
    """The group-limited choice, written the slow way."""
    size = len(scores) // groups
    blocks = [sorted(scores[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: sum(blocks[g][:2]), reverse=True)[:topk_groups]
    eligible = [e for e in range(len(scores)) if e // size in best]
    return sorted(eligible, key=lambda e: scores[e], reverse=True)[:topk]


@pytest.mark.parametrize(
    ("experts", "topk", "groups", "topk_groups"), [(32, 4, 8, 3), (12, 3, 12, 5), (16, 4, 2, 1)]
)
def test_group_limited_gate_matches_the_slow_way(
    experts: int, topk: int, groups: int, topk_groups: int
) -> None:
    scores = torch.rand(50, experts, generator=torch.Generator().manual_seed(experts))
    topk_idx, weights = choose(scores, topk, groups, topk_groups)
    for row in range(50):
        assert topk_idx[row].tolist() == slow_choose(scores[row].tolist(), topk, groups, topk_groups)
    chosen = scores.gather(1, topk_idx)
    torch.testing.assert_close(weights, chosen / chosen.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gate_takes_the_best_experts(kind: str) -> None:
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    weight = gate_weight(32, 16, seed=3)
    topk_idx, weights = run_gate(x, weight, kind, 4)
    assert torch.equal(topk_idx, (x @ weight).topk(4, dim=1).indices)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(20))
    softmax = run_gate(x, weight, "softmax", 4)[1]
    assert (kind == "softmax") == torch.equal(weights, softmax)


def test_text_routing_is_skewed_and_the_same_every_time() -> None:
    options = BenchOptions(tokens=800, hidden=64, experts=64, topk=4)
    first, again = make_inputs(options, 1, CPU), make_inputs(options, 1, CPU)
    assert torch.equal(first.topk_idx, again.topk_idx)
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.topk_idx, make_inputs(options, 0, CPU).topk_idx)
    load = torch.bincount(first.topk_idx.flatten(), minlength=64)
    assert int(load.max()) > 2 * int(load.sum()) / 64


def loads(kind: str) -> torch.Tensor:
    """The number of rows that each of 16 experts gets of 2000 tokens with 4 experts each."""
    topk_idx, weights = made_up_routes(kind, 2000, 16, 4, seed=5)
    assert topk_idx.shape == weights.shape == (2000, 4)
    assert bool((topk_idx.sort(dim=1).values.diff(dim=1) > 0).all())
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(2000))
    return torch.bincount(topk_idx.flatten(), minlength=16)


def test_made_up_routes_have_the_skew_they_say() -> None:
    uniform, zipf, hot = loads("uniform"), loads("zipf"), loads("hot")
    assert int(uniform.min()) > 400
    assert int(uniform.max()) < 600
    assert int(zipf[0]) > 3 * int(zipf[12:].float().mean())
    assert int(hot[0]) == 2000
    assert int(hot[1:].max()) < 500
    with pytest.raises(ValueError, match="uniform, zipf and hot"):
        made_up_routes("cold", 1, 4, 1, 0)


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_trace_is_read_and_cut_by_rank(tmp_path: Path, suffix: str) -> None:
    rows = torch.tensor([[0, 1], [2, -1], [3, 3]])
    path = tmp_path / f"trace{suffix}"
    if suffix == ".npy":
        np.save(path, rows.view(1, 3, 2).numpy().astype(np.int32))
    else:
        torch.save(rows, path)
    trace = load_trace(str(path))
    assert torch.equal(trace, rows)
    options = BenchOptions(tokens=2, hidden=16, experts=4, topk=2, routing="trace", trace=str(path))
    inputs = make_inputs(options, 1, CPU)
    assert inputs.topk_idx.tolist() == [[3, 3], [0, 1]]
    weights = trace_routes(trace, 1, 1, 0)[1]
    assert weights.tolist() == [[1.0, 0.0]]
    with pytest.raises(ValueError, match="4 or more"):
        make_inputs(BenchOptions(experts=3, topk=2, routing="trace", trace=str(path)), 0, CPU)


@pytest.mark.parametrize(
    ("array", "name", "text"),
    [
        (np.zeros((2, 2), dtype=np.float32), "a.npy", "array of integers"),
        (np.zeros(3, dtype=np.int64), "a.npy", "2 dimensions"),
        (np.full((2, 2), -3), "a.npy", "holds the id -3"),
        (np.zeros((2, 2), dtype=np.int64), "a.bin", "end in .npy"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, array: Any, name: str, text: str) -> None:
    with open(tmp_path / name, "wb") as file:
        np.save(file, array)
    with pytest.raises(ValueError, match=text):
        load_trace(str(tmp_path / name))


def test_models_are_found_in_any_case_and_are_valid_options() -> None:
    assert find_model("deepseek-v3").topk_groups == 4
    with pytest.raises(ValueError, match="Qwen3-Next"):
        find_model("qwen3")
    assert len(load_models()) > 40
    for model in load_models():
        options = resolve({}, model)
        assert (options.hidden, options.experts, options.topk) == (
            model.hidden,
            model.num_experts,
            model.topk,
        )


def test_explicit_options_win_over_the_models() -> None:
    options = resolve({"topk": 2, "tokens": 64, "ranks": None}, find_model("Mistral-4"))
    assert (options.topk, options.tokens, options.ranks, options.ll_tokens) == (2, 64, 4, 64)
    assert options.model == "Mistral-4"
    assert BenchOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ranks": 0}, "ranks: got 0; allowed: 1 or more"),
        ({"dtype": "int8"}, "dtype: got 'int8'; allowed are bf16, fp16, fp32"),
        ({"hidden": 100}, "hidden: got 100; allowed: a multiple of 8"),
        ({"hidden": 2880, "fp8": True}, "a multiple of 128 with --fp8"),
        ({"topk": 65}, "topk: got 65; allowed: at most experts = 64"),
        ({"groups": 7, "topk_groups": 1}, "groups: got 7; allowed: a divisor of 64"),
        ({"groups": 8}, "topk-groups: got 0; allowed: 1 to 8"),
        ({"groups": 16, "topk_groups": 1}, "at most 4, the experts of the chosen groups"),
        ({"topk_groups": 2}, "it needs --groups"),
        ({"num_sms": (8, 0)}, "num-sms: got 0; allowed: 1 or more"),
        ({"ll_tokens": 600}, "ll-tokens: got 600; allowed: at most tokens = 512"),
        ({"timeout": 0.0}, "timeout"),
        ({"mode": "ll", "compare": "gloo"}, "leave out --mode ll"),
    ],
)
def test_wrong_options_say_what_is_allowed(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(given)
    assert text in str(caught.value)


def test_busy_meter_counts_other_programs_and_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(100.0, 40.0, 5.0), (110.0, 47.0, 9.0), (110.0, 44.0, 9.0)])
    monkeypatch.setattr(BusyMeter, "_read", staticmethod(lambda: next(readings)))
    meter = BusyMeter()
    assert meter.others() == pytest.approx(0.3)
    assert meter.others() == 0.0


def test_busy_meter_reads_this_machine() -> None:
    meter, begin = BusyMeter(), time.process_time()
    while time.process_time() - begin < 0.3:
        pass
    total, busy, own = meter._read()
    assert total > meter._begin[0]
    assert busy > meter._begin[1]
    assert own - meter._begin[2] >= 0.2


def test_trace_gives_the_number_of_experts_a_token() -> None:
    assert resolve({"trace": "t.npy"}, trace_topk=3).topk == 3
    with pytest.raises(ValueError, match="the trace has 3 ids"):
        resolve({"topk": 4, "trace": "t.npy"}, trace_topk=3)
