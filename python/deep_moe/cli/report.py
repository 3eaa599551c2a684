"""From the ranks' times to rows, and from rows to a table, a JSON file and a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .options import BenchOptions
from .timing import chain_times, median

SCHEMA = 2
TARGET_SHARE = 0.5


@dataclass
class Row:
    """One line of the table.

    ``us`` is the median over the iterations, until the last rank is ready; ``rank_us`` are medians of each
    rank's own time. ``rows`` and ``link_bytes`` are means over the ranks. ``copy_us`` is the time of memcpy
    for the same bytes and ``share`` = copy_us / us (None where there is none). Rows of equal ``work`` move
    the same rows. The last four are of GPUs alone: SMs a rank, who drives the calls, the host's time until a
    call has returned, and the bytes of all rows, own ones included, by time.
    """

    name: str
    step: str
    kind: str
    work: str
    us: float
    rows: float | None
    link_bytes: float | None
    gb_per_s: float | None
    copy_us: float | None
    share: float | None
    slowest_rank: int
    rank_us: list[float]
    num_sms: int | None = None
    driver: str = ""
    issue_us: float | None = None
    logical_gb_per_s: float | None = None


@dataclass
class CheckRow:
    """One check over all ranks: the largest error of any."""

    name: str
    error: float
    tolerance: float
    passed: bool


def assemble_rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """Merges the ranks' chains, which are the same in number and order on each."""
    rows = []
    for of_ranks in zip(*(result["chains"] for result in results), strict=True):
        rows += _rows_of_chain(of_ranks)
    limits: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.kind == "memcpy":
            limits[row.work, row.step] = min(limits.get((row.work, row.step), math.inf), row.us)
    for row in rows:
        if row.kind in ("deep_moe", "gloo") and (row.work, row.step) in limits:
            row.copy_us = limits[row.work, row.step]
            row.share = row.copy_us / row.us
    return rows


def _rows_of_chain(of_ranks: Sequence[dict[str, Any]]) -> list[Row]:
    steps, whole = chain_times([chain["marks"] for chain in of_ranks])
    rows = [_make_row(of_ranks, step, i, i + 1, steps[i]) for i, step in enumerate(of_ranks[0]["steps"])]
    return [*rows, _make_row(of_ranks, "pair", 0, -1, whole)] if len(rows) > 1 else rows


def _make_row(of_ranks: Sequence[dict[str, Any]], step: str, begin: int, end: int, times: list[float]) -> Row:
    first, us = of_ranks[0], median(times)
    rank_us = [median([marks[end] - marks[begin] for marks in chain["marks"]]) for chain in of_ranks]
    parts = [part for part in first["link_bytes"] if step in (part, "pair")]
    link_bytes = (
        _mean([sum(chain["link_bytes"][part] for part in parts) for chain in of_ranks]) if parts else None
    )
    return Row(
        name=first["name"],
        step=step,
        kind=first["kind"],
        work=first["limit"],
        us=us,
        rows=_mean([chain["rows"][step] for chain in of_ranks]) if step in first["rows"] else None,
        link_bytes=link_bytes,
        gb_per_s=link_bytes / us / 1e3 if link_bytes else None,
        copy_us=None,
        share=None,
        slowest_rank=rank_us.index(max(rank_us)),
        rank_us=rank_us,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def assemble_checks(results: Sequence[dict[str, Any]]) -> list[CheckRow]:
    """Merges the ranks' checks: passed where all ranks passed."""
    merged = []
    for of_ranks in zip(*(result["checks"] for result in results), strict=True):
        errors = [float(check["error"]) for check in of_ranks]
        worst = max(errors, key=lambda error: float("inf") if error != error else error)
        passed = all(check["passed"] for check in of_ranks)
        merged.append(CheckRow(of_ranks[0]["name"], worst, of_ranks[0]["tolerance"], passed))
    return merged


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Returns, for each deep_moe pair, its time, its share of memcpy's speed and its speed-up over gloo."""
    gloo = next((row for row in rows if row.kind == "gloo" and row.step == "pair"), None)
    summary: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.kind == "deep_moe" and row.step == "pair":
            entry = {"pair_us": row.us}
            if row.copy_us is not None and row.share is not None:
                entry |= {"memcpy_us": row.copy_us, "share_of_memcpy": row.share}
            if gloo is not None and row.work == gloo.work:
                entry |= {"gloo_us": gloo.us, "times_faster_than_gloo": gloo.us / row.us}
            summary[row.name] = entry
    return summary


def describe_pair(name: str, entry: dict[str, float], num_ranks: int) -> str:
    """Returns the sentence of one entry of :func:`summarise`."""
    text = f"{name}: a dispatch + combine pair takes {entry['pair_us']:,.0f} us"
    if "memcpy_us" in entry:
        processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
        aim = f" (aim: {TARGET_SHARE:g})" if name.startswith("HT") else ""
        text += (
            f"; memcpy of the same bytes by {processes} takes {entry['memcpy_us']:,.0f} us: "
            f"{entry['share_of_memcpy']:.2f} of its speed{aim}"
        )
    if "gloo_us" in entry:
        faster = entry["times_faster_than_gloo"]
        text += f"; gloo takes {entry['gloo_us']:,.0f} us: {faster:.1f} times faster than gloo"
    return text


def print_checks(console: Any, checks: Sequence[CheckRow]) -> None:
    """Prints a line a check."""
    from rich.markup import escape

    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
        console.print(
            f"{mark}  {escape(check.name)}: max error {check.error:.2e} (allowed {check.tolerance:.0e})",
            soft_wrap=True,
        )


def print_report(
    console: Any, options: BenchOptions, rows: Sequence[Row], checks: Sequence[CheckRow]
) -> None:
    """Prints the checks, the table of steps and the sentences about the pairs."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    print_checks(console, checks)
    table = Table(title=escape(describe_run(options)), title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("what", "step"):
        table.add_column(column, no_wrap=True)
    for column in ("us", "rows", "link MB", "GB/s", "copy us", "of copy limit", "slowest rank"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = ""
    for row in shown_rows(rows):
        if previous not in ("", row.name):
            table.add_section()
        cells = table_cells(row)
        table.add_row(escape(cells[0]) if row.name != previous else "", *cells[1:])
        previous = row.name
    console.print(table)
    for name, entry in summarise(rows).items():
        console.print(escape(describe_pair(name, entry, options.ranks)), soft_wrap=True)


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a table: all but those of copies, which appear as the others' limit."""
    return [row for row in rows if row.kind not in ("memcpy", "copy")]


def drawn_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a chart: those of a table that are times."""
    return [row for row in shown_rows(rows) if row.kind != "difference"]


def table_cells(row: Row) -> list[str]:
    """Returns the texts of one line of the table."""
    return [
        row.name,
        row.step,
        format_us(row.us),
        "" if row.rows is None else f"{row.rows:,.0f}",
        "" if row.link_bytes is None else f"{row.link_bytes / 1e6:.2f}",
        "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
        "" if row.copy_us is None else format_us(row.copy_us),
        "" if row.share is None else f"{row.share:.0%}",
        str(row.slowest_rank),
    ]


def format_us(us: float) -> str:
    """Returns a time with as many digits as it bears."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}"


def describe_run(options: BenchOptions) -> str:
    """Returns one line with the shape of the run."""
    gate = f"{options.gate} gate over text" if options.routing == "text" else options.routing
    groups = f" ({options.topk_groups} of {options.groups} groups)" if options.groups else ""
    model = f"{options.model}: " if options.model else ""
    low_latency = f" (LL: {options.ll_tokens})" if "ll" in options.modes else ""
    return (
        f"{model}{options.ranks} {options.device} ranks, {options.tokens} tokens each{low_latency}, "
        f"hidden {options.hidden}, {options.experts} experts, top {options.topk}{groups}, "
        f"{options.dtype}, {gate}"
    )


def to_document(
    options: BenchOptions,
    rows: Sequence[Row],
    checks: Sequence[CheckRow],
    about: dict[str, Any],
    summary: dict[str, Any],
) -> dict[str, Any]:
    """Returns what the JSON file holds; ``about`` gives date, machine, versions and build."""
    return {
        "schema": SCHEMA,
        **about,
        "parameters": asdict(options),
        "checks": [asdict(check) for check in checks],
        "rows": [asdict(row) for row in rows],
        "summary": summary,
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the document; numbers that are no numbers become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return None if isinstance(value, float) and value - value != 0 else value

    path.write_text(json.dumps(clean(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
