"""From what the ranks measured of low-latency calls to tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .timing import median

HOOK_AIM_PERCENT = 5.0
TIMES = ("device_us", "issue_us", "wall_us")


def merge_low_latency(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Entries are the same in number and order on each rank; each sample is that of the slowest."""
    merged = []
    for entries in zip(*of_ranks, strict=True):
        slowest = {
            key: median([max(times) for times in zip(*(entry[key] for entry in entries), strict=True)])
            for key in TIMES
        }
        merged.append({**entries[0], **slowest, "ranks": len(entries)})
    return merged


def hook_overlap_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Adds the medians, and how much longer the GEMM takes than alone, in percent."""
    medians = {f"{call}_us": median(times) for call, times in entry["us"].items()}
    slower = {
        f"{call}_slower_percent": 100.0 * (medians[f"{call}_us"] / medians["alone_us"] - 1.0)
        for call in ("dispatch", "combine")
    }
    return {**entry, **medians, **slower}


def describe_hook_overlap(entry: dict[str, Any]) -> str:
    """Returns the sentence of one entry."""
    rows, columns, inner = entry["gemm"]
    beside = ", ".join(
        f"{entry[f'{call}_us']:.1f} us between a {call} of {entry['tokens']} tokens and its hook "
        f"({entry[f'{call}_slower_percent']:+.1f} %)"
        for call in ("dispatch", "combine")
    )
    return (
        f"hooks: a GEMM of {rows} x {columns} x {inner} takes {entry['alone_us']:.1f} us alone, {beside}; "
        f"aim: at most {HOOK_AIM_PERCENT:g} %"
    )


def low_latency_table(entries: Sequence[dict[str, Any]]) -> Any:
    """A line for each payload, way and driver; a column for each number of tokens."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    counts = sorted({entry["tokens"] for entry in entries})
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("low latency, us a pair", "dispatched as", "driven by"):
        table.add_column(column, no_wrap=True)
    for count in counts:
        table.add_column(f"T={count}", justify="right", no_wrap=True)
    table.add_column("host us", justify="right", no_wrap=True)
    for cells in low_latency_lines(entries, counts):
        table.add_row(*map(escape, cells))
    return table


def low_latency_lines(entries: Sequence[dict[str, Any]], counts: Sequence[int]) -> list[list[str]]:
    """The texts of the table's lines. Graphs by the time on the GPU, calls from Python by wall time; the
    last column is the host's time of the fewest tokens."""
    lines: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for entry in entries:
        key = (entry["call"], entry["payload"], entry["driver"])
        lines.setdefault(key, {})[entry["tokens"]] = entry
    result = []
    for key, by_count in lines.items():
        time = "device_us" if key[2] == "graph" else "wall_us"
        cells = [f"{by_count[count][time]:.1f}" if count in by_count else "" for count in counts]
        host = "" if key[2] == "graph" else f"{by_count[counts[0]]['issue_us']:.1f}"
        result.append([*key, *cells, host])
    return result
