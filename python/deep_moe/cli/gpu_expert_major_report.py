"""What a run on GPUs says about rows by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .timing import median

PERMUTES = ("dispatch, sort and gather", "weigh and scatter, combine")  # torch's part takes most of them


def merge_expert_major(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each sample is that of the slowest rank, and so are the numbers of rows."""
    merged = []
    for entries in zip(*of_ranks, strict=True):
        samples = [max(times) for times in zip(*(entry["us"] for entry in entries), strict=True)]
        rows = {key: max(entry[key] for entry in entries) for key in ("received", "entries")}
        merged.append({**entries[0], **rows, "us": median(samples), "samples_us": samples})
    return merged


def expert_major_table(entries: Sequence[dict[str, Any]]) -> Any:
    """A line a call."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    first = entries[0]
    rows = f"{first['received']:,} rows received, {first['entries']:,} by expert"
    table.add_column(f"{rows}, {first['num_sms']} SMs a rank")
    table.add_column("us", justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(entry["call"], f"{entry['us']:,.1f}")
    return table
