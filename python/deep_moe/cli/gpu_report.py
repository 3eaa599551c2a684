"""From what the ranks of a run on GPUs measured to rows, tables and the JSON file's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .gpu_expert_major_report import expert_major_table, merge_expert_major
from .gpu_low_latency_report import (
    describe_hook_overlap,
    hook_overlap_entry,
    low_latency_table,
    merge_low_latency,
)
from .gpu_plan import AS_TIMED, COMBINE, DISPATCH, DISPATCH_V1, PAIR
from .options import BenchOptions
from .report import CheckRow, Row, describe_run, format_us, print_checks, shown_rows
from .timing import median

GEMM_AIM_PERCENT = 5.0
NO_LIMIT = "no copy limit: it takes a GPU with a copy engine (sm_90 or later), and code for it"
DIFFERENCE = "V1 calls less num_experts="


@dataclass
class GpuResults:
    """All that a run on GPUs gives, over all ranks; overlap, host_cost and expert_major if asked for.

    ``low_latency`` and ``hook_overlap`` are those of LL calls.
    """

    rows: list[Row]
    overlap: list[dict[str, Any]]
    host_cost: list[dict[str, Any]]
    low_latency: list[dict[str, Any]] = field(default_factory=list)
    hook_overlap: list[dict[str, Any]] = field(default_factory=list)
    expert_major: list[dict[str, Any]] = field(default_factory=list)


def assemble_gpu(of_ranks: Sequence[dict[str, Any]], options: BenchOptions) -> GpuResults:
    """Merges what the ranks report; lines are the same in number and order on each."""
    rows = [_make_row(lines) for lines in zip(*(result["lines"] for result in of_ranks), strict=True)]
    limits: dict[tuple[str, int | None, bool], float] = {}
    for row in rows:
        if row.kind == "copy":
            key = (row.work, row.num_sms, row.driver == "graph")
            limits[key] = min(limits.get(key, math.inf), row.us)
    for row in rows:
        if row.kind != "copy":
            keys = [(part, row.num_sms, row.driver == "graph") for part in _parts(row.work, options.dtype)]
            if keys and all(key in limits for key in keys):
                row.copy_us = sum(limits[key] for key in keys)
                row.share = row.copy_us / row.us
    overlap = [_overlap_entry(entry) for entry in of_ranks[0]["overlap"]]
    return GpuResults(
        _with_differences(rows),
        overlap,
        _merge_costs(of_ranks),
        merge_low_latency([result["low_latency"] for result in of_ranks]),
        [hook_overlap_entry(entry) for entry in of_ranks[0]["hook_overlap"]],
        merge_expert_major([result["expert_major"] for result in of_ranks]),
    )


def _parts(work: str, dtype: str) -> list[str]:
    """The plain copies that a row's work is made of. Combine sums rows of the run's type, whatever came."""
    payload, _, what = work.partition(" ")
    if what == "pair":
        return [f"{payload} dispatch", f"{dtype} combine"]
    return [work] if what else []


def _slowest(lines: Sequence[dict[str, Any]], key: str) -> float:
    """The median over the samples, each of which is that of the slowest rank."""
    return median([max(times) for times in zip(*(line[key] for line in lines), strict=True)])


def _make_row(lines: Sequence[dict[str, Any]]) -> Row:
    first, us = lines[0], _slowest(lines, "device_us")
    rank_us = [median(line["device_us"]) for line in lines]
    link_bytes = sum(line["link_bytes"] for line in lines) / len(lines)
    row_bytes = sum(line["row_bytes"] for line in lines) / len(lines)
    return Row(
        name=f"{first['payload']}, {first['num_sms']} SMs",
        step=first["call"],
        kind=first["kind"],
        work=f"{first['payload']} {first['limit']}".strip(),
        us=us,
        rows=None,
        link_bytes=link_bytes or None,
        gb_per_s=link_bytes / us / 1e3 if link_bytes else None,
        copy_us=None,
        share=None,
        slowest_rank=rank_us.index(max(rank_us)),
        rank_us=rank_us,
        num_sms=first["num_sms"],
        driver=first["driver"],
        issue_us=_slowest(lines, "issue_us"),
        logical_gb_per_s=row_bytes / us / 1e3 if row_bytes else None,
    )


def _with_differences(rows: Sequence[Row]) -> list[Row]:
    """Puts behind each row of the V1 calls how much longer they take than the fused call."""
    fused = {(row.name, row.driver): row.us for row in rows if row.step == DISPATCH.name}
    result = []
    for row in rows:
        result.append(row)
        us = fused.get((row.name, row.driver))
        if row.step == DISPATCH_V1.name and us is not None:
            result.append(_difference(row, row.us - us))
    return result


def _difference(row: Row, us: float) -> Row:
    return Row(
        name=row.name,
        step=DIFFERENCE,
        kind="difference",
        work="",
        us=us,
        rows=None,
        link_bytes=None,
        gb_per_s=None,
        copy_us=None,
        share=None,
        slowest_rank=row.slowest_rank,
        rank_us=[],
        num_sms=row.num_sms,
        driver=row.driver,
    )


def _overlap_entry(entry: dict[str, Any]) -> dict[str, Any]:
    medians = {f"{beside}_us": median(times) for beside, times in entry["us"].items()}
    slower = 100.0 * (medians["dispatch_us"] / medians["hold_us"] - 1.0)
    return {**entry, **medians, "slower_percent": slower}


def _merge_costs(of_ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of one rank are rank 0's; of those of several, each sample is that of the slowest."""
    merged = []
    for entry in of_ranks[0]["host_cost"]:
        same = [
            other["us"]
            for result in of_ranks
            for other in result["host_cost"]
            if {**other, "us": None} == {**entry, "us": None}
        ]
        samples = [max(times) for times in zip(*same, strict=True)]
        merged.append({**entry, "us": median(samples), "samples_us": samples})
    return merged


def summarise_gpu(results: GpuResults) -> dict[str, Any]:
    """Returns, for each payload and number of SMs, what the aims are about, and the other measurements."""
    calls: dict[str, dict[str, float]] = {}
    for row in results.rows:
        if row.driver not in ("C++", "graph") or row.kind == "copy":
            continue
        entry = calls.setdefault(row.name, {})
        prefix = "graph_" if row.driver == "graph" else ""
        key = {DISPATCH.name: "dispatch", COMBINE.name: "combine", PAIR.name: "pair"}.get(row.step)
        if key is not None:
            entry[f"{prefix}{key}_us"] = row.us
            if row.copy_us is not None:
                entry[f"{prefix}{key}_over_copy_us"] = row.us - row.copy_us
        if row.step == DIFFERENCE:
            entry["v1_over_fused_us"] = row.us
    return {
        "calls": calls,
        "overlap": results.overlap,
        "host_cost": results.host_cost,
        "low_latency": results.low_latency,
        "hook_overlap": results.hook_overlap,
        "expert_major": results.expert_major,
    }


def describe_limit(options: BenchOptions) -> str:
    """Says what the column 'copy us' is."""
    where = (
        "to and from the peers' memory, all ranks at once"
        if options.processes > 1
        else "all ranks at once on the GPU that they share: what bounds them is no link but memory and SMs"
    )
    return (
        f"copy us: a plain kernel that copies the same rows with the same SMs in the same run, {where}; the "
        "fastest of several shapes, in graphs for rows of graphs"
    )


def print_gpu_report(
    console: Any, options: BenchOptions, results: GpuResults, checks: Sequence[CheckRow]
) -> None:
    """Prints the checks and the tables."""
    from rich.markup import escape

    print_checks(console, _shown_checks(checks))
    console.print(escape(describe_gpu_run(options)), soft_wrap=True)
    if results.rows:
        console.print(_calls_table(results.rows))
        has_limit = any(row.kind == "copy" for row in results.rows)
        console.print(escape(describe_limit(options) if has_limit else NO_LIMIT), soft_wrap=True)
    for entry in results.overlap:
        console.print(escape(describe_overlap(entry)), soft_wrap=True)
    if results.host_cost:
        console.print(_costs_table(results.host_cost))
    if results.expert_major:
        console.print(expert_major_table(results.expert_major))
    if results.low_latency:
        console.print(low_latency_table(results.low_latency))
    for entry in results.hook_overlap:
        console.print(escape(describe_hook_overlap(entry)), soft_wrap=True)


def _shown_checks(checks: Sequence[CheckRow]) -> list[CheckRow]:
    """All but those of timed calls that have passed, and one line for all of these together."""
    timed = [check for check in checks if check.passed and check.name.endswith(AS_TIMED)]
    shown = [check for check in checks if check not in timed]
    if timed:
        worst = max(check.error for check in timed)
        shown.append(CheckRow(f"timed pairs, {len(timed)} checks", worst, timed[0].tolerance, True))
    return shown


def _calls_table(rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("rows, SMs a rank", "call", "driven by"):
        table.add_column(column, no_wrap=True)
    for column in ("us", "copy us", "over copy", "of copy limit", "link GB/s", "GB/s", "host us"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = ""
    for row in shown_rows(rows):
        if previous not in ("", row.name):
            table.add_section()
        cells = gpu_table_cells(row)
        table.add_row(escape(cells[0]) if row.name != previous else "", *map(escape, cells[1:]))
        previous = row.name
    return table


def gpu_table_cells(row: Row) -> list[str]:
    """Returns the texts of one line of the table."""
    return [
        row.name,
        row.step,
        row.driver,
        f"{row.us:+.1f}" if row.kind == "difference" else format_us(row.us),
        "" if row.copy_us is None else format_us(row.copy_us),
        "" if row.copy_us is None else f"{row.us - row.copy_us:+.1f}",
        "" if row.share is None else f"{row.share:.0%}",
        "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
        "" if row.logical_gb_per_s is None else f"{row.logical_gb_per_s:.1f}",
        "" if row.issue_us is None else format_us(row.issue_us),
    ]


def describe_gpu_run(options: BenchOptions) -> str:
    """Returns one line with the shape of the run."""
    form = "threads of one process on one GPU" if options.processes == 1 else "processes, one a GPU"
    return f"{describe_run(options)}; ranks are {form}"


def describe_overlap(entry: dict[str, Any]) -> str:
    """Returns the sentence of one entry of the overlap."""
    rows, columns, inner = entry["gemm"]
    ranks = (
        "1 rank dispatches"
        if entry["dispatching_ranks"] == 1
        else f"{entry['dispatching_ranks']} ranks dispatch"
    )
    covered = "" if entry["covered"] else "; NOT COVERED: a dispatch ended before the GEMM"
    return (
        f"overlap, {ranks}, {entry['num_sms']} SMs a rank: a GEMM of {rows} x {columns} x {inner} takes "
        f"{entry['dispatch_us']:.1f} us beside the dispatch, {entry['hold_us']:.1f} us beside a kernel that "
        f"only holds those SMs, {entry['alone_us']:.1f} us alone: {entry['slower_percent']:+.1f} % "
        f"(aim: at most {GEMM_AIM_PERCENT:g} %){covered}"
    )


def _costs_table(entries: Sequence[dict[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("small pairs", "driven by"):
        table.add_column(column, no_wrap=True)
    for column in ("ranks", "tokens", "wall us"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry["call"], entry["driver"], str(entry["ranks"]), str(entry["tokens"]), f"{entry['us']:.1f}"
        )
    return table
