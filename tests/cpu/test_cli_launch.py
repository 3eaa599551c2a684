"""Rank processes of the bench: results and events come back, a failure ends all, nothing hangs or stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe.cli.chains import Chain, Check, time_chains
from deep_moe.cli.launch import RankFailedError, run_ranks
from deep_moe.cli.timing import (
    CopyBuffers,
    PlainCopy,
    SharedBarrier,
    StepTimer,
    chain_times,
    median,
    split_rounds,
)

CPU = torch.device("cpu")
PROGRAM = "tests.cpu.cli_rank_program"


def run(plan: dict[str, Any], num_ranks: int = 2, timeout: float = 60.0) -> list[tuple[int, dict[str, Any]]]:
    """Runs PROGRAM as rank processes that follow ``plan``; returns their events."""
    events: list[tuple[int, dict[str, Any]]] = []
    results, logs = run_ranks(
        num_ranks, json.dumps(plan), timeout, lambda rank, event: events.append((rank, event)), module=PROGRAM
    )
    assert results == [{"rank": rank} for rank in range(num_ranks)]
    assert all(log == "a word on stderr\n" for log in logs)
    return events


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def test_results_events_and_logs_come_back() -> None:
    events = run({}, num_ranks=3)
    assert sorted(rank for rank, event in events if event.get("phase") == "work") == [0, 1, 2]
    assert {"print": "a stray print\n"} in [event for _, event in events]


def test_an_exception_ends_all_ranks_and_shows_its_traceback(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        run({"raise": 1, "sleep": 0, "pids": str(tmp_path)})
    text = str(caught.value)
    assert "rank 1 failed (phase: work): ValueError: the rows are gone" in text
    assert "Traceback" in text
    assert "cli_rank_program.py" in text
    assert "a word on stderr" in text
    assert time.monotonic() - begin < 30
    wait_until_gone([int(file.name) for file in tmp_path.iterdir()])


def test_a_killed_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed \(phase: work\): was ended by signal 9"):
        run({"kill": 0, "sleep": 1, "pids": str(tmp_path)})
    wait_until_gone([int(file.name) for file in tmp_path.iterdir()])


def test_a_rank_without_a_result_has_failed() -> None:
    with pytest.raises(RankFailedError, match="left with exit code 3 and no result"):
        run({"exit": 1})


def test_the_time_out_says_where_each_rank_was(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"within 5 s .* rank 1: work") as caught:
        run({"sleep": 1, "pids": str(tmp_path)}, timeout=5.0)
    assert "rank 0" not in str(caught.value)
    wait_until_gone([int(file.name) for file in tmp_path.iterdir()])


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        f"import json, sys; sys.path[:] = {sys.path!r}\n"
        "from deep_moe.cli.launch import run_ranks\n"
        f"plan = json.dumps({{'sleep': -1, 'watch': True, 'pids': {str(tmp_path / 'pids')!r}}})\n"
        f"run_ranks(2, plan, 100.0, lambda *_: None, module={PROGRAM!r})\n"
    )
    (tmp_path / "tmp").mkdir()
    (tmp_path / "pids").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}  # a killed parent leaves its folder
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "pids").iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = [int(file.name) for file in (tmp_path / "pids").iterdir()]
        assert all(is_running(pid) for pid in pids)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until_gone(pids)


def on_threads(num_ranks: int, work: Any) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_barrier_holds_until_all_are_there(tmp_path: Path) -> None:
    arrived: list[int] = []
    seen: list[int] = []

    def work(rank: int) -> None:
        barrier = SharedBarrier(tmp_path / "words", rank, 3, timeout=30.0)
        for turn in range(20):
            time.sleep(0.0005 * (rank + turn) % 3)
            arrived.append(rank)
            barrier.wait()
            seen.append(len(arrived) // 3 - turn)
            barrier.wait()

    on_threads(3, work)
    assert seen == [1] * 60


def test_barrier_names_the_ranks_that_are_missing(tmp_path: Path) -> None:
    SharedBarrier(tmp_path / "words", 0, 3, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0.2 s at a barrier for ranks \[0, 2\]"):
        SharedBarrier(tmp_path / "words", 1, 3, timeout=0.2).wait()


def test_timer_times_each_step(tmp_path: Path) -> None:
    calls: list[str] = []
    barrier = SharedBarrier(tmp_path / "words", 0, 1, timeout=5.0)
    timer = StepTimer(barrier, CPU, tick=lambda: calls.append("tick"))
    steps = [lambda: time.sleep(0.002), lambda: calls.append("step")]
    marks = timer.run(steps, lambda: calls.append("before"), iters=3, warmup=2)
    assert calls == ["before", "tick", "step"] * 5
    assert len(marks) == 3
    for start, first, second in marks:
        assert first - start >= 2000
        assert 0 <= second - first < 2000


def test_chains_take_turns_and_are_checked_in_the_last_round(tmp_path: Path) -> None:
    calls: list[str] = []
    timer = StepTimer(SharedBarrier(tmp_path / "words", 0, 1, timeout=5.0), CPU, tick=lambda: None)

    def verify() -> Check:
        calls.append("verify")
        return Check("a", 0.0, 1.0)

    a = Chain("a", "layer", "", ("step",), [lambda: calls.append("a")], verify=verify)
    b = Chain("b", "layer", "", ("step",), [lambda: calls.append("b")], before=lambda: calls.append("drop"))
    checks = time_chains([a, b], timer, [(2, 0), (1, 0)], lambda phase: None)
    assert calls == ["a", "a", "drop", "b", "drop", "b", "drop", "a", "verify", "drop", "b", "drop"]
    assert [check.name for check in checks] == ["a"]
    assert (len(a.marks), len(b.marks)) == (3, 3)
    assert a.to_dict()["steps"] == ["step"]


def test_rounds_share_the_iterations() -> None:
    assert split_rounds(20, 3, 5) == [(4, 3), (4, 1), (4, 1), (4, 1), (4, 1)]
    assert split_rounds(7, 0, 3) == [(2, 0), (2, 0), (3, 0)]
    assert split_rounds(1, 2, 5) == [(1, 2)]


@pytest.mark.parametrize("num_bytes", [0, 100, (1 << 20) * 3 + 17])
@pytest.mark.parametrize("whole", [False, True])
def test_plain_copy_copies_every_byte_and_no_more(num_bytes: int, whole: bool) -> None:
    buffers = CopyBuffers(CPU)
    copy = PlainCopy(buffers, "dispatch", num_bytes, whole)
    buffers.reserve("dispatch", num_bytes + 5)
    copy.prepare()
    copy()
    target, source = buffers.get("dispatch")
    assert len(target) == len(source) == num_bytes + 5
    assert bool((target[:num_bytes] == 1).all())
    assert not target[num_bytes:].any()


def test_steps_last_until_the_last_rank_is_ready_and_add_up() -> None:
    fast, slow = [[10.0, 20.0, 25.0]], [[12.0, 30.0, 31.0]]
    assert chain_times([fast, slow]) == ([[20.0], [1.0]], [21.0])
    assert chain_times([fast, fast]) == ([[10.0], [5.0]], [15.0])


def test_median() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
