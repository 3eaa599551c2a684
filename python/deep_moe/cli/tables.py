"""A JSON file of the bench on GPUs as Markdown tables: ``python -m deep_moe.cli.tables FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .gpu_low_latency_report import low_latency_lines
from .gpu_plan import (
    COMBINE,
    COMBINE_ORDINARY,
    COMBINE_WITH_WEIGHTS,
    DISPATCH,
    DISPATCH_BY_HANDLE,
    PAIR,
    PAIR_BY_HANDLE,
)
from .gpu_report import DIFFERENCE

CALLS = (
    DISPATCH.name,
    DIFFERENCE,
    DISPATCH_BY_HANDLE.name,
    COMBINE.name,
    COMBINE_WITH_WEIGHTS.name,
    COMBINE_ORDINARY.name,
    PAIR.name,
    PAIR_BY_HANDLE.name,
)
WHERE = {"C++": "", "graph": "in a graph: ", "Python": "from Python: ", "NCCL": "by NCCL: "}


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def calls_table(document: dict[str, Any]) -> str:
    """A line a call, a column a number of SMs: us (us above the plain copy, share of its speed)."""
    rows, sms = document["rows"], document["parameters"]["num_sms"]
    payloads = list(dict.fromkeys(row["work"].split()[0] for row in rows if row["kind"] == "copy"))
    lines = []
    for driver, where in WHERE.items():
        for payload in payloads:
            for call in CALLS:
                cells = [_cell(rows, f"{payload}, {number} SMs", call, driver) for number in sms]
                if any(cells):
                    lines.append([f"{where}{call}, {payload}", *cells])
    for payload in payloads:
        for what in ("dispatch", "combine"):
            cells = [_copy(rows, f"{payload} {what}", number) for number in sms]
            if any(cells):
                lines.append([f"plain copy for {what}, {payload}", *cells])
    return table(["SMs a rank", *map(str, sms)], lines)


def _cell(rows: list[dict[str, Any]], name: str, call: str, driver: str) -> str:
    for row in rows:
        if (row["name"], row["step"], row["driver"]) == (name, call, driver) and row["kind"] != "copy":
            if row["kind"] == "difference":
                return f"{row['us']:+.1f}"
            if row["copy_us"] is None:
                return f"{row['us']:.1f}"
            return f"{row['us']:.1f} ({row['us'] - row['copy_us']:+.1f}, {row['share']:.0%})"
    return ""


def _copy(rows: list[dict[str, Any]], work: str, num_sms: int) -> str:
    """The fastest copy, and the fastest inside graphs where there are any."""
    fastest = []
    for in_graph in (False, True):
        times = [
            row["us"]
            for row in rows
            if (row["kind"], row["work"], row["num_sms"]) == ("copy", work, num_sms)
            and (row["driver"] == "graph") == in_graph
        ]
        fastest += [f"{min(times):.1f}"] if times else []
    return fastest[0] + (f" (in graphs {fastest[1]})" if len(fastest) > 1 else "") if fastest else ""


def overlap_table(entries: list[dict[str, Any]]) -> str:
    """A line for each number of ranks that dispatch."""
    head = [
        "ranks that dispatch",
        "alone, us",
        "beside the holding kernel, us",
        "beside the dispatch, us",
        "slower by",
    ]
    return table(
        head,
        (
            [
                str(entry["dispatching_ranks"]) + ("" if entry["covered"] else " (NOT COVERED)"),
                f"{entry['alone_us']:.0f}",
                f"{entry['hold_us']:.0f}",
                f"{entry['dispatch_us']:.0f}",
                f"{entry['slower_percent']:.1f} %",
            ]
            for entry in entries
        ),
    )


def host_cost_table(entries: list[dict[str, Any]]) -> str:
    """A line for each kind of small pair."""
    keys = ("call", "driver", "ranks", "tokens")
    lines = ([*(str(entry[key]) for key in keys), f"{entry['us']:.1f}"] for entry in entries)
    return table(["call", "driven by", "ranks", "tokens", "wall time, us"], lines)


def expert_major_table(entries: list[dict[str, Any]]) -> str:
    """A line a call."""
    rows = f"{entries[0]['received']:,} rows received, {entries[0]['entries']:,} by expert"
    return table([rows, "us"], ([entry["call"], f"{entry['us']:.0f}"] for entry in entries))


def low_latency_table(entries: list[dict[str, Any]]) -> str:
    """A line for each payload, way and driver, a column a number of tokens: us a pair."""
    counts = sorted({entry["tokens"] for entry in entries})
    head = ["pairs at low latency", "dispatched as", "driven by", *(f"T={count}" for count in counts)]
    return table([*head, "host, us"], low_latency_lines(entries, counts))


def tables(document: dict[str, Any]) -> str:
    """All tables that the document has figures for."""
    summary = document["summary"]
    parts = [calls_table(document)] if document["rows"] else []
    if summary["overlap"]:
        parts.append(overlap_table(summary["overlap"]))
    if summary["host_cost"]:
        parts.append(host_cost_table(summary["host_cost"]))
    if summary.get("expert_major"):
        parts.append(expert_major_table(summary["expert_major"]))
    if summary["low_latency"]:
        parts.append(low_latency_table(summary["low_latency"]))
    return "\n\n".join(parts)


def main() -> None:
    """Prints the tables of the file that is named."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m deep_moe.cli.tables FILE  (of deep-moe bench --json, on GPUs)")
    print(tables(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
