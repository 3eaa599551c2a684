"""``deep-moe plan``: bytes as the library takes them, times as the models and measurements have them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference
from deep_moe._C import received_bytes, workspace_bytes
from deep_moe._traffic import Work, ring_bytes, spread
from deep_moe.cli.models import load_models
from deep_moe.planning import Plan, heap_after, plan
from docs.models import network_times as model

from ..support.inputs import gate, rng
from ..support.ranks import run_ranks

V3 = {"hidden": 7168, "num_experts": 256, "topk": 8}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sizing.md"


def memory_of(found: Plan, name: str) -> int:
    (part,) = [part for part in found.memory if part.name == name]
    return part.bytes


def bound_of(found: Plan, call: str) -> Any:
    (bound,) = [bound for bound in found.bounds if bound.call == call]
    return bound


# ---- rows ----
@pytest.mark.parametrize(
    ("ranks", "nodes", "experts", "topk", "groups", "topk_groups"),
    [
        (8, 1, 256, 8, 0, 0),
        (6, 2, 20, 3, 0, 0),
        (5, 1, 7, 7, 0, 0),
        (8, 1, 64, 8, 8, 4),
        (16, 2, 64, 6, 8, 2),
    ],
)
def test_spread_is_that_of_drawn_routes(
    ranks: int, nodes: int, experts: int, topk: int, groups: int, topk_groups: int
) -> None:
    """Uneven shares of experts and groups too; routes and owners are the reference's."""
    scores = torch.rand(4000, experts, generator=rng(ranks, experts))
    if groups:  # the groups whose best expert is best
        best = scores.reshape(4000, groups, -1).max(2).values.topk(topk_groups).indices
        allowed = torch.zeros(4000, groups, dtype=torch.bool).scatter_(1, best, True)
        scores = scores.masked_fill(~allowed.repeat_interleave(experts // groups, 1), -torch.inf)
    idx, _ = gate(scores, topk)
    in_rank = reference.layout(idx, experts, ranks).is_token_in_rank
    found = spread(Work(ranks, nodes, 4000, 512, experts, topk, groups, topk_groups))
    assert found.ranks == pytest.approx(float(in_rank.sum(1).float().mean()), rel=0.02)
    in_node = in_rank.reshape(4000, nodes, -1).any(2)
    assert found.nodes == pytest.approx(float(in_node.sum(1).float().mean()), rel=0.02)


# ---- times ----
@pytest.mark.parametrize("ranks", [16, 64, 256])
@pytest.mark.parametrize("groups", [0, 8])
def test_between_nodes_as_the_model_of_the_page(ranks: int, groups: int) -> None:
    limits = {"groups": groups, "topk_groups": groups // 2}
    found = plan(**V3, **limits, ranks=ranks, nodes=ranks // 8, mode="ht")
    work = model.Work(ranks, 4096, **limits)
    for call in ("dispatch", "combine"):
        predicted, bound = model.ht_time(work, call), bound_of(found, call)
        assert bound.resource == predicted.bound == "network"
        assert bound.network_bytes == pytest.approx(predicted.wire_bytes, rel=0.01)
        assert 0.9 * predicted.seconds < bound.seconds < predicted.seconds
    assert memory_of(found, "rings between nodes") == model.ht_bytes(work)
    assert ring_bytes(Work(8, 1, 4096, 7168, 256, 8), 14336) == 0


def test_rings_of_a_buffer_for_low_latency_calls() -> None:
    """They take num_rdma_bytes as well, a slot at most 4 MiB; few tokens leave them room for 8 rows."""
    low = plan(**V3, ranks=16, nodes=2)
    assert memory_of(low, "rings between nodes") == low.num_rdma_bytes > 800 << 20
    assert plan(**V3, ranks=16, nodes=2, mode="ll").memory[-1].name == "rings between nodes"
    large = plan(**V3, ranks=16, nodes=2, ll_tokens=1024)
    assert 256 * 4 << 20 < memory_of(large, "rings between nodes") < 257 * 4 << 20 < large.num_rdma_bytes
    few = plan(**V3, ranks=16, nodes=2, ll_tokens=1)
    rings = memory_of(plan(**V3, ranks=16, nodes=2, mode="ht"), "rings between nodes")
    assert few.num_rdma_bytes == rings == memory_of(few, "rings between nodes")


# Kernels on two H200, T=4096, uniform routes; docs/internode-times.md takes its rates from the same.
MEASURED_US = {("bf16", "dispatch"): 168.6, ("fp8", "dispatch"): 93.7, ("bf16", "combine"): 185.5}


@pytest.mark.parametrize(("dtype", "call"), MEASURED_US)
def test_bound_is_just_below_what_was_measured(dtype: str, call: str) -> None:
    found = plan(**V3, ranks=2, dtype=dtype, mode="ht")
    measured = MEASURED_US[dtype, call] * 1e-6
    assert 0.9 * measured < bound_of(found, call).seconds <= measured
    assert 12 <= found.num_sms <= 16  # 12 and 16 SMs filled the link for combine and dispatch, 8 did not


def test_more_ranks_need_fewer_sms_and_slower_ones_bound() -> None:
    assert plan(**V3, ranks=8, mode="ht").num_sms < plan(**V3, ranks=2, mode="ht").num_sms
    one = plan(**V3, ranks=1, mode="ht")
    assert one.num_sms == 8 and bound_of(one, "dispatch").resource == "SM stores"
    assert (
        plan(**V3, ranks=8, gpu="h800").bounds[0].seconds > plan(**V3, ranks=8, gpu="H200").bounds[0].seconds
    )
    slow, fast = (plan(**V3, ranks=16, nodes=2, nic_gbit=rate).bounds[0] for rate in (200, 400))
    assert slow.seconds == pytest.approx(2 * fast.seconds)


# ---- memory, against Buffers ----
SHAPE = {"hidden": 512, "num_experts": 16, "topk": 4}
TOKENS, RANKS = 640, 3


def all_to_rank_0(rank: int) -> torch.Tensor:
    return torch.rand(TOKENS, 5, generator=rng(rank)).topk(4).indices  # 6 of the 16 experts are rank 0's


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
def test_bytes_of_received_rows_and_growth(dtype: str) -> None:
    """The heap of a rank that gets every token has what the plan says, from nothing and from too little."""

    def rank_main(comm: Any, rank: int) -> Any:
        found = []
        for start in (0, 5 << 20):
            buffer = deep_moe.Buffer(None, num_nvl_bytes=start, comm=comm)
            x: Any = torch.ones(TOKENS, 512, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
            if dtype == "fp8":
                x = reference.cast_fp8(x)
            kept = buffer.dispatch(
                x, topk_idx=all_to_rank_0(rank), topk_weights=torch.ones(TOKENS, 4), num_experts=16
            )
            found.append((buffer.memory_stats(), kept[1].shape[0]))
        return found

    from_nothing, from_little = run_ranks(rank_main, RANKS)[0]
    planned = plan(**SHAPE, ranks=RANKS, tokens=TOKENS, dtype=dtype, mode="ht")
    worst = memory_of(planned, "received rows, worst")
    for (stats, rows), start in ((from_nothing, 0), (from_little, 5 << 20)):
        assert rows == planned.worst_rows == TOKENS * RANKS
        assert stats["live_bytes"] == worst
        assert stats["heap_bytes"] == heap_after(start, worst)
    assert heap_after(worst, worst) == worst < heap_after(worst - 256, worst)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_bytes_of_rows_by_expert(dtype: str) -> None:
    """Over all ranks as many rows as entries; what each rank holds for them are these tensors."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm)
        x: Any = torch.ones(TOKENS, 512, dtype=torch.bfloat16)
        x = reference.cast_fp8(x) if dtype == "fp8" else (x,)
        idx = torch.rand(TOKENS, 16, generator=rng(rank)).topk(4).indices
        rows, *ids_and_weights, _, handle, _ = buffer.dispatch(
            x if len(x) == 2 else x[0],
            topk_idx=idx,
            topk_weights=torch.ones(TOKENS, 4),
            num_experts=16,
            expert_major=True,
        )
        parts = [*(rows if isinstance(rows, tuple) else (rows,)), *ids_and_weights]
        return sum(part.nbytes for part in parts), handle.expert_rows.nbytes

    found = run_ranks(rank_main, RANKS)
    planned = plan(**SHAPE, ranks=RANKS, tokens=TOKENS, dtype=dtype, mode="ht", imbalance=1)
    entries = 4 * planned.rows * 4
    assert sum(rows for rows, _ in found) == RANKS * (memory_of(planned, "rows by expert") - entries)
    assert sum(of_entries for _, of_entries in found) == pytest.approx(RANKS * entries, rel=0.02)


def test_planned_sizes_need_no_growth() -> None:
    """Neither a dispatch with a staged combine, nor a low-latency pair."""
    planned = plan(**SHAPE, ranks=RANKS, tokens=TOKENS, ll_tokens=64, dtype="bf16")

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(
            None, planned.num_nvl_bytes, planned.num_rdma_bytes, low_latency_mode=True, comm=comm
        )
        before = buffer.memory_stats()
        idx, weights = torch.rand(TOKENS, 16, generator=rng(rank)).topk(4).indices, torch.ones(TOKENS, 4)
        x = torch.ones(TOKENS, 512, dtype=torch.bfloat16)
        sent = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=16)
        buffer.combine(sent[0].clone(), sent[4])
        low = buffer.low_latency_dispatch(x[:64], idx[:64], 64, 16, use_fp8=False)
        buffer.low_latency_combine(low[0], idx[:64], weights[:64], low[2])
        return before, buffer.memory_stats(), sent[0].shape[0]

    for before, after, rows in run_ranks(rank_main, RANKS):
        assert rows <= planned.rows
        for name in ("heap_bytes", "segments", "ll_staging_bytes"):
            assert after[name] == before[name], name
        assert before["ll_staging_bytes"] == planned.num_rdma_bytes
        assert before["heap_bytes"] >= planned.num_nvl_bytes


def test_sizes_of_the_native_module() -> None:
    assert 0 < workspace_bytes(2, False) < workspace_bytes(2, True) < workspace_bytes(64, True)
    assert received_bytes(1, 16, 0, 1) == 4 * 256  # rows, ids, weights and sources, in pieces of 256
    for arguments, name in (
        ((-1, 16, 0, 1), "num_rows"),
        ((1, 0, 0, 1), "row_bytes"),
        ((1, 16, 0, 0), "topk"),
    ):
        with pytest.raises(ValueError, match=name):
            received_bytes(*arguments)


def test_rows_that_live_longer_and_uneven_load() -> None:
    one, four = (plan(**V3, ranks=8, mode="ht", live=live) for live in (1, 4))
    received = memory_of(one, "received rows")
    assert abs(four.num_nvl_bytes - one.num_nvl_bytes - 3 * received) <= 1 << 20
    even, uneven = (plan(**V3, ranks=8, imbalance=factor).rows for factor in (1, 1.5))
    assert uneven == pytest.approx(1.5 * even, rel=1e-3)
    assert plan(**V3, ranks=2, imbalance=2).rows == 2 * 4096  # no more than there are


# ---- names and refusals ----
@pytest.mark.parametrize("shape", load_models(), ids=lambda shape: shape.name)
def test_every_model(shape: Any) -> None:
    for ranks, nodes in ((1, 1), (8, 1), (16, 2)):
        found = plan(shape.name.lower(), ranks=ranks, nodes=nodes, dtype="bf16")
        assert found == plan(shape, ranks=ranks, nodes=nodes, dtype="bf16")
        assert found.work.hidden == shape.hidden and 1 <= found.spread.ranks <= min(ranks, shape.topk)
        assert all(bound.seconds > 0 for bound in found.bounds if ranks > 1 or "low" not in bound.call)
    assert plan(shape, ranks=8, hidden=1024, dtype="bf16").work == replace(
        found.work, ranks=8, nodes=1, hidden=1024
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk": None}, "topk: missing"),
        ({"nodes": 3}, "nodes: got 3; allowed: divisors of 8"),
        ({"ranks": 0}, "ranks: got 0"),
        ({"topk": 300}, "topk: got 300; allowed: 1 to 256"),
        ({"hidden": 7200}, "hidden: got 7200; allowed: multiples of 128 with fp8"),
        ({"mode": "fast"}, "mode: got fast; allowed: ht, ll, both"),
        ({"dtype": "int4"}, "dtype: got int4"),
        ({"gpu": "Voodoo"}, "gpu: got 'Voodoo'; known are H200"),
        ({"imbalance": 0.5}, "imbalance: got 0.5"),
        ({"nic_gbit": 0}, "nic_gbit: got 0"),
        ({"groups": 7, "topk_groups": 1}, "groups: got 7; allowed: divisors of 256"),
        ({"groups": 8, "topk_groups": 9}, "topk_groups: got 9; allowed: 1 to 8"),
        ({"groups": 64, "topk_groups": 1}, "topk: got 8; allowed: 1 to 4"),
        ({"live": 0}, "live: got 0"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {**V3, "ranks": 8, **changes}
    with pytest.raises(ValueError) as refused:
        plan(**arguments)
    assert words in str(refused.value)


def test_notes() -> None:
    assert any("scaled" in note for note in plan("DBRX", ranks=8, gpu="B200").notes)
    assert any("at most 64 ranks" in note for note in plan("DBRX", ranks=128).notes)
    assert not plan("DBRX", ranks=8, dtype="bf16").notes


# ---- the command ----
def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deep_moe", "plan", *arguments], capture_output=True, text=True, timeout=120
    )


def test_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    calls = [
        line[len("$ deep-moe plan ") :] for line in page.splitlines() if line.startswith("$ deep-moe plan ")
    ]
    assert len(calls) >= 2
    for arguments in calls:
        printed = command(*arguments.split())
        assert printed.returncode == 0 and f"$ deep-moe plan {arguments}\n{printed.stdout}" in page, arguments


def test_json_has_the_same() -> None:
    done = command("Mixtral-8x7B", "--ranks", "4", "--mode", "ht", "--json")
    assert json.loads(done.stdout) == json.loads(
        json.dumps(plan("Mixtral-8x7B", ranks=4, mode="ht").to_dict())
    )


def test_wrong_arguments_end_with_2() -> None:
    done = command("DeepSeek-V33")
    assert done.returncode == 2 and "try one of: DeepSeek-V3" in done.stderr
    assert "Traceback" not in done.stderr
