"""``deep-moe bench``: from options to a run, from a run to its report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .compare import Comparison, compare, print_comparison
from .gate import load_trace
from .gpu_plan import complete_gpu_options, default_gpu_ranks, gpu_environment
from .gpu_report import assemble_gpu, print_gpu_report, summarise_gpu
from .launch import run_ranks
from .machine import (
    BusyMeter,
    build_info,
    describe_machine,
    describe_versions,
    num_gpus,
    pick_device,
    require_memory,
)
from .models import find_model
from .options import BenchOptions, parse_numbers, resolve
from .plot import require_matplotlib, write_chart
from .report import assemble_checks, assemble_rows, print_report, summarise, to_document, write_json
from .runs import merge_runs, read_runs
from .text import load_tokens

BUSY_SHARE = 0.1
GPU_WORKER = "deep_moe.cli.gpu_worker"


def plan_all(given: dict[str, Any]) -> list[BenchOptions]:
    """The runs that the user's options ask for, one for each number of ``tokens``."""
    counts = parse_numbers(given["tokens"], "tokens") if given.get("tokens") is not None else (None,)
    if len(set(counts)) < len(counts):
        raise ValueError(f"tokens: got {given['tokens']}; give each number once")
    return [plan(given | {"tokens": count}) for count in counts]


def plan(given: dict[str, Any]) -> BenchOptions:
    """Completes the user's options (None = not given) with defaults, a model's shape and a trace's."""
    model = find_model(given["model"]) if given.get("model") else None
    trace_topk = 0
    if given.get("trace"):
        if given.get("text") or given.get("routing") not in (None, "trace"):
            raise ValueError("trace: it is a routing of its own; leave out --text and --routing")
        trace = load_trace(given["trace"])
        trace_topk = trace.shape[1]
        if given.get("experts") is None and model is None:
            given = given | {"experts": max(int(trace.max()) + 1, given.get("ranks") or 1)}
    elif given.get("routing") == "trace":
        raise ValueError("routing: trace needs --trace FILE")
    if given.get("text") and given.get("routing") not in (None, "text"):
        raise ValueError(f"text: it is not used with --routing {given['routing']}; give one of both")
    if given.get("text"):
        load_tokens(given["text"])
    if given.get("num_sms") is not None:
        given = given | {"num_sms": parse_numbers(given["num_sms"], "num-sms")}
    device = pick_device(given.get("device") or "auto")
    if device == "cuda" and given.get("ranks") is None:
        given = given | {"ranks": default_gpu_ranks(num_gpus())}
    options = resolve(given | {"device": device}, model, trace_topk)
    if device == "cuda":
        options = complete_gpu_options(options, num_gpus())
    return options


def require_writable(path: Path | None, name: str) -> None:
    """Raises ValueError before a run whose report could not be written after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"{name}: got {path}; give a file in a folder that exists")


@dataclass
class Measured:
    """What a run gave: the document of its JSON file, and whether all checks passed."""

    options: BenchOptions
    document: dict[str, Any]
    passed: bool


def measure(
    options: BenchOptions,
    console: Any = None,
    label: str = "",
    environment: Mapping[str, str] | None = None,
) -> Measured:
    """Runs the ranks once and prints the report where there is a console.

    ``label`` stands before the phases of the progress bar; ``environment`` is for the rank processes.
    """
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    meter = BusyMeter()
    given = dict(environment or {})
    with ProgressLine(label) as progress:
        if options.device == "cuda":
            parts, logs = run_ranks(
                options.processes,
                options.to_json(),
                options.timeout,
                progress.on_event,
                GPU_WORKER,
                gpu_environment(options) | given,
            )
            results = [rank for part in parts for rank in part["ranks"]]
        else:
            more: dict[str, Any] = {"environment": given} if given else {}
            results, logs = run_ranks(
                options.ranks, options.to_json(), options.timeout, progress.on_event, **more
            )
    busy = meter.others()
    for line in dict.fromkeys(line for log in logs for line in log.splitlines()):
        print(line, file=sys.stderr)
    checks = assemble_checks(results)
    if options.device == "cuda":
        gpu = assemble_gpu(results, options)
        rows, summary = gpu.rows, summarise_gpu(gpu)
        if console is not None:
            print_gpu_report(console, options, gpu, checks)
    else:
        rows = assemble_rows(results)
        summary = summarise(rows)
        if console is not None:
            print_report(console, options, rows, checks)
    if busy > BUSY_SHARE and console is not None:
        console.print(
            f"note: other programs used {busy:.0%} of this machine's processors during the run; "
            "its figures, and memcpy's above all, are those of a busy machine",
            soft_wrap=True,
        )
    about: dict[str, Any] = {
        "date": date,
        "machine": describe_machine(options.device) | {"busy_with_others": round(busy, 3)},
        "versions": describe_versions(),
        "build": build_info(),
    }
    document = to_document(options, rows, checks, about, summary)
    return Measured(options, document, all(check.passed for check in checks))


def make_console() -> Any:
    """Standard output: as wide as the terminal, or 140 columns in a file."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)


def run_bench(
    runs: Sequence[BenchOptions],
    json_path: Path | None,
    plot_path: Path | None,
    against: Path | None = None,
) -> tuple[bool, Comparison | None]:
    """Makes each run, prints and writes the reports.

    Returns whether all checks passed, and the comparison with the earlier runs of the file ``against``.
    """
    require_writable(json_path, "json")
    require_writable(plot_path, "plot")
    if plot_path is not None:
        require_matplotlib()
    old = read_runs(against) if against is not None else []
    for options in runs:
        require_memory(options)
    console = make_console()
    measured: list[Measured] = []
    for index, options in enumerate(runs):
        label = f"{options.tokens} tokens ({index + 1} of {len(runs)}): " if len(runs) > 1 else ""
        measured.append(measure(options, console, label))
        if json_path is not None:  # after each, as a later one may fail
            write_json(json_path, merge_runs([run.document for run in measured]))
    documents = [run.document for run in measured]
    if json_path is not None:
        console.print(f"written: {json_path}", soft_wrap=True)
    if plot_path is not None:
        write_chart(plot_path, documents)
        console.print(f"written: {plot_path}", soft_wrap=True)
    comparison = None
    if against is not None:
        comparison = compare(old, documents)
        print_comparison(console, comparison, str(against), "this run")
    return all(run.passed for run in measured), comparison


class ProgressLine:
    """A progress bar on standard error that follows rank 0; nothing where standard error is no terminal."""

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressLine:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task(f"{self._label}start the ranks", total=None)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_event(self, rank: int, event: dict[str, Any]) -> None:
        """Takes an event of a rank process."""
        if self._progress is None or rank != 0:
            return
        if "phase" in event:
            # Shown at once: a short phase may be over before the next refresh.
            self._progress.update(self._task, description=f"{self._label}{event['phase']}", refresh=True)
        elif "done" in event:
            self._progress.update(self._task, completed=event["done"], total=event["total"])
