"""JSON files of the bench: one run, or the several runs of a sweep; and the times that they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .gpu_expert_major_report import PERMUTES
from .options import BenchOptions
from .report import SCHEMA

Document = dict[str, Any]
OURS = ("deep_moe", "low latency", "small pair", "rows by expert")


def merge_runs(documents: Sequence[Document]) -> Document:
    """What a file holds: the document of a single run as it is, those of several under ``runs``."""
    return documents[0] if len(documents) == 1 else {"schema": SCHEMA, "runs": list(documents)}


def read_runs(path: Path) -> list[Document]:
    """The documents of a file; ValueError for one that is not of the bench."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON file; give one of deep-moe bench --json") from None
    runs = whole.get("runs", [whole]) if isinstance(whole, dict) else []
    needed = {"parameters", "rows", "summary"}
    if not runs or not all(isinstance(run, dict) and needed <= set(run) for run in runs):
        raise ValueError(f"{path} holds no run; give a file of deep-moe bench --json")
    newest = max(int(run.get("schema", SCHEMA)) for run in runs)
    if newest > SCHEMA:
        raise ValueError(f"{path} is of schema {newest}; this version of deep_moe knows up to {SCHEMA}")
    return runs


def options_of(document: Document) -> BenchOptions:
    """The options of a run; what a file of an earlier version does not have is as by default."""
    given, known = document["parameters"], {one.name for one in fields(BenchOptions)}
    num_sms = given.get("num_sms") or ()
    chosen = {name: value for name, value in given.items() if name in known}
    return BenchOptions(**chosen | {"num_sms": tuple([num_sms] if isinstance(num_sms, int) else num_sms)})


@dataclass(frozen=True)
class Measure:
    """One time of a run. ``kind`` is that of the row; ``share`` is of the plain copy's speed, if known."""

    name: str
    step: str
    driver: str
    kind: str
    tokens: int
    us: float
    share: float | None = None
    num_sms: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is deep_moe's time. Plain copies, torch's gate and experts, gloo and NCCL are not."""
        return self.kind in OURS


def measures(document: Document) -> list[Measure]:
    """All times of a run: rows (of plain copies alike the fastest), low-latency pairs, small pairs."""
    parameters, summary = document["parameters"], document["summary"]
    found: list[Measure] = []
    for row in document["rows"]:
        if row["kind"] != "difference":
            is_ll = row["name"].startswith("LL") or "(LL" in row["name"]
            tokens = parameters["ll_tokens" if is_ll else "tokens"]
            found.append(
                Measure(
                    row["name"],
                    row["step"],
                    row.get("driver", ""),
                    row["kind"],
                    tokens,
                    row["us"],
                    row["share"],
                    row.get("num_sms"),
                )
            )
    for entry in summary.get("low_latency") or []:
        us = entry["device_us" if entry["driver"] == "graph" else "wall_us"]
        name = f"LL {entry['payload']}"
        found.append(Measure(name, entry["call"], entry["driver"], "low latency", entry["tokens"], us))
    for entry in summary.get("host_cost") or []:
        name = f"small pairs, {entry['ranks']} rank{'s' if entry['ranks'] > 1 else ''}"
        found.append(
            Measure(name, entry["call"], entry["driver"], "small pair", entry["tokens"], entry["us"])
        )
    for entry in summary.get("expert_major") or []:
        call, tokens = entry["call"], parameters["tokens"]
        kind = "torch" if call in PERMUTES else "rows by expert"
        found.append(Measure("rows by expert", call, "Python", kind, tokens, entry["us"]))
    return _fastest(found)


def _fastest(found: Iterable[Measure]) -> list[Measure]:
    """One measure for each of those that differ in their times alone: the fastest. None without a time."""
    kept: dict[tuple[Any, ...], Measure] = {}
    for one in found:
        key = (one.name, one.step, one.driver, one.kind, one.tokens)
        if not one.us:
            continue
        if key not in kept or one.us < kept[key].us:
            kept[key] = one
    return list(kept.values())
