"""``deep-moe bench``: from options to a run, from a run to its report."""

from __future__ import annotations

import importlib.util
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
from .options import BenchOptions, parse_num_sms, resolve
from .report import (
    assemble_checks,
    assemble_rows,
    print_report,
    summarise,
    to_document,
    write_json,
    write_plot,
)
from .text import load_tokens

BUSY_SHARE = 0.1
GPU_WORKER = "deep_moe.cli.gpu_worker"


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
        given = given | {"num_sms": parse_num_sms(given["num_sms"])}
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


def require_matplotlib() -> None:
    """Raises ValueError that says what to install if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: it needs matplotlib; run: pip install matplotlib")


def run_bench(options: BenchOptions, json_path: Path | None, plot_path: Path | None) -> bool:
    """Runs the bench, prints and writes its report, and returns whether all checks passed."""
    from rich.console import Console

    require_writable(json_path, "json")
    require_writable(plot_path, "plot")
    if plot_path is not None:
        require_matplotlib()
    require_memory(options)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    meter = BusyMeter()
    with ProgressLine() as progress:
        if options.device == "cuda":
            parts, logs = run_ranks(
                options.processes,
                options.to_json(),
                options.timeout,
                progress.on_event,
                GPU_WORKER,
                gpu_environment(options),
            )
            results = [rank for part in parts for rank in part["ranks"]]
        else:
            results, logs = run_ranks(options.ranks, options.to_json(), options.timeout, progress.on_event)
    busy = meter.others()
    for line in dict.fromkeys(line for log in logs for line in log.splitlines()):
        print(line, file=sys.stderr)
    checks = assemble_checks(results)
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)
    if options.device == "cuda":
        gpu = assemble_gpu(results, options)
        rows, summary = gpu.rows, summarise_gpu(gpu)
        print_gpu_report(console, options, gpu, checks)
    else:
        rows = assemble_rows(results)
        summary = summarise(rows)
        print_report(console, options, rows, checks)
    if busy > BUSY_SHARE:
        console.print(
            f"note: other programs used {busy:.0%} of this machine's processors during the run; "
            "its figures, and memcpy's above all, are those of a busy machine",
            soft_wrap=True,
        )
    if json_path is not None:
        about: dict[str, Any] = {
            "date": date,
            "machine": describe_machine(options.device) | {"busy_with_others": round(busy, 3)},
            "versions": describe_versions(),
            "build": build_info(),
        }
        write_json(json_path, to_document(options, rows, checks, about, summary))
        console.print(f"written: {json_path}", soft_wrap=True)
    if plot_path is not None:
        write_plot(plot_path, options, rows)
        console.print(f"written: {plot_path}", soft_wrap=True)
    return all(check.passed for check in checks)


class ProgressLine:
    """A progress bar on standard error that follows rank 0; nothing where standard error is no terminal."""

    def __init__(self) -> None:
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
            self._task = self._progress.add_task("start the ranks", total=None)
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
            self._progress.update(self._task, description=str(event["phase"]), refresh=True)
        elif "done" in event:
            self._progress.update(self._task, completed=event["done"], total=event["total"])
