"""``deep-moe bench`` from end to end, in small sizes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--ranks", "2", "--tokens", "32", "--hidden", "256", "--experts", "8", "--topk", "2", "--iters", "3")


def deep_moe(
    *arguments: str, program: str = "-m deep_moe", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    command = [sys.executable, *program.split(" "), *arguments]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Runs a small bench that must succeed, and returns its JSON file."""
    path = tmp_path / "bench.json"
    done = deep_moe("bench", *SMALL, *arguments, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(path.read_text())
    assert document["checks"]
    assert all(check["passed"] for check in document["checks"])
    assert done.stderr == ""
    document["stdout"] = done.stdout
    return document


def test_both_modes_with_fp8_and_gloo(tmp_path: Path) -> None:
    document = bench(tmp_path, "--fp8", "--compare", "gloo")
    rows = {(row["name"], row["step"]): row for row in document["rows"]}
    names = {
        "HT bf16, heap",
        "HT bf16, ordinary tensor",
        "HT fp8, heap",
        "LL bf16",
        "LL fp8",
        "gloo all_to_all_single",
    }
    assert {(name, step) for name in names for step in ("dispatch", "combine", "pair")} <= set(rows)
    assert ("layer", "gate") in rows
    assert all(row["us"] > 0 for row in rows.values())
    # Every token has two experts among 8 on 2 ranks: 32 to 64 rows a rank, at most 32 of them over the link.
    assert 32 <= rows["HT bf16, heap", "dispatch"]["rows"] <= 64
    assert 0 < rows["HT bf16, heap", "dispatch"]["link_bytes"] <= 32 * 512
    assert (
        rows["HT fp8, heap", "dispatch"]["link_bytes"]
        == rows["HT bf16, heap", "dispatch"]["link_bytes"] * 264 // 512
    )
    assert rows["LL bf16", "dispatch"]["rows"] == 64
    summary = document["summary"]["HT bf16, heap"]
    assert {"pair_us", "memcpy_us", "share_of_memcpy", "gloo_us", "times_faster_than_gloo"} == set(summary)
    assert document["parameters"]["ranks"] == 2
    assert {"deep_moe", "torch", "python"} <= set(document["versions"])
    assert document["machine"]["cores"] >= 1
    assert 0 <= document["machine"]["busy_with_others"] <= 1
    assert "HT bf16, heap: a dispatch + combine pair takes" in document["stdout"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--routing", "hot", "--mode", "ht", "--dtype", "fp32"),
        ("--routing", "zipf", "--mode", "ll", "--dtype", "fp16", "--ranks", "3"),
        ("--gate", "sigmoid", "--groups", "4", "--topk-groups", "2", "--mode", "ht", "--ranks", "1"),
    ],
)
def test_routings_types_and_gates(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    document = bench(tmp_path, *arguments)
    assert document["parameters"]["dtype"] in " ".join(row["name"] for row in document["rows"])


def test_trace_text_and_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "trace.npy", np.array([[0, 5, -1], [5, 5, 3], [-1, -1, -1]]))
    document = bench(
        tmp_path, "--topk", "3", "--trace", str(tmp_path / "trace.npy"), "--plot", str(tmp_path / "a.png")
    )
    assert document["parameters"]["topk"] == 3
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "words.txt").write_text("one fish two fish red fish blue fish")
    bench(tmp_path, "--mode", "ht", "--text", str(tmp_path / "words.txt"))


def test_a_models_shape_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = deep_moe(
        *(
            "bench",
            "--model",
            "granite-3-3b",
            "--ranks",
            "2",
            "--tokens",
            "16",
            "--iters",
            "2",
            "--json",
            str(path),
        )
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parameters = json.loads(path.read_text())["parameters"]
    assert (parameters["model"], parameters["hidden"], parameters["experts"]) == ("Granite-3-3B", 1536, 40)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--hidden", "100"), "hidden: got 100; allowed: a multiple of 8"),
        (("--model", "DeepSeek"), "DeepSeek-V3"),
        (("--json", "/no/such/folder/a.json"), "json: got /no/such/folder/a.json"),
        (("--text", "/no/such/file"), "/no/such/file"),
        (("--routing", "trace"), "needs --trace FILE"),
        (("--routing", "hot", "--text", "a"), "give one of both"),
        (("--tokens", "100000000"), "GB of memory"),
    ],
)
def test_wrong_arguments_leave_with_code_2(arguments: tuple[str, ...], text: str) -> None:
    done = deep_moe("bench", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


BROKEN = """
import sys
import deep_moe.cli.launch as launch, deep_moe.cli.bench as bench
from deep_moe.cli import main
def with_broken_rank(*args):
    return launch.run_ranks(*args, module="tests.cpu.cli_broken_worker")
bench.run_ranks = with_broken_rank
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("wrong", 1, "differs from the dense computation"),
        ("raise", 1, "RuntimeError: broken on purpose"),
        ("kill", 1, "was ended by signal 9"),
    ],
)
def test_a_broken_rank_fails_the_run(monkeypatch: pytest.MonkeyPatch, how: str, code: int, text: str) -> None:
    monkeypatch.setenv("DEEP_MOE_TEST_BREAK", how)
    begin = time.monotonic()
    command = [sys.executable, "-c", BROKEN, "bench", *SMALL, "--mode", "ht", "--timeout", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stderr
    assert ("FAILED" in done.stdout) == (how == "wrong")
    assert time.monotonic() - begin < 90


def test_progress_shows_on_a_terminal_alone() -> None:
    """Standard error is a pseudo-terminal here; in all other tests it is a pipe, where nothing may appear."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "deep_moe", "bench", *SMALL, "--mode", "ht", "--iters", "100"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a pseudo-terminal ends with EIO
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0, shown
    assert b"time HT bf16" in shown


def test_import_of_the_package_loads_no_command_line() -> None:
    done = deep_moe(
        "import deep_moe, sys; print([m for m in ('typer', 'rich', 'deep_moe.cli') if m in sys.modules])",
        program="-c",
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_version_and_help() -> None:
    import deep_moe as package

    assert deep_moe("--version").stdout.strip() == f"deep_moe {package.__version__}"
    shown = deep_moe("bench", "--help")
    assert shown.returncode == 0
    assert "--compare" in shown.stdout


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_help_shows_defaults(command: str) -> None:
    """Whatever draws the texts takes nothing in them for markup."""
    shown = deep_moe(command, "--help", COLUMNS="200").stdout
    assert "Experts over all ranks (default: 64; GPUs: 256)." in shown
    assert not re.search(r" \.\s", shown)
