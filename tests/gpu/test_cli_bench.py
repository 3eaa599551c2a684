"""``deep-moe bench`` on one GPU and on several, in a small size from end to end; plain copies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import _C

from ..support.gpu import World, on_gpu
from ..support.inputs import Case, Inputs
from ..support.system import first_gpu, num_gpus

pytestmark = pytest.mark.gpus(1)

SMALL = ("--tokens", "64", "--hidden", "512", "--experts", "16", "--topk", "4", "--iters", "3")


def bench(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deep_moe", "bench", "--device", "cuda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON file of a run with everything; on one GPU, however many there are."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", first_gpu())
        parts = ("--fp8", "--graph", "--overlap", "--host-cost", "--expert-major", "--num-sms", "4,8")
        done = bench(*SMALL, *parts, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    read: dict[str, Any] = json.loads(path.read_text())
    read["stdout"] = done.stdout
    return read


def test_every_call_is_timed_and_has_its_copy(document: dict[str, Any]) -> None:
    rows = {
        (row["name"], row["step"], row["driver"]): row for row in document["rows"] if row["kind"] != "copy"
    }
    for payload in ("bf16", "fp8"):
        for sms in (4, 8):
            name = f"{payload}, {sms} SMs"
            for driver in ("C++", "graph"):
                for step in ("dispatch", "dispatch by handle", "pair", "pair by handle"):
                    row = rows[name, step, driver]
                    assert row["copy_us"] > 0 and 0 < row["us"] < 1e6
                    assert row["share"] == pytest.approx(row["copy_us"] / row["us"])
            difference = rows[name, "dispatch, V1 calls", "C++"]["us"] - rows[name, "dispatch", "C++"]["us"]
            assert rows[name, "V1 calls less num_experts=", "C++"]["us"] == pytest.approx(difference)
    for step in ("combine", "combine with weights", "combine, ordinary tensor"):
        assert rows["bf16, 8 SMs", step, "C++"]["copy_us"] > 0
    for step in ("dispatch", "combine", "pair"):
        assert rows["bf16, 8 SMs", step, "Python"]["us"] > 0
    assert rows["bf16, 8 SMs", "get_dispatch_layout", "C++"]["copy_us"] is None
    # 64 tokens on either rank, at most as many rows to the other; a row of bf16 has 1024 bytes, of fp8 528.
    assert 0 < rows["bf16, 4 SMs", "dispatch", "C++"]["link_bytes"] <= 64 * 1024
    of_fp8, of_bf16 = (rows[f"{p}, 4 SMs", "dispatch", "C++"]["link_bytes"] for p in ("fp8", "bf16"))
    assert of_fp8 * 1024 == of_bf16 * 528


def test_what_is_timed_is_checked(document: dict[str, Any]) -> None:
    names = {check["name"] for check in document["checks"]}
    assert all(check["passed"] for check in document["checks"])
    for name in (
        "HT bf16, input in the heap",
        "HT fp8, input in an ordinary tensor",
        "pair, bf16, 8 SMs, C++, as timed",
        "pair by handle, bf16, 4 SMs, graph, as timed",
        "pair, bf16, 8 SMs, Python, as timed",
    ):
        assert name in names


def test_overlap_and_host_cost(document: dict[str, Any]) -> None:
    summary = document["summary"]
    assert [entry["dispatching_ranks"] for entry in summary["overlap"]] == [1, 2]
    assert all(entry["alone_us"] > 0 and entry["hold_us"] > 0 for entry in summary["overlap"])
    costs = {(entry["call"], entry["driver"], entry["ranks"]) for entry in summary["host_cost"]}
    assert costs == {
        ("pair", "Python", 1),
        ("pair by handle", "Python", 1),
        ("pair", "C++", 1),
        ("pair by handle", "C++", 1),
        ("pair", "C++", 2),
        ("pair by handle", "C++", 2),
        ("pair", "graph", 2),
    }
    assert document["machine"]["gpus"] and document["parameters"]["processes"] == 1
    assert "threads of one process on one GPU" in document["stdout"]


def test_rows_by_expert(document: dict[str, Any]) -> None:
    entries = {entry["call"]: entry for entry in document["summary"]["expert_major"]}
    assert {"dispatch, expert-major", "dispatch, sort and gather", "combine"} <= set(entries)
    assert all(entry["us"] > 0 and entry["num_sms"] == 8 for entry in entries.values())
    assert 0 < entries["dispatch"]["received"] <= entries["dispatch"]["entries"]


def test_one_rank_and_odd_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first_gpu())
    path = tmp_path / "bench.json"
    done = bench(
        *(
            "--ranks",
            "3",
            "--tokens",
            "33",
            "--hidden",
            "72",
            "--experts",
            "10",
            "--topk",
            "3",
            "--iters",
            "2",
        ),
        *("--routing", "hot", "--num-sms", "3", "--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(check["passed"] for check in json.loads(path.read_text())["checks"])
    done = bench(*SMALL, "--ranks", "1", "--no-check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_tune_is_picked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share a GPU here, so that the entry fits a program of one process on one GPU."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first_gpu())
    monkeypatch.setenv("DEEP_MOE_TUNING_FILE", str(path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    command = [sys.executable, "-m", "deep_moe", "tune", "--device", "cuda", *SMALL, "--numbers", "4,8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(path.read_text())["entries"]
    assert (entry["ranks"], entry["ranks_per_gpu"], entry["hidden"]) == (2, 2, 512)
    assert {entry["dispatch_sms"], entry["combine_sms"]} <= {4, 8, 20}
    program = (
        "import torch; from deep_moe import Buffer as b; torch.cuda.init(); "
        "print(b.get_dispatch_config(2).num_sms, b.get_combine_config(2).num_sms)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == [str(entry["dispatch_sms"]), str(entry["combine_sms"])], done.stderr


def test_nccl_needs_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first_gpu())
    done = bench(*SMALL, "--compare", "nccl")
    assert done.returncode == 2 and "nccl needs several GPUs" in done.stderr


@pytest.mark.gpus(2)
def test_a_process_a_gpu(tmp_path: Path) -> None:
    """Both modes and NCCL; plain copies go to the peers' memory, and every exchange is checked."""
    path = tmp_path / "bench.json"
    parts = ("--mode", "both", "--ll-tokens", "8", "--fp8", "--graph", "--host-cost", "--num-sms", "8")
    done = bench(*SMALL, *parts, "--compare", "nccl", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["parameters"]["processes"] == document["parameters"]["ranks"] == num_gpus()
    assert "processes, one a GPU" in done.stdout
    assert all(check["passed"] for check in document["checks"])
    rows = {(row["name"], row["step"], row["driver"]): row for row in document["rows"]}
    for driver in ("C++", "graph", "Python"):
        row = rows["bf16, 8 SMs", "pair", driver]
        assert row["us"] > 0 and row["gb_per_s"] > 0 and (driver == "Python" or row["copy_us"] > 0)
    assert rows["bf16, 8 SMs", "pair", "NCCL"]["us"] > 0
    entries = document["summary"]["low_latency"]
    assert {(one["payload"], one["tokens"], one["driver"]) for one in entries} == {
        (payload, tokens, driver)
        for payload in ("fp8", "bf16")
        for tokens in (1, 8)
        for driver in ("graph", "Python")
    }
    assert all(one["device_us"] > 0 and one["ranks"] == num_gpus() for one in entries)


CASE = Case("copies", (50, 33, 20), hidden=2048 + 512, experts=9, topk=2, payload="fp8")


def job_copies(comm: Any, rank: int, given: Inputs) -> Any:
    """Plain copies of each shape into every rank's memory."""
    buffer = deep_moe.Buffer(None, comm=comm)
    x = on_gpu(given.x[rank])
    idx, weights = on_gpu(given.topk_idx[rank]), on_gpu(given.topk_weights[rank])
    tokens = len(idx)
    row_bytes = 2 * x[0].shape[1]
    most = max(len(one) for one in given.topk_idx)
    mine = torch.zeros(given.ranks, most * row_bytes, dtype=torch.uint8, device="cuda")
    ordinary = torch.zeros(given.ranks * tokens, x[0].shape[1], dtype=torch.bfloat16, device="cuda")
    everybodys = comm.allgather(mine)
    for peer in everybodys:  # a copy makes torch let one GPU reach the other's memory
        for source, target in ((peer, mine), (mine, peer)):
            torch.empty_like(target.view(-1)[:1]).copy_(source.view(-1)[:1])
    torch.cuda.synchronize()
    comm.allgather(None)
    bench_rank = _C.BenchRank(buffer.runtime)
    landing = [of_rank[rank].data_ptr() for of_rank in everybodys]
    bench_rank.set_inputs(x, idx, weights, given.experts, ordinary, landing)
    results = []
    for shape in ((12, 4, False), (5, 3, False), (6, 4, True), (16, 3, True)):
        mine.zero_()
        torch.cuda.current_stream().synchronize()
        comm.allgather(None)
        bench_rank.prepare(["copy_for_dispatch"], 3, 0, *shape)
        bench_rank.run(2)
        comm.allgather(None)
        results.append(mine.cpu())
        comm.allgather(None)
    bench_rank.prepare(["copy_for_combine"], 3, 0, 12, 4, True)
    bench_rank.run(2)
    buffer.destroy()
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_plain_copies_copy_what_dispatch_sends(ranks: int) -> None:
    """Else the limit would be that of other work: each row and its scales, to the ranks it goes to alone."""
    given = CASE.but(tokens=CASE.tokens[:ranks]).inputs()
    results = World("thread", ranks).run(job_copies, given)
    for dst, shapes in enumerate(results):
        for landed in shapes:
            for src in range(ranks):
                data, scales = (part.contiguous().view(torch.uint8) for part in given.x[src])
                layout = deep_moe.reference.layout(given.topk_idx[src], given.experts, ranks)
                wanted = layout.is_token_in_rank[:, dst, None]
                got = landed[src]
                rows = got[: data.numel()].view(data.shape)
                assert torch.equal(rows, torch.where(wanted, data, 0))
                rest = got[data.numel() : data.numel() + scales.numel()].view(scales.shape)
                assert torch.equal(rest, torch.where(wanted, scales, 0))
