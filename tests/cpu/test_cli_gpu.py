"""``deep-moe bench`` on GPUs, as far as it needs none: options, what is refused, reports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import deep_moe
from deep_moe import _C
from deep_moe.cli import bench as bench_command
from deep_moe.cli.gpu_plan import (
    COMBINE,
    DISPATCH,
    DISPATCH_V1,
    PAIR,
    calls_of,
    complete_gpu_options,
    default_gpu_ranks,
    gpu_environment,
    payloads,
)
from deep_moe.cli.gpu_report import (
    DIFFERENCE,
    assemble_gpu,
    describe_overlap,
    print_gpu_report,
    summarise_gpu,
)
from deep_moe.cli.launch import run_ranks
from deep_moe.cli.options import BenchOptions, parse_numbers, resolve
from deep_moe.cli.plot import write_bars
from deep_moe.cli.report import assemble_checks, to_document, write_json

OPTIONS = complete_gpu_options(resolve({"device": "cuda", "ranks": 2, "num_sms": (8, 16), "fp8": True}), 1)


def test_gpus_have_their_own_defaults() -> None:
    options = resolve({"device": "cuda", "ranks": 2})
    assert (options.tokens, options.hidden, options.experts, options.topk) == (4096, 7168, 256, 8)
    assert options.mode == "ht"
    assert resolve({"device": "cuda", "tokens": 16}).tokens == 16
    assert [default_gpu_ranks(gpus) for gpus in (1, 2, 8)] == [2, 2, 8]


def test_ranks_are_threads_on_one_gpu_and_processes_on_several() -> None:
    options = resolve({"device": "cuda", "ranks": 2})
    one, two = complete_gpu_options(options, 1), complete_gpu_options(options, 2)
    assert (one.processes, two.processes) == (1, 2)
    assert one.num_sms == (deep_moe.Buffer.num_sms,)
    assert BenchOptions.from_json(OPTIONS.to_json()) == OPTIONS


@pytest.mark.parametrize(
    ("given", "gpus", "text"),
    [
        ({"ranks": 3}, 2, "ranks: got 3; allowed: 1 to 2, one a GPU"),
        ({"ranks": 9}, 1, "ranks: got 9; allowed on one GPU: 1 to 8"),
        ({"ranks": 2, "compare": "nccl"}, 1, "compare: nccl needs several GPUs"),
        ({"ranks": 1, "compare": "nccl"}, 2, "compare: nccl needs several GPUs"),
    ],
)
def test_what_these_gpus_cannot_give(given: dict[str, Any], gpus: int, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        complete_gpu_options(resolve(given | {"device": "cuda"}), gpus)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "cuda", "mode": "ll", "compare": "nccl"}, "compare: nccl is compared with the HT mode"),
        ({"device": "cuda", "compare": "gloo"}, "compare: gloo is for the CPU"),
        ({"compare": "nccl"}, "compare: nccl needs several GPUs; on the CPU: gloo"),
        ({"graph": True}, "graph: it needs GPUs"),
        ({"overlap": True}, "overlap: it needs GPUs"),
        ({"host_cost": True}, "host-cost: it needs GPUs"),
    ],
)
def test_options_of_the_other_device_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(given)
    assert text in str(caught.value)


def test_numbers_of_sms() -> None:
    assert parse_numbers("8", "num-sms") == (8,)
    assert parse_numbers("8,12,16", "num-sms") == (8, 12, 16)
    with pytest.raises(ValueError, match="num-sms: got 8,x"):
        parse_numbers("8,x", "num-sms")


@pytest.mark.parametrize("arguments", [("--graph",), ("--compare", "nccl"), ("--num-sms", "many")])
def test_the_command_line_refuses_too(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "deep_moe", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("deep-moe bench: ") and arguments[0].lstrip("-") in done.stderr


def test_timings_are_of_buffers_on_gpus() -> None:
    [comm] = deep_moe.thread_comms(1)
    buffer = deep_moe.Buffer(None, comm=comm, device="cpu")
    with pytest.raises((ValueError, deep_moe.UnavailableError), match=r"CPU|no CUDA part"):
        _C.BenchRank(buffer.runtime)
    buffer.destroy()


def test_the_worker_gets_the_environment(tmp_path: Path) -> None:
    """CUDA reads it once, when it starts; the parent's own is left alone."""
    module = tmp_path / "cli_environment_program.py"
    module.write_text(
        "import json, os\nnames = ('CUDA_MODULE_LOADING', 'CUDA_DEVICE_MAX_CONNECTIONS')\n"
        "print(json.dumps({'result': {name: os.environ.get(name) for name in names}}))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        results, _ = run_ranks(1, "{}", 60.0, lambda *_: None, module.stem, gpu_environment(OPTIONS))
    finally:
        sys.path.remove(str(tmp_path))
    assert results == [gpu_environment(OPTIONS)]
    assert os.environ.get("CUDA_MODULE_LOADING") is None
    assert gpu_environment(complete_gpu_options(OPTIONS, 2)) == {}


# ---- reports ----
def line(
    call: Any, payload: str, sms: int, us: list[float], driver: str = "C++", **more: Any
) -> dict[str, Any]:
    return {
        "call": call.name if hasattr(call, "name") else call,
        "payload": payload,
        "num_sms": sms,
        "driver": driver,
        "kind": "deep_moe",
        "limit": getattr(call, "limit", ""),
        "link_bytes": 4_000_000,
        "row_bytes": 8_000_000,
        "device_us": us,
        "issue_us": [time / 2 for time in us],
        "wall_us": us,
    } | more


def copies(payload: str, sms: int, limit: str, fastest: float) -> list[dict[str, Any]]:
    return [
        line(f"plain copy for {limit}", payload, sms, [us] * 3, kind="copy", limit=limit)
        for us in (fastest + 5, fastest)
    ]


def of_ranks() -> list[dict[str, Any]]:
    """Two ranks; in each sample another is the slower one."""

    def rank(dispatch: list[float]) -> dict[str, Any]:
        return {
            "lines": [
                *copies("bf16", 8, "dispatch", 100.0),
                *copies("bf16", 8, "combine", 80.0),
                *[copy | {"driver": "graph"} for copy in copies("bf16", 8, "dispatch", 98.0)],
                *[copy | {"driver": "graph"} for copy in copies("bf16", 8, "combine", 79.0)],
                line(DISPATCH, "bf16", 8, dispatch),
                line(DISPATCH_V1, "bf16", 8, [130.0] * 3),
                line(COMBINE, "bf16", 8, [90.0] * 3),
                line(PAIR, "bf16", 8, [210.0] * 3),
                line(PAIR, "bf16", 8, [200.0] * 3, "graph"),
                *copies("fp8", 8, "dispatch", 60.0),
                line(PAIR, "fp8", 8, [150.0] * 3),
                line(DISPATCH, "bf16", 16, [70.0] * 3, "Python"),
            ],
            "checks": [
                {"name": f"pair {sms} SMs, as timed", "error": sms / 1e4, "tolerance": 2e-2, "passed": True}
                for sms in (8, 16)
            ],
            "overlap": [],
            "host_cost": [cost("C++", 2, dispatch)],
            "low_latency": [
                low_latency(driver, tokens, dispatch) for driver in ("graph", "Python") for tokens in (1, 128)
            ],
            "hook_overlap": [],
            "expert_major": [by_expert(call, dispatch) for call in ("dispatch", "combine")],
        }

    results = [rank([120.0, 100.0, 110.0]), rank([100.0, 125.0, 124.0])]
    samples = {"alone": [90.0, 90.0], "hold": [100.0, 100.0], "dispatch": [104.0, 102.0]}
    results[0]["overlap"] = [
        {
            "dispatching_ranks": 1,
            "num_sms": 16,
            "gemm": (8192, 8192, 2048),
            "us": samples,
            "covered": True,
            "dispatched_tokens": 32768,
        }
    ]
    between = {"alone": [100.0, 100.0], "dispatch": [101.0, 103.0], "combine": [101.0, 101.0]}
    results[0]["hook_overlap"] = [{"gemm": (8192, 8192, 2048), "tokens": 128, "us": between}]
    results[0]["host_cost"].insert(0, cost("Python", 1, [50.0, 60.0, 55.0]))
    return results


def low_latency(driver: str, tokens: int, us: list[float]) -> dict[str, Any]:
    times = {"device_us": us, "issue_us": [time / 4 for time in us], "wall_us": [time + 1 for time in us]}
    return {"call": "pair, V1 calls", "payload": "fp8", "driver": driver, "tokens": tokens, **times}


def by_expert(call: str, us: list[float]) -> dict[str, Any]:
    rows = {"received": int(us[0]), "entries": int(10 * us[0])}
    return {"call": call, "ranks": 2, "num_sms": 8, **rows, "us": us}


def cost(driver: str, ranks: int, us: list[float]) -> dict[str, Any]:
    return {"call": "pair", "driver": driver, "ranks": ranks, "tokens": 1, "num_sms": 8, "us": us}


def test_a_row_is_the_slowest_ranks_and_has_its_copy() -> None:
    rows = {(row.name, row.step, row.driver): row for row in assemble_gpu(of_ranks(), OPTIONS).rows}
    dispatch = rows["bf16, 8 SMs", "dispatch", "C++"]
    assert dispatch.us == 124.0  # of 120, 125, 124
    assert (dispatch.rank_us, dispatch.slowest_rank) == ([110.0, 124.0], 1)
    assert (dispatch.copy_us, dispatch.share) == (100.0, pytest.approx(100 / 124))
    assert dispatch.gb_per_s == pytest.approx(4e6 / 124e-6 / 1e9)
    assert dispatch.logical_gb_per_s == pytest.approx(8e6 / 124e-6 / 1e9)
    assert dispatch.issue_us == 62.0
    assert rows["bf16, 8 SMs", DIFFERENCE, "C++"].us == 6.0
    assert rows["bf16, 8 SMs", "pair", "C++"].copy_us == 180.0
    assert rows["bf16, 8 SMs", "pair", "graph"].copy_us == 177.0
    # Combine sums rows of the run's own type, also behind a dispatch of fp8.
    assert rows["fp8, 8 SMs", "pair", "C++"].copy_us == 140.0
    # No copy was timed with so many SMs.
    assert rows["bf16, 16 SMs", "dispatch", "Python"].copy_us is None


def test_gpu_summary() -> None:
    summary = summarise_gpu(assemble_gpu(of_ranks(), OPTIONS))
    assert summary["calls"]["bf16, 8 SMs"] == {
        "dispatch_us": 124.0,
        "dispatch_over_copy_us": 24.0,
        "v1_over_fused_us": 6.0,
        "combine_us": 90.0,
        "combine_over_copy_us": 10.0,
        "pair_us": 210.0,
        "pair_over_copy_us": 30.0,
        "graph_pair_us": 200.0,
        "graph_pair_over_copy_us": 23.0,
    }
    [overlap] = summary["overlap"]
    assert overlap["slower_percent"] == pytest.approx(3.0)
    alone, together = summary["host_cost"]
    assert (alone["driver"], alone["us"]) == ("Python", 55.0)
    assert (together["driver"], together["us"], together["samples_us"]) == (
        "C++",
        124.0,
        [120.0, 125.0, 124.0],
    )


def test_gpu_report_is_printed() -> None:
    results, out = assemble_gpu(of_ranks(), OPTIONS), io.StringIO()
    print_gpu_report(Console(file=out, width=160), OPTIONS, results, assemble_checks(of_ranks()))
    text = out.getvalue()
    assert "ok  timed pairs, 2 checks: max error 1.60e-03 (allowed 2e-02)" in text
    assert "2 cuda ranks, 4096 tokens each" in text and "threads of one process on one GPU" in text
    lines = [entry.split() for entry in text.splitlines()]
    wanted = "bf16, 8 SMs dispatch C++ 124.0 100.0 +24.0 81% 32.3 64.5 62.0"
    assert wanted.split() in lines
    assert [*DIFFERENCE.split(), "C++", "+6.0"] in lines
    assert "plain copy for" not in text
    assert "a GEMM of 8192 x 8192 x 2048 takes 103.0 us beside the dispatch" in text
    assert "+3.0 % (aim: at most 5 %)" in text
    assert ["pair", "Python", "1", "1", "55.0"] in lines
    assert ["pair,", "V1", "calls", "fp8", "graph", "124.0", "124.0"] in lines
    assert ["pair,", "V1", "calls", "fp8", "Python", "125.0", "125.0", "31.0"] in lines
    assert "takes 100.0 us alone, 102.0 us between a dispatch of 128 tokens and its hook (+2.0 %)" in text


def test_gpus_without_a_copy_engine_have_no_limit() -> None:
    both, out = of_ranks(), io.StringIO()
    for rank in both:
        rank["lines"] = [entry for entry in rank["lines"] if entry["kind"] != "copy"]
    results = assemble_gpu(both, OPTIONS)
    assert all(row.copy_us is None and row.share is None for row in results.rows)
    print_gpu_report(Console(file=out, width=160), OPTIONS, results, [])
    assert "no copy limit" in out.getvalue()


def test_rows_by_expert() -> None:
    """Each sample is the slowest rank's; of a document, each call is compared with the same call."""
    results = of_ranks()
    results[1]["expert_major"][0]["received"] = 150
    entries = assemble_gpu(results, OPTIONS).expert_major
    assert [entry["call"] for entry in entries] == ["dispatch", "combine"]
    assert [entry["us"] for entry in entries] == [124.0, 124.0]  # of 120, 125, 124
    assert (entries[0]["received"], entries[0]["entries"]) == (150, 1200)
    out = io.StringIO()
    print_gpu_report(Console(file=out, width=160), OPTIONS, assemble_gpu(results, OPTIONS), [])
    assert "150 rows received, 1,200 by expert, 8 SMs a rank" in out.getvalue()


def test_an_overlap_that_does_not_cover_is_not_passed_off_as_one() -> None:
    results = of_ranks()
    results[0]["overlap"][0]["covered"] = False
    [entry] = assemble_gpu(results, OPTIONS).overlap
    assert "NOT COVERED" in describe_overlap(entry)


def test_a_timed_pair_that_is_wrong_is_named() -> None:
    both, out = of_ranks(), io.StringIO()
    both[1]["checks"][0] |= {"error": 0.5, "passed": False}
    print_gpu_report(
        Console(file=out, width=160), OPTIONS, assemble_gpu(both, OPTIONS), assemble_checks(both)
    )
    assert "FAILED  pair 8 SMs, as timed: max error 5.00e-01" in out.getvalue()
    assert "ok  timed pairs, 1 checks" in out.getvalue()


def test_gpu_json_and_chart(tmp_path: Path) -> None:
    results = assemble_gpu(of_ranks(), OPTIONS)
    document = to_document(OPTIONS, results.rows, [], {"date": "2030-01-01"}, summarise_gpu(results))
    write_json(tmp_path / "out.json", document)
    read = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert read["parameters"]["num_sms"] == [8, 16]
    assert read["summary"]["overlap"][0]["gemm"] == [8192, 8192, 2048]
    assert {row["kind"] for row in read["rows"]} == {"copy", "deep_moe", "difference"}
    pytest.importorskip("matplotlib")
    write_bars(tmp_path / "out.png", "a run", results.rows)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_fp8_leaves_combine_to_the_runs_own_type() -> None:
    assert payloads(OPTIONS) == ("bf16", "fp8")
    assert COMBINE in calls_of("bf16", OPTIONS)
    assert COMBINE not in calls_of("fp8", OPTIONS) and PAIR in calls_of("fp8", OPTIONS)


def test_a_plan_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line's options to those of the ranks, as on a machine with four GPUs."""
    monkeypatch.setattr(bench_command, "pick_device", lambda asked: "cuda")
    monkeypatch.setattr(bench_command, "num_gpus", lambda: 4)
    options = bench_command.plan({"num_sms": "8,12", "overlap": True, "compare": "nccl"})
    assert (options.ranks, options.processes, options.num_sms) == (4, 4, (8, 12))
    assert options.overlap and not options.graph and options.compare == "nccl"


def test_tables_in_markdown(tmp_path: Path) -> None:
    """As docs/performance.md has them."""
    results = assemble_gpu(of_ranks(), OPTIONS)
    document = to_document(OPTIONS, results.rows, [], {}, summarise_gpu(results))
    write_json(tmp_path / "out.json", document)
    command = [sys.executable, "-m", "deep_moe.cli.tables", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for entry in (
        "| SMs a rank | 8 | 16 |",
        "| dispatch, bf16 | 124.0 (+24.0, 81%) |  |",
        f"| {DIFFERENCE}, bf16 | +6.0 |  |",
        "| in a graph: pair, bf16 | 200.0 (+23.0, 88%) |  |",
        "| from Python: dispatch, bf16 |  | 70.0 |",
        "| plain copy for dispatch, bf16 | 100.0 (in graphs 98.0) |  |",
        "| pairs at low latency | dispatched as | driven by | T=1 | T=128 | host, us |",
        "| pair, V1 calls | fp8 | graph | 124.0 | 124.0 |  |",
        "| pair, V1 calls | fp8 | Python | 125.0 | 125.0 | 31.0 |",
        "| 1 | 90 | 100 | 103 | 3.0 % |",
        "| pair | Python | 1 | 1 | 55.0 |",
    ):
        assert entry in done.stdout.splitlines()
