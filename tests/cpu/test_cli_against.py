"""``deep-moe compare`` and ``deep-moe bench --against``: which rows are the same, what has become slower."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deep_moe.cli.bench import plan_all
from deep_moe.cli.compare import compare, summary_of, verdict
from deep_moe.cli.runs import measures, merge_runs, options_of, read_runs

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
OLD = RESULTS / "bench_1xh200_2026-11-30.json"
SMALL = ("--ranks", "2", "--hidden", "256", "--experts", "8", "--topk", "2", "--iters", "3", "--mode", "ht")


def deep_moe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deep_moe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def with_times(run: dict[str, Any], factor: float) -> dict[str, Any]:
    """The same run with all times of rows multiplied."""
    changed = copy.deepcopy(run)
    for row in changed["rows"]:
        row["us"] *= factor
    return changed


@pytest.fixture
def run() -> dict[str, Any]:
    (found,) = read_runs(OLD)
    return found


def test_a_run_is_as_fast_as_itself(run: dict[str, Any]) -> None:
    same = compare([run], [run])
    assert same.differences == [] and (same.only_old, same.only_new) == (0, 0)
    assert len(same.changes) > 50 and all(change.percent == 0.0 for change in same.changes)
    assert verdict(same, 0.0) == ""


@pytest.mark.parametrize("step", ["dispatch", "combine", "plain copy for dispatch"])
def test_the_one_slower_row_is_found(run: dict[str, Any], step: str) -> None:
    """Of plain copies it is the fastest of a kind that counts, and it fails nothing."""
    changed = copy.deepcopy(run)
    for row in changed["rows"]:
        if (row["name"], row["step"], row["driver"]) == ("bf16, 16 SMs", step, "C++"):
            row["us"] *= 1.1
    found = compare([run], [changed])
    (slower,) = [change for change in found.changes if change.percent > 0.1]
    assert (slower.new.name, slower.new.step, slower.new.driver) == ("bf16, 16 SMs", step, "C++")
    assert slower.percent == pytest.approx(10.0)
    if "copy" in step:
        assert not slower.new.is_ours and verdict(found, 5.0) == ""
    else:
        said = verdict(found, 5.0)
        assert f"1 row is slower by more than 5 %, most of all bf16, 16 SMs: {step} C++ (+10.0 %)" in said
        assert verdict(found, 11.0) == ""


@pytest.mark.parametrize(
    "parameter", ["ranks", "hidden", "experts", "topk", "dtype", "routing", "tokens", "processes"]
)
def test_rows_of_other_work_are_not_compared(run: dict[str, Any], parameter: str) -> None:
    other = copy.deepcopy(run)
    value = other["parameters"][parameter]
    other["parameters"][parameter] = value + 1 if isinstance(value, int) else f"{value}x"
    found = compare([run], [other])
    # Small pairs have a number of tokens of their own.
    assert [one for one in found.changes if parameter != "tokens" or one.new.kind != "small pair"] == []
    assert found.only_old == found.only_new > 50
    if parameter != "tokens":
        assert f"parameters: {parameter}: {value} -> " in "\n".join(found.differences)
        assert summary_of(found) == "no row is in both files"
        assert "none can be compared" in verdict(found, 5.0) and verdict(found, None) == ""


def test_what_differs_is_said(run: dict[str, Any]) -> None:
    other = copy.deepcopy(run)
    other["parameters"] |= {"iters": 50, "seed": 3}
    other["machine"] |= {"gpus": ["NVIDIA H100"] * 2, "busy_with_others": 0.4}
    other["versions"]["torch"] = "9.9"
    lines = compare([run], [other]).differences
    assert lines == [
        "parameters: iters: 10 -> 50",
        "parameters: seed: 0 -> 3",
        "machine: gpus: NVIDIA H200 -> 2 x NVIDIA H100",
        f"versions: torch: {run['versions']['torch']} -> 9.9",
        "machine: other programs used 40% of the processors in the new run",
    ]


def test_runs_of_a_sweep_are_told_apart_by_their_tokens(run: dict[str, Any], tmp_path: Path) -> None:
    few = with_times(run, 0.5)
    few["parameters"] |= {"tokens": 64, "ll_tokens": 64}
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(merge_runs([few, run])))
    found = compare(read_runs(path), [with_times(few, 1.5)])
    rows = [change for change in found.changes if change.new.kind in ("deep_moe", "copy")]
    assert rows and all(change.percent == pytest.approx(50.0) for change in rows)
    assert {change.new.tokens for change in rows} == {64}
    assert "+50.0 % on average" in summary_of(compare([few], [with_times(few, 1.5) | {"summary": {}}]))


def test_low_latency_pairs_are_compared_by_what_is_shown() -> None:
    """Graphs by the GPU's time, calls from Python by the wall's."""
    (run,) = read_runs(RESULTS / "bench_low_latency_2xh200_2026-11-30.json")
    entries = run["summary"]["low_latency"]
    found = {(one.name, one.step, one.driver, one.tokens): one.us for one in measures(run)}
    assert len(found) == len(entries) > 20
    for entry in entries:
        time = entry["device_us" if entry["driver"] == "graph" else "wall_us"]
        assert found[f"LL {entry['payload']}", entry["call"], entry["driver"], entry["tokens"]] == time


def test_rows_without_a_time_are_left_out(run: dict[str, Any]) -> None:
    """A time that was no number is null in the file."""
    other = copy.deepcopy(run)
    other["rows"][-1]["us"] = None
    found = compare([run], [other])
    assert (found.only_old, found.only_new) == (1, 0) and verdict(found, 0.0) == ""


def test_files_of_the_first_schema_are_read() -> None:
    (run,) = read_runs(RESULTS / "cpu_2core_epyc_2026-11-30.json")
    assert run["schema"] == 1
    options = options_of(run)
    assert (options.tokens, options.num_sms, options.device) == (1024, (), "cpu")
    tokens = {one.name: one.tokens for one in measures(run)}
    assert tokens["HT bf16, heap"] == 1024 and tokens["LL fp8"] == 128
    assert tokens["memcpy as a whole (LL bf16)"] == 128


def test_command_on_two_recorded_runs() -> None:
    other = str(OLD).replace(".json", "_faster_host.json")
    shown = deep_moe("compare", str(OLD), other)
    assert shown.returncode == 0, shown.stderr
    assert "differs: machine: cores: 16 -> 32" in shown.stdout
    gated = deep_moe("compare", str(OLD), other, "--fail-if-slower", "5")
    assert gated.returncode == 1 and "slower by more than 5 %" in gated.stderr
    assert gated.stdout == shown.stdout
    assert deep_moe("compare", str(OLD), other, "--fail-if-slower", "50").returncode == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("no json", "is no JSON file"),
        ("[1]", "holds no run"),
        ('{"schema": 2, "rows": []}', "holds no run"),
        ('{"schema": 99, "parameters": {}, "rows": [], "summary": {}}', "is of schema 99"),
    ],
)
def test_files_that_are_none_of_the_bench(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_runs(path)
    done = deep_moe("bench", *SMALL, "--against", str(path))  # before anything runs
    assert done.returncode == 2 and says in done.stderr and done.stdout == ""


def test_tokens_may_be_a_list() -> None:
    given = {"device": "cpu", "ranks": 2, "tokens": "16,512", "ll_tokens": None}
    assert [(run.tokens, run.ll_tokens) for run in plan_all(given)] == [(16, 16), (512, 128)]
    assert [run.tokens for run in plan_all(given | {"tokens": None})] == [512]
    for tokens, says in (("16,16", "each number once"), ("16,x", "tokens: got 16,x"), ("0,1", "1 or more")):
        with pytest.raises(ValueError, match=says):
            plan_all(given | {"tokens": tokens})


def test_a_sweep_against_an_earlier_one(tmp_path: Path) -> None:
    """Earlier times are those of the same run, longer or shorter than any load makes them."""
    first = tmp_path / "first.json"
    done = deep_moe("bench", *SMALL, "--tokens", "16,32", "--json", str(first))
    assert done.returncode == 0, done.stdout + done.stderr
    runs = read_runs(first)
    assert [run["parameters"]["tokens"] for run in runs] == [16, 32]
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    slow.write_text(json.dumps(merge_runs([with_times(run, 1e5) for run in runs])))
    fast.write_text(json.dumps(merge_runs([with_times(run, 1e-3) for run in runs])))
    gate = ("--fail-if-slower", "20")
    better = deep_moe("bench", *SMALL, "--tokens", "16", "--against", str(slow), *gate)
    assert better.returncode == 0, better.stdout + better.stderr
    assert re.search(r"6 rows: -(99\.|100)", better.stdout) and "6 only in the old one" in better.stdout
    worse = deep_moe("bench", *SMALL, "--tokens", "16", "--against", str(fast), *gate)
    assert worse.returncode == 1 and "6 rows are slower by more than 20 %" in worse.stderr
    assert deep_moe("bench", *SMALL, "--fail-if-slower", "5").returncode == 2
