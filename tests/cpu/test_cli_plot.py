"""``--plot`` and ``deep-moe plot``: what is drawn over what."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deep_moe.cli.plot import curves
from deep_moe.cli.runs import merge_runs, read_runs

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ON_GPUS = RESULTS / "bench_2xh200_2026-11-30.json"
LOW_LATENCY = RESULTS / "bench_low_latency_2xh200_2026-11-30.json"
ON_CPU = RESULTS / "cpu_2core_epyc_2026-11-30.json"


def sweep() -> list[dict[str, Any]]:
    """The recorded run, and one of twice the tokens that takes three times as long; in falling order."""
    (run,) = read_runs(ON_CPU)
    longer = copy.deepcopy(run)
    longer["parameters"] |= {"tokens": 2048, "ll_tokens": 256}
    for row in longer["rows"]:
        row["us"] *= 3
    return [longer, run]


def test_one_run_with_several_sms_is_drawn_over_them() -> None:
    (run,) = read_runs(ON_GPUS)
    axis, found = curves([run])
    assert axis == "SMs a rank"
    by_label = {curve.label: curve for curve in found}
    assert {"bf16: dispatch (C++)", "bf16: combine (C++)", "fp8: pair (graph)"} <= set(by_label)
    assert not any("copy" in label or "Python" in label or "V1" in label for label in by_label)
    dispatch = by_label["bf16: dispatch (C++)"]
    assert dispatch.x == [8, 12, 16, 24]
    rows = {(row["name"], row["step"], row["driver"]): row for row in run["rows"] if row["kind"] != "copy"}
    recorded = [rows[f"bf16, {sms} SMs", "dispatch", "C++"] for sms in dispatch.x]
    assert dispatch.us == [row["us"] for row in recorded]
    assert dispatch.shares == [row["share"] for row in recorded] and None not in dispatch.shares


def test_several_runs_are_drawn_over_tokens() -> None:
    axis, found = curves(sweep())
    assert axis == "tokens a rank"
    by_label = {curve.label: curve for curve in found}
    assert by_label["HT bf16, heap: pair"].x == [1024, 2048]
    assert by_label["LL fp8: dispatch"].x == [128, 256]
    assert "gloo all_to_all_single: pair" in by_label
    assert not any("memcpy" in label or "layer" in label for label in by_label)
    assert all(curve.us[1] == pytest.approx(3 * curve.us[0]) for curve in found)


def test_low_latency_calls_have_tokens_within_a_run() -> None:
    axis, found = curves(read_runs(LOW_LATENCY))
    assert axis == "tokens a rank"
    assert len(found) == 16 and all(curve.x == [1, 8, 32, 128] for curve in found)
    assert all(share is None for curve in found for share in curve.shares)


def test_a_run_of_the_cpu_has_no_curves() -> None:
    assert curves(read_runs(ON_CPU))[1] == []


@pytest.mark.parametrize("source", [ON_GPUS, LOW_LATENCY, ON_CPU, "sweep"], ids=["SMs", "LL", "bars", "T"])
def test_command(tmp_path: Path, source: Path | str) -> None:
    pytest.importorskip("matplotlib")
    if isinstance(source, str):
        source = tmp_path / "sweep.json"
        source.write_text(json.dumps(merge_runs(sweep())))
    image = tmp_path / "a.png"
    command = [sys.executable, "-m", "deep_moe", "plot", str(source), str(image)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert image.read_bytes().startswith(b"\x89PNG") and image.stat().st_size > 10_000


def test_a_run_without_anything_to_draw_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from deep_moe.cli.plot import write_chart

    (run,) = read_runs(ON_GPUS)
    run["rows"] = [row for row in run["rows"] if row["kind"] == "copy"]
    with pytest.raises(ValueError, match="nothing to draw"):
        write_chart(tmp_path / "a.png", [run])
