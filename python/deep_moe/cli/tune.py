"""``deep-moe tune``: measures how many SMs (CPU: threads) are enough, and writes the tuning file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import NUM_SMS
from ..tuning import CALLS, SLACK, Entry, choose, store, tuning_file
from .bench import make_console, measure, plan, require_writable
from .machine import require_memory
from .options import BenchOptions, parse_numbers
from .report import format_us
from .runs import Document, measures, options_of, read_runs

SMS = (8, 12, 16, 20, 24, 32)
THREADS = "DEEP_MOE_CPU_THREADS"
MOST_THREADS = 16
DEFAULT_ITERS = 20


@dataclass(frozen=True)
class Choice:
    """What was chosen for a call; ``unit`` is SMs or threads, ``built_in_us`` None if not tried."""

    call: str
    payload: str
    unit: str
    chosen: int
    us: float
    built_in: int
    built_in_us: float | None


@dataclass(frozen=True)
class Tuned:
    """Entries for the tuning file and the choices that they are made of."""

    entries: list[Entry]
    choices: list[Choice]


def pick(times: Mapping[int, float], call: str, payload: str, unit: str, built_in: int) -> Choice:
    """Applies the rule of :func:`deep_moe.tuning.choose`."""
    chosen = choose(times)
    return Choice(call, payload, unit, chosen, times[chosen], built_in, times.get(built_in))


def tune_from_gpus(documents: Sequence[Document]) -> Tuned:
    """Chooses from runs of the bench on GPUs, by the calls that C++ drives.

    Rows that are dispatched in fp8 come back in the run's own type, as in the run.
    """
    entries: list[Entry] = []
    choices: list[Choice] = []
    for document in documents:
        options = options_of(document)
        if options.device != "cuda":
            raise ValueError("from: a run on the CPU has no numbers of SMs; give a file of a run on GPUs")
        times: dict[tuple[str, str], dict[int, float]] = {}
        for one in measures(document):
            if one.kind == "deep_moe" and one.driver == "C++" and one.num_sms is not None:
                times.setdefault((one.name.split(",")[0], one.step), {})[one.num_sms] = one.us
        found = {
            (payload, call): pick(of_call, call, payload, "SMs", NUM_SMS)
            for (payload, call), of_call in times.items()
            if call in CALLS
        }
        if not found:
            raise ValueError("from: the run has no times of dispatch and combine; give one with --mode ht")
        choices += found.values()
        payloads = [payload for payload, call in found if call == "dispatch"]
        entries += [
            _gpu_entry(document, options, found[payload, "dispatch"], found.get((options.dtype, "combine")))
            for payload in payloads
        ]
    return Tuned(entries, choices)


def _gpu_entry(document: Document, options: BenchOptions, dispatch: Choice, combine: Choice | None) -> Entry:
    gpus = document["machine"]["gpus"]
    if len(set(gpus)) != 1:
        raise ValueError(f"from: the run used different GPUs ({', '.join(sorted(set(gpus)))})")
    return Entry(
        hardware=gpus[0],
        ranks=options.ranks,
        hidden=options.hidden,
        dtype=dispatch.payload,
        ranks_per_gpu=1 if options.processes == options.ranks else options.ranks,
        dispatch_sms=dispatch.chosen,
        combine_sms=None if combine is None else combine.chosen,
        about=_about(document, [dispatch, *([combine] if combine else [])]),
    )


def _about(document: Document, choices: Sequence[Choice]) -> dict[str, Any]:
    parameters = document["parameters"]
    shape = {name: parameters[name] for name in ("tokens", "experts", "topk", "routing")}
    times = {f"{choice.call}_us": round(choice.us, 1) for choice in choices}
    return {"date": document["date"], "deep_moe": document["versions"]["deep_moe"], **shape, **times}


def tune_from_cpu(documents: Mapping[int, Document], built_in: int) -> Tuned:
    """Chooses from a run for each number of threads, by the pair whose combine reads the heap."""
    times = {}
    for threads, document in documents.items():
        name = f"HT {document['parameters']['dtype']}, heap"
        (pair,) = [one for one in measures(document) if (one.name, one.step) == (name, "pair")]
        times[threads] = pair.us
    document = documents[choose(times)]
    options = options_of(document)
    choice = pick(times, "pair", options.dtype, "threads", built_in)
    entry = Entry(
        hardware=document["machine"]["cpu"],
        ranks=options.ranks,
        hidden=options.hidden,
        dtype=options.dtype,
        ranks_per_gpu=0,
        cpu_threads=choice.chosen,
        about=_about(document, [choice]),
    )
    return Tuned([entry], [choice])


def built_in_threads(ranks: int) -> int:
    """Threads a rank that the library takes without ``DEEP_MOE_CPU_THREADS``."""
    return min(MOST_THREADS, max(1, (os.cpu_count() or 1) // ranks))


def thread_counts(ranks: int) -> tuple[int, ...]:
    """The numbers to try: powers of two as far as the cores go, and the built-in one."""
    cores = os.cpu_count() or 1
    powers = [1 << i for i in range(5) if 1 << i <= max(1, 2 * cores // ranks)]
    return tuple(sorted({*powers, built_in_threads(ranks)}))


def measure_tuned(given: dict[str, Any]) -> tuple[Tuned, bool]:
    """Measures on this machine; False where a check has failed."""
    numbers = given.pop("numbers")
    asked = parse_numbers(numbers, "numbers") if numbers else ()
    options = plan(given | {"mode": "ht", "num_sms": None, "iters": given.get("iters") or DEFAULT_ITERS})
    require_memory(options)
    if options.device == "cuda":
        options = replace(options, num_sms=tuple(sorted({*(asked or SMS), NUM_SMS})))
        run = measure(options, label="tune: ")
        return tune_from_gpus([run.document]), run.passed
    built_in = built_in_threads(options.ranks)
    counts = sorted({*(asked or thread_counts(options.ranks)), built_in})
    if not 1 <= counts[0] <= counts[-1] <= 1024:
        raise ValueError(f"numbers: got {numbers}; allowed: 1 to 1024 threads")
    documents, passed = {}, True
    for index, threads in enumerate(counts):
        label = f"{threads} thread{'s' if threads > 1 else ''} a rank ({index + 1} of {len(counts)}): "
        run = measure(options, label=label, environment={THREADS: str(threads)})
        documents[threads], passed = run.document, passed and run.passed
    return tune_from_cpu(documents, built_in), passed


def run_tune(given: dict[str, Any], source: Path | None, output: Path | None, write: bool) -> bool:
    """Measures (or takes the runs of ``source``), shows the choice and writes it; False if a check failed."""
    path = output or tuning_file()
    if write and path is None:
        raise ValueError("output: DEEP_MOE_TUNING_FILE is empty, or there is no home; give --output FILE")
    if output is not None:
        require_writable(output, "output")
    if source is not None:
        documents = read_runs(source)
        tuned = tune_from_gpus(documents)
        passed = all(check["passed"] for document in documents for check in document["checks"])
    else:
        tuned, passed = measure_tuned(given)
    console = make_console()
    print_tuned(console, tuned)
    if write and path is not None and passed:
        store(path, tuned.entries)
        console.print(f"written: {path}", soft_wrap=True)
    return passed


def _count(number: int, unit: str) -> str:
    return f"{number} {unit if number > 1 else unit.removesuffix('s')}"


def gain(choice: Choice) -> str:
    """How much less time the chosen number takes than the built-in one."""
    if choice.built_in_us is None:
        return "not measured"
    return f"{100 * (1 - choice.us / choice.built_in_us):+.1f} %"


def print_tuned(console: Any, tuned: Tuned) -> None:
    """Prints the table of gain."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    first = tuned.entries[0]
    shared = f" ({first.ranks_per_gpu} ranks share a GPU)" if first.ranks_per_gpu > 1 else ""
    console.print(
        escape(f"{first.ranks} ranks, {first.hardware}{shared}, hidden {first.hidden}"), soft_wrap=True
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("call", "rows"):
        table.add_column(column, no_wrap=True)
    for column in ("chosen", "us", "built in", "us", "time saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for choice in tuned.choices:
        table.add_row(
            choice.call,
            choice.payload,
            _count(choice.chosen, choice.unit),
            format_us(choice.us),
            _count(choice.built_in, choice.unit),
            "" if choice.built_in_us is None else format_us(choice.built_in_us),
            gain(choice),
        )
    console.print(table)
    console.print(f"chosen: the fewest whose time is within {SLACK:.0%} of the best", soft_wrap=True)
    for threads in {entry.cpu_threads for entry in tuned.entries} - {None}:
        console.print(f"on the CPU threads are set in the environment: export {THREADS}={threads}")
