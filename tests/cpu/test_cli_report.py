"""From the ranks' times to rows, table, JSON file and chart."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deep_moe.cli.options import BenchOptions
from deep_moe.cli.plot import write_bars
from deep_moe.cli.report import (
    assemble_checks,
    assemble_rows,
    describe_pair,
    print_report,
    summarise,
    to_document,
    write_json,
)

OPTIONS = BenchOptions(ranks=2, tokens=10, hidden=8)


def chain(
    name: str, kind: str, limit: str, times: dict[str, list[float]], rows: int = 0, link: int = 0
) -> dict[str, Any]:
    """A chain as a rank process reports it; ``rows`` and ``link`` are those of dispatch and combine alike."""
    marks = [[1000.0 * i] for i in range(len(next(iter(times.values()))))]
    for of_step in times.values():
        for of_iteration, time in zip(marks, of_step, strict=True):
            of_iteration.append(of_iteration[-1] + time)
    moved = {"dispatch": rows, "combine": rows} if rows else {}
    bytes_moved = {"dispatch": link, "combine": link} if rows else {}
    return {
        "name": name,
        "kind": kind,
        "limit": limit,
        "steps": list(times),
        "marks": marks,
        "rows": moved,
        "link_bytes": bytes_moved,
    }


def results() -> list[dict[str, Any]]:
    """Two ranks; in each iteration another is the slower one."""

    def copies(name: str, dispatch: float, combine: float) -> list[dict[str, Any]]:
        times = {"dispatch": dispatch, "combine": combine, "pair": dispatch + combine}
        return [chain(name, "memcpy", "HT bf16", {step: [time] * 3}) for step, time in times.items()]

    def of_rank(times: list[float], rows: int) -> list[dict[str, Any]]:
        ours = {"dispatch": times, "combine": [16.0] * 3}
        return [
            *copies("memcpy a", 20.0, 9.0),
            *copies("memcpy b", 18.0, 10.0),
            chain("layer", "layer", "", {"gate": [5.0, 6.0, 7.0]}),
            chain("HT bf16, heap", "deep_moe", "HT bf16", ours, rows, 4000 * rows),
            chain("LL bf16", "deep_moe", "LL bf16", {"dispatch": [7.0] * 3, "combine": [8.0] * 3}, rows, 100),
            chain(
                "gloo", "gloo", "HT bf16", {"dispatch": [150.0] * 3, "combine": [98.0] * 3}, rows, 4000 * rows
            ),
        ]

    check = {"name": "HT bf16", "error": 1e-3, "tolerance": 2e-2, "passed": True}
    return [
        {"chains": of_rank([30.0, 46.0, 40.0], 8), "checks": [check]},
        {"chains": of_rank([44.0, 32.0, 41.0], 12), "checks": [check | {"error": 2e-3}]},
    ]


def test_rows_last_until_the_last_rank_is_ready() -> None:
    rows = {(row.name, row.step): row for row in assemble_rows(results())}
    dispatch, both = rows["HT bf16, heap", "dispatch"], rows["HT bf16, heap", "pair"]
    assert dispatch.us == 44.0
    assert (dispatch.rank_us, dispatch.slowest_rank) == ([40.0, 41.0], 1)
    assert (dispatch.rows, dispatch.link_bytes) == (10.0, 40000.0)
    assert dispatch.gb_per_s == pytest.approx(40000 / 44e-6 / 1e9)
    assert dispatch.copy_us == 18.0
    assert dispatch.share == pytest.approx(18 / 44)
    assert (both.us, both.copy_us, both.rows, both.link_bytes) == (60.0, 28.0, None, 80000.0)
    gate, low_latency = rows["layer", "gate"], rows["LL bf16", "pair"]
    assert (gate.us, gate.rows, gate.link_bytes, gate.copy_us) == (6.0, None, None, None)
    assert low_latency.share is None


def test_summary_compares_with_memcpy_and_with_gloo_of_the_same_work() -> None:
    summary = summarise(assemble_rows(results()))
    assert summary["HT bf16, heap"] == {
        "pair_us": 60.0,
        "memcpy_us": 28.0,
        "share_of_memcpy": pytest.approx(28 / 60),
        "gloo_us": 248.0,
        "times_faster_than_gloo": pytest.approx(248 / 60),
    }
    assert summary["LL bf16"] == {"pair_us": 15.0}
    sentence = describe_pair("HT bf16, heap", summary["HT bf16, heap"], 2)
    assert "takes 60 us" in sentence
    assert "by 2 processes takes 28 us: 0.47 of its speed (aim: 0.5)" in sentence
    assert "4.1 times faster than gloo" in sentence


def test_one_rank_that_fails_a_check_fails_it() -> None:
    both = results()
    assert [(check.error, check.passed) for check in assemble_checks(both)] == [(2e-3, True)]
    both[0]["checks"][0] |= {"error": math.nan, "passed": False}
    failed = assemble_checks(both)[0]
    assert math.isnan(failed.error)
    assert not failed.passed


def test_table_shows_each_step_once_and_no_memcpy_rows() -> None:
    both = results()
    both[1]["checks"][0] |= {"error": 0.5, "passed": False}
    out = io.StringIO()
    print_report(Console(file=out, width=140), OPTIONS, assemble_rows(both), assemble_checks(both))
    text = out.getvalue()
    assert "FAILED  HT bf16: max error 5.00e-01 (allowed 2e-02)" in text
    assert "2 cpu ranks, 10 tokens each" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["HT", "bf16,", "heap", "dispatch", "44.0", "10", "0.04", "0.91", "18.0", "41%", "1"] in lines
    assert ["pair", "60.0", "0.08", "1.33", "28.0", "47%", "1"] in lines
    assert "memcpy a" not in text


def test_json_holds_everything_and_is_strict(tmp_path: Path) -> None:
    both = results()
    both[0]["checks"][0] |= {"error": math.inf, "passed": False}
    rows = assemble_rows(both)
    document = to_document(OPTIONS, rows, assemble_checks(both), {"date": "2030-01-01"}, summarise(rows))
    write_json(tmp_path / "out.json", document)
    read = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert (read["schema"], read["date"]) == (2, "2030-01-01")
    assert read["parameters"]["tokens"] == 10
    assert read["checks"][0] == {"name": "HT bf16", "error": None, "tolerance": 2e-2, "passed": False}
    assert len(read["rows"]) == 16
    assert read["summary"]["HT bf16, heap"]["pair_us"] == 60.0


def test_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_bars(tmp_path / "out.png", "a run", assemble_rows(results()))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out.png").stat().st_size > 10_000
