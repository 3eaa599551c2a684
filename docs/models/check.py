"""Checks the models of the protocol between nodes with spin: ``python docs/models/check.py``.

Each model must hold as it stands, and must fail with each of its mistakes (an ``#ifdef`` in the model)
turned on. Needs spin and gcc. Prints one line a run; the exit status is 0 if all runs ended as they must.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
MISTAKES: dict[str, tuple[str, ...]] = {
    "dispatch": (
        "NO_CREDIT",  # a slot is filled again before the forwarder has read it
        "EARLY_CREDIT",  # the credit is sent before the slot has been read
        "NO_FENCE",  # put, then a signal, and nothing that orders them
        "EPOCH_TAG",  # the arrival word says the call, not the chunk
        "ARRIVAL_COUNTER",  # one arrival counter a ring instead of a word a slot
        "CREDIT_COUNTER",  # one credit word a ring instead of a word a slot
        "NO_PLACE",  # rows are stored before the receiver has published its block
        "NO_COUNTS",  # final indices are taken before the counts are there
        "NO_RELEASE",  # "rows done" is posted before the rows are performed
        "NO_DONE",  # the receiver ends its call without waiting for "rows done"
    ),
    "combine": (
        "NO_CREDIT",  # a slot is filled again before the owner has read it
        "BLOCKING",  # a collector waits for the credit of one ring and serves no other
    ),
    "low_latency": (
        "NO_CONSUMED",  # a slot is overwritten without the peer's consumed word
        "NO_FENCE",  # put, then a signal, and nothing that orders them
        "UNTAGGED",  # the arrival word does not say which call it belongs to
    ),
    "low_latency_refusal": (
        "NO_ANSWER",  # who leaves a call answers nobody
        "EARLY_ANSWER",  # it answers a message that has not come
        "NO_CONSUMED",  # a slot is overwritten without the peer's consumed word
    ),
    "refusal": (
        "NO_GATE",  # rows are sent before all ranks are known to take part
        "NO_LIMIT",  # a rank that refuses runs as far ahead as it likes
        "LONG_LIMIT",  # it runs as far ahead as slots have been left, whether records have arrived or not
    ),
    "reset": (
        "NO_QUIET",  # the reset does not wait for puts of the failed generation
        "NO_GENERATION",  # tags do not say the generation
    ),
}


@dataclass(frozen=True)
class Result:
    """What spin said of one model."""

    model: str
    mistake: str | None
    states: int
    violation: str | None  # its kind; None if the model holds

    @property
    def as_expected(self) -> bool:
        return (self.violation is not None) == (self.mistake is not None)

    def __str__(self) -> str:
        name = self.model + (f" with {self.mistake}" if self.mistake else "")
        found = self.violation or "holds"
        return f"{'ok    ' if self.as_expected else 'WRONG '} {name:<32} {self.states:>9} states  {found}"


def check(model: str, mistake: str | None = None) -> Result:
    """Search all states of one model, up to the first violation."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise RuntimeError(
                    f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
                )
            return done.stdout

        run("spin", *([f"-D{mistake}"] if mistake else []), "-a", str(MODELS / f"{model}.pml"))
        run("gcc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c")
        output = run("./pan", "-m100000")
    states = re.search(r"(\d+) states, stored", output)
    errors = re.search(r"errors: (\d+)", output)
    cut_short = "Search not completed" in output and not (errors and int(errors[1]))
    if states is None or errors is None or cut_short or "max search depth too small" in output:
        raise RuntimeError(f"{model}: the search was not completed\n{output}")
    violation = re.search(r"pan:\d+: (assertion violated|invalid end state)(.*)", output)
    kind = None
    if int(errors[1]):
        kind = "deadlock" if violation and violation[1] == "invalid end state" else "assertion"
        kind += re.sub(r"\s*\(at depth \d+\)", "", violation[2]).rstrip() if violation else ""
    return Result(model, mistake, int(states[1]), kind)


def runs() -> list[tuple[str, str | None]]:
    """Every model as it stands, then with each mistake."""
    return [(model, mistake) for model, mistakes in MISTAKES.items() for mistake in (None, *mistakes)]


def main() -> int:
    results = []
    for model, mistake in runs():
        results.append(check(model, mistake))
        print(results[-1], flush=True)
    return 0 if all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
