"""``deep-moe tune``: the rule, the choice from recorded runs, and a run on CPU ranks from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_moe.cli.runs import read_runs
from deep_moe.cli.tune import built_in_threads, gain, thread_counts, tune_from_cpu, tune_from_gpus
from deep_moe.tuning import choose, cpu_model, read

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
TWO_GPUS = RESULTS / "bench_2xh200_2026-11-30.json"
ONE_GPU = RESULTS / "bench_1xh200_2026-11-30.json"
ON_CPU = RESULTS / "cpu_2core_epyc_2026-11-30.json"
SMALL = (
    *("--ranks", "2", "--tokens", "32", "--hidden", "256", "--experts", "8", "--topk", "2"),
    *("--device", "cpu", "--iters", "3"),
)


def tune(
    *arguments: str, program: tuple[str, ...] = ("-m", "deep_moe"), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, "tune", *arguments]
    return subprocess.run(
        *(command,), cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | variables
    )


# ---- the rule ----
@given(st.dictionaries(st.integers(1, 200), st.floats(1.0, 1e6), min_size=1))
def test_the_fewest_within_two_percent(times: dict[int, float]) -> None:
    chosen, best = choose(times), min(times.values())
    assert times[chosen] <= 1.02 * best
    assert all(times[number] > 1.02 * best for number in times if number < chosen)


def test_no_times_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        choose({})


# ---- recorded runs ----
def test_choice_on_two_gpus() -> None:
    """bf16 dispatch takes 294, 202, 176, 181 us with 8, 12, 16, 24 SMs and combine 189, 185, 185, 185."""
    tuned = tune_from_gpus(read_runs(TWO_GPUS))
    chosen = {(choice.payload, choice.call): choice.chosen for choice in tuned.choices}
    assert chosen == {("bf16", "dispatch"): 16, ("bf16", "combine"): 12, ("fp8", "dispatch"): 16}
    bf16, fp8 = tuned.entries
    assert bf16.key == ("NVIDIA H200", 2, 7168, "bf16", 1) and fp8.dtype == "fp8"
    assert (bf16.dispatch_sms, bf16.combine_sms, fp8.dispatch_sms, fp8.combine_sms) == (16, 12, 16, 12)
    assert bf16.about["tokens"] == 4096 and bf16.about["dispatch_us"] == pytest.approx(176.3)


def test_ranks_that_share_a_gpu_say_so() -> None:
    tuned = tune_from_gpus(read_runs(ONE_GPU))
    assert {entry.ranks_per_gpu for entry in tuned.entries} == {2}
    assert {choice.chosen for choice in tuned.choices} == {24}  # memory bounds them, and every SM helps


def test_gain_is_against_the_built_in_number() -> None:
    (run,) = read_runs(TWO_GPUS)
    assert {gain(choice) for choice in tune_from_gpus([run]).choices} == {"not measured"}  # 20 SMs
    for row in run["rows"]:
        if row["num_sms"] == 24:
            row["name"], row["num_sms"] = row["name"].replace("24 SMs", "20 SMs"), 20
    dispatch = tune_from_gpus([run]).choices[0]
    rows = {(row["name"], row["step"], row["driver"]): row["us"] for row in run["rows"]}
    us, built_in = (rows[f"bf16, {sms} SMs", "dispatch", "C++"] for sms in (16, 20))
    assert gain(dispatch) == f"{100 * (1 - us / built_in):+.1f} %" == "+2.7 %"


def test_choice_of_threads() -> None:
    (run,) = read_runs(ON_CPU)
    pair = next(row for row in run["rows"] if (row["name"], row["step"]) == ("HT bf16, heap", "pair"))
    runs = {}
    for threads, us in ((1, 500.0), (2, 306.0), (4, 300.0), (8, 310.0)):
        pair["us"] = us
        runs[threads] = json.loads(json.dumps(run))
    tuned = tune_from_cpu(runs, built_in=8)
    (entry,), (choice,) = tuned.entries, tuned.choices
    assert (entry.cpu_threads, entry.ranks_per_gpu, entry.dispatch_sms) == (2, 0, None)
    assert (choice.us, choice.built_in_us) == (306.0, 310.0)


def test_numbers_of_threads_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in number is the library's: cores by ranks, 1 to 16."""
    for cores, ranks, built_in, counts in ((2, 4, 1, (1,)), (64, 4, 16, (1, 2, 4, 8, 16)), (24, 4, 6, None)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert built_in_threads(ranks) == built_in and built_in in thread_counts(ranks)
        assert counts in (None, thread_counts(ranks))


# ---- the command ----
def test_from_a_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "tuning.json"
    done = tune("--from", str(TWO_GPUS), DEEP_MOE_TUNING_FILE=str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" in done.stdout and f"written: {path}" in done.stdout
    assert [entry.dispatch_sms for entry in read(path)] == [16, 16]
    shared = tune("--from", str(ONE_GPU), DEEP_MOE_TUNING_FILE=str(path))  # beside what is there
    assert shared.returncode == 0
    assert (
        sorted((entry.ranks_per_gpu, entry.dispatch_sms) for entry in read(path))
        == [(1, 16)] * 2 + [(2, 24)] * 2
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from", str(ON_CPU), "--output", "a.json"), "the CPU has no numbers of SMs"),
        (("--from", str(TWO_GPUS)), "DEEP_MOE_TUNING_FILE is empty"),
        (("--from", str(TWO_GPUS), "--output", "/no/such/folder/a"), "output: got /no/such/folder/a"),
        ((*SMALL, "--numbers", "0,1", "--no-write"), "numbers: got 0,1; allowed: 1 to 1024 threads"),
        ((*SMALL, "--numbers", "x", "--no-write"), "numbers: got x"),
    ],
)
def test_wrong_arguments_leave_with_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = tune(*arguments, DEEP_MOE_TUNING_FILE="")
    assert done.returncode == 2 and says in done.stderr, done.stdout + done.stderr


def test_on_cpu_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    done = tune(*SMALL, "--numbers", "1,2", "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = read(path)
    assert (entry.hardware, entry.ranks, entry.hidden, entry.dtype) == (cpu_model(), 2, 256, "bf16")
    assert entry.cpu_threads in {1, 2, built_in_threads(2)}
    assert f"export DEEP_MOE_CPU_THREADS={entry.cpu_threads}" in done.stdout
    assert "time saved" in done.stdout and done.stderr == ""
    again = tune(*SMALL, "--numbers", "1", "--no-write", DEEP_MOE_TUNING_FILE=str(path))
    assert again.returncode == 0 and "written" not in again.stdout


THREADS = """
import os, sys
import deep_moe.cli.bench as bench
from deep_moe.cli import main
run_ranks = bench.run_ranks
def watched(*args, **more):
    print("ran with", more["environment"], flush=True)
    return run_ranks(*args, **more)
bench.run_ranks = watched
sys.exit(main(sys.argv[1:]))
"""


def test_each_number_of_threads_is_run_with() -> None:
    done = tune(*SMALL, "--numbers", "3,2", "--no-write", program=("-c", THREADS))
    assert done.returncode == 0, done.stdout + done.stderr
    tried = sorted({2, 3, built_in_threads(2)})
    expected = [f"ran with {{'DEEP_MOE_CPU_THREADS': '{threads}'}}" for threads in tried]
    assert [line for line in done.stdout.splitlines() if line.startswith("ran")] == expected


BROKEN = """
import sys
import deep_moe.cli.launch as launch, deep_moe.cli.bench as bench
from deep_moe.cli import main
def with_broken_rank(*args, environment):
    return launch.run_ranks(*args, module="tests.cpu.cli_broken_worker", environment=environment)
bench.run_ranks = with_broken_rank
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["wrong", "raise"])
def test_wrong_results_tune_nothing(tmp_path: Path, how: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(before := '{"schema": 1, "entries": []}')
    arguments = (*SMALL, "--numbers", "1", "--output", str(path))
    done = tune(*arguments, program=("-c", BROKEN), DEEP_MOE_TEST_BREAK=how)
    assert done.returncode == 1, done.stdout + done.stderr
    assert path.read_text() == before and "written" not in done.stdout


def test_fields_of_an_entry_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert tune("--from", str(TWO_GPUS), "--output", str(path)).returncode == 0
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["schema"] == 1 and len(document["entries"]) == 2
    assert {"hardware", "ranks", "hidden", "dtype", "dispatch_sms", "combine_sms", "about"} <= set(
        document["entries"][0]
    )
