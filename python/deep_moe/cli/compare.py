"""Compares two files of the bench row by row: ``bench --against OLD`` and ``deep-moe compare OLD NEW``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .options import GPU_PARTS
from .report import format_us
from .runs import Document, Measure, measures

# Rows of one name are the same where these are; other parameters may differ, which is said.
WORK = (
    *("device", "ranks", "hidden", "experts", "topk", "groups", "topk_groups", "gate", "dtype"),
    *("routing", "text", "trace"),
)
# Parameters that say which rows there are.
OF_ROWS = ("tokens", "ll_tokens", "num_sms", "fp8", "mode", "compare", *GPU_PARTS)
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class Change:
    """A row of both files; ``percent`` is above 0 where it has become slower."""

    new: Measure
    old_us: float

    @property
    def percent(self) -> float:
        """The change of the time."""
        return 100.0 * (self.new.us / self.old_us - 1.0)


@dataclass(frozen=True)
class Comparison:
    """Rows of both files, lines of text on how the runs differ, and how many rows only one file has."""

    changes: list[Change]
    differences: list[str]
    only_old: int
    only_new: int

    def slower(self, percent: float) -> list[Change]:
        """The rows that have become slower by more than ``percent``; deep_moe's own alone."""
        return [change for change in self.changes if change.new.is_ours and change.percent > percent]


def _work(document: Document) -> tuple[Any, ...]:
    given = document["parameters"]
    # On GPUs it matters whether ranks share one; on the CPU each is a process, which old files do not say.
    processes = given.get("processes") if given["device"] == "cuda" else None
    return (*(given.get(name) for name in WORK), processes)


def _by_key(documents: Sequence[Document]) -> dict[tuple[Any, ...], Measure]:
    return {
        (_work(document), one.name, one.step, one.driver, one.kind, one.tokens): one
        for document in documents
        for one in measures(document)
    }


def compare(old: Sequence[Document], new: Sequence[Document]) -> Comparison:
    """Compares the rows of the runs of two files, in the order of the new one."""
    before, now = _by_key(old), _by_key(new)
    changes = [Change(one, before[key].us) for key, one in now.items() if key in before]
    only_old, only_new = (
        sum(one.is_ours for key, one in mine.items() if key not in others)
        for mine, others in ((before, now), (now, before))
    )
    return Comparison(changes, _differences(old[0], new[0]), only_old, only_new)


def _differences(old: Document, new: Document) -> list[str]:
    lines = []
    for part in ("parameters", "machine", "versions", "build"):
        before, now = old.get(part) or {}, new.get(part) or {}
        names = [name for name in before if name in now and name != "busy_with_others"]
        if part == "parameters":
            names = [name for name in names if name not in OF_ROWS]
        for name in names:
            if before[name] != now[name]:
                lines.append(f"{part}: {name}: {_text(before[name])} -> {_text(now[name])}")
    for which, document in (("old", old), ("new", new)):
        busy = (document.get("machine") or {}).get("busy_with_others") or 0.0
        if busy > BUSY_SHARE:
            lines.append(f"machine: other programs used {busy:.0%} of the processors in the {which} run")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list):
        counts = dict.fromkeys(map(str, value))
        return ", ".join(f"{value.count(one)} x {one}" if value.count(one) > 1 else one for one in counts)
    return str(value) if value != "" else "(none)"


def summary_of(comparison: Comparison) -> str:
    """One line: how many rows, and their change on average."""
    ours = [change for change in comparison.changes if change.new.is_ours]
    if not ours:
        return "no row is in both files"
    mean = math.exp(sum(math.log1p(change.percent / 100) for change in ours) / len(ours))
    least, most = (pick(change.percent for change in ours) for pick in (min, max))
    text = (
        f"{len(ours)} row{'s' if len(ours) > 1 else ''}: {100 * (mean - 1):+.1f} % on average "
        f"({least:+.1f} to {most:+.1f} %; below 0 is faster)"
    )
    alone = [
        f"{count} only in the {which} one"
        for count, which in ((comparison.only_old, "old"), (comparison.only_new, "new"))
        if count
    ]
    return f"{text}; {', '.join(alone)}" if alone else text


def print_comparison(console: Any, comparison: Comparison, old_name: str, new_name: str) -> None:
    """Prints what differs, the table and the line below it."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    for line in comparison.differences:
        console.print(escape(f"differs: {line}"), soft_wrap=True)
    if comparison.changes:
        title = escape(f"{old_name} -> {new_name}")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("what", "step", "driven by"):
            table.add_column(column, no_wrap=True)
        for column in ("tokens", "old us", "new us", "change"):
            table.add_column(column, justify="right", no_wrap=True)
        previous = ""
        for change in comparison.changes:
            one = change.new
            if previous not in ("", one.name):
                table.add_section()
            table.add_row(
                escape(one.name) if one.name != previous else "",
                escape(one.step),
                one.driver,
                str(one.tokens),
                format_us(change.old_us),
                format_us(one.us),
                f"{change.percent:+.1f} %",
            )
            previous = one.name
        console.print(table)
    console.print(escape(summary_of(comparison)), soft_wrap=True)


def verdict(comparison: Comparison, fail_if_slower: float | None) -> str:
    """What makes the comparison fail, or nothing. A gate without any row to look at is no gate, and fails."""
    if fail_if_slower is None:
        return ""
    if not any(change.new.is_ours for change in comparison.changes):
        return "no row is in both files, so that none can be compared"
    slower = comparison.slower(fail_if_slower)
    if not slower:
        return ""
    worst = max(slower, key=lambda change: change.percent)
    where = " ".join(filter(None, (f"{worst.new.name}: {worst.new.step}", worst.new.driver)))
    rows = "1 row is" if len(slower) == 1 else f"{len(slower)} rows are"
    return f"{rows} slower by more than {fail_if_slower:g} %, most of all {where} ({worst.percent:+.1f} %)"
