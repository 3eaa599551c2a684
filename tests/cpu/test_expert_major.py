"""Rows grouped by local expert: dispatch, cached dispatch and combine against the reference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import deep_moe

from ..support.expert_major import GroupedCachedDispatch, GroupedCombine, GroupedDispatch
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import Program, check, execute, run
from ..support.ranks import run_ranks
from .test_cases_round_trip import HIGH_THROUGHPUT, two

CASES = [
    *(case for case in HIGH_THROUGHPUT if not case.name.startswith("U1")),
    two(name="U1-1-and-1500", tokens=(1, 1500)),
    two(name="mixed-and-uneven-on-three-ranks", tokens=(17, 0, 40), experts=11, routing="mixed"),
]


def program(case: Case, local_ranks: int = 0) -> Program:
    """Both ways in, with and without padding, cached, and every kind of sum; plain calls between them."""
    given = case.inputs()
    return Program(
        [
            GroupedDispatch(given),
            GroupedCombine(0),
            GroupedDispatch(given, path="v1", alignment=16, weights=False),
            GroupedCombine(2, seed=1, weights=False, row_weights=True, biases=2),
            GroupedCachedDispatch(2, case.rows(1)),
            Dispatch(given, path="fused"),
            GroupedCachedDispatch(0, case.rows(2), plain_handle=True, said=True),
            Combine(5),
            GroupedCombine(2, seed=2, row_weights=True, biases=1, out=True, strided=True),
            CachedDispatch(5, case.rows(3)),
            GroupedDispatch(given, alignment=128, asynchronous=True),
            GroupedCombine(10, seed=3, asynchronous=True),
            GroupedDispatch(given, alignment=16, worst=sum(case.tokens) + 3),
            GroupedCombine(12, seed=4, row_weights=True, biases=1),
            GroupedCachedDispatch(12, case.rows(4)),
        ],
        local_ranks=local_ranks,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case, form: str) -> None:
    run(program(case), case.ranks, form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_of_another_type(dtype: torch.dtype, form: str) -> None:
    case = two(name="types", payload="fp8")
    calls = [GroupedDispatch(case.inputs(), alignment=4), GroupedCombine(0, dtype=dtype, row_weights=True)]
    run(Program(calls), 2, form)


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_between_nodes(local_ranks: int, form: str) -> None:
    case = two(name="nodes", tokens=(9, 20, 0, 13), routing="mixed", topk=6)
    run(program(case, local_ranks), 4, form)


def test_in_a_heap_that_cannot_grow(form: str) -> None:
    """Rows come in waves, and expert-major rows and their sums find no room in the heap."""
    case = two(name="waves", tokens=(700, 500), topk=8)
    given = case.inputs()
    calls = Program([GroupedDispatch(given, alignment=8), GroupedCombine(0, row_weights=True)])

    def rank_main(comm: Any, rank: int) -> Any:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(1 << 20)
        buffer = deep_moe.Buffer(None, 256 << 10, comm=comm, timeout=10)
        comm.allgather(None)
        os.environ.pop("DEEP_MOE_MAX_HEAP_BYTES", None)
        results = execute(calls.only(rank), rank, [buffer])
        return results, buffer.memory_stats()["heap_bytes"]

    results = run_ranks(rank_main, 2, form=form)
    assert all(heap <= 1 << 20 for _, heap in results)
    check(calls, [result for result, _ in results])


def test_sizes_of_the_groups_are_what_a_grouped_gemm_takes() -> None:
    """offs of torch._grouped_mm: where each group ends, on the rows' device."""
    buffer = alone()
    idx = torch.tensor([[0, 2], [2, -1], [2, 2]])
    x = torch.arange(3, dtype=torch.float32)[:, None].expand(3, 4).contiguous()
    rows, experts, weights, sizes, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=torch.rand(3, 2), num_experts=3, expert_alignment=4, expert_major=True
    )
    assert sizes == [4, 0, 4] and handle.expert_offsets.tolist() == [0, 4, 4, 8]
    assert handle.expert_counts.tolist() == [1, 0, 4]
    assert experts.tolist() == [0, -1, -1, -1, 2, 2, 2, 2]
    assert rows[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 2, 2]
    assert weights.shape == (8,)
    assert handle.expert_rows.tolist() == [[0, 4], [5, -1], [6, 7]]
    combined, _, _ = buffer.combine(rows, handle)
    assert combined[:, 0].tolist() == [0, 1, 4]


def test_the_padding_is_zero_in_memory_that_was_used() -> None:
    buffer = alone()
    full = buffer.empty((4096, 64), torch.float32).fill_(float("nan"))
    del full
    x = torch.ones(3, 64)
    for _ in range(3):
        rows, *_ = buffer.dispatch(
            x, topk_idx=torch.tensor([[0], [1], [1]]), num_experts=2, expert_alignment=64, expert_major=True
        )
        assert rows.shape == (128, 64) and float(rows.sum()) == 3 * 64
        rows.fill_(float("nan"))
        del rows


def test_a_fixed_number_of_rows() -> None:
    """As many as could be: each entry of each row, and the padding of each group; unused ones are marked."""
    buffer = alone()
    x, idx = torch.ones(3, 8), torch.tensor([[0, 2], [2, -1], [2, 2]])
    rows, experts, weights, sizes, handle, _ = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=torch.rand(3, 2),
        num_experts=3,
        num_worst_tokens=5,
        expert_alignment=4,
        expert_major=True,
    )
    assert sizes == [] and len(rows) == len(experts) == len(weights) == 20  # 5 * 2 + 3 * 3, aligned
    assert handle.expert_offsets.tolist() == [0, 4, 4, 8] and handle.expert_counts.tolist() == [1, 0, 4]
    assert experts.tolist() == [0, -1, -1, -1, 2, 2, 2, 2] + [-1] * 12
    assert handle.expert_rows.tolist() == [[0, 4], [5, -1], [6, 7], [-1, -1], [-1, -1]]
    assert not weights[8:].any()
    rows[8:] = float("nan")
    assert buffer.combine(rows, handle)[0][:, 0].tolist() == [2, 1, 2]
    again = buffer.dispatch(2 * x, handle=handle, num_worst_tokens=5)[0]
    assert again.shape == rows.shape and torch.equal(again[:8], 2 * rows[:8])


def test_each_rank_may_choose_for_itself(form: str) -> None:
    given = two(name="choice").inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
        rows, *_, handle, _ = buffer.dispatch(
            given.x[rank], topk_idx=given.topk_idx[rank], num_experts=16, expert_major=rank == 1
        )
        return len(rows), buffer.combine(torch.ones_like(rows), handle)[0]

    (plain, first), (grouped, second) = run_ranks(rank_main, 2, form=form)
    for rank, combined in enumerate((first, second)):
        idx = given.topk_idx[rank]
        wanted = (idx < 8).any(1).float() + (idx >= 8).sum(1)
        assert torch.equal(combined[:, 0].float(), wanted)
    entries = sum(int((idx >= 8).sum()) for idx in given.topk_idx)
    assert grouped == entries and plain == sum(int((idx < 8).any(1).sum()) for idx in given.topk_idx)


# ---- what is refused: on the rank itself, and so that its peers learn of it ----
def alone() -> deep_moe.Buffer:
    return deep_moe.Buffer(None, comm=deep_moe.thread_comms(1)[0], device="cpu")


def routed(buffer: deep_moe.Buffer, **more: Any) -> Any:
    return buffer.dispatch(torch.ones(2, 8), topk_idx=torch.tensor([[0], [1]]), num_experts=2, **more)


def test_what_dispatch_refuses() -> None:
    buffer = alone()
    plain = routed(buffer)[4]
    grouped = routed(buffer, expert_major=True)[4]
    with pytest.raises(
        ValueError, match="num_worst_tokens: got 2147483646, with expert_major 6442450941 rows"
    ):
        routed(buffer, expert_major=True, num_worst_tokens=2**31 - 2, expert_alignment=2**31 - 1)
    counts = buffer.get_dispatch_layout(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match="expert_major: got True without topk_idx"):
        buffer.dispatch(torch.ones(2, 8), None, counts[0], None, counts[3], counts[2], expert_major=True)
    with pytest.raises(ValueError, match="expert_major: got True with the handle of a dispatch that was not"):
        buffer.dispatch(torch.ones(2, 8), handle=plain, expert_major=True)
    with pytest.raises(ValueError, match="num_worst_tokens: got 3, expected 0 or the handle's 2"):
        buffer.dispatch(torch.ones(2, 8), handle=grouped, num_worst_tokens=3)
    assert len(routed(buffer, expert_major=True)[0]) == 2


def test_what_combine_refuses() -> None:
    buffer = alone()
    plain = routed(buffer)[4]
    rows, _, _, _, handle, _ = routed(buffer, expert_major=True, expert_alignment=2)
    assert len(rows) == 4
    with pytest.raises(ValueError, match=r"x: got .*\[2, 8\].*, expected \[4, hidden\]"):
        buffer.combine(rows[:2], handle)
    with pytest.raises(ValueError, match=r"row_weights: got .*none but with the handle of an expert-major"):
        buffer.combine(rows[:2], plain, row_weights=torch.ones(2))
    with pytest.raises(ValueError, match=r"row_weights: got .*\[3\].*float32 \[4\]"):
        buffer.combine(rows, handle, row_weights=torch.ones(3))
    with pytest.raises(TypeError, match="row_weights: got float64"):
        buffer.combine(rows, handle, row_weights=torch.ones(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"topk_weights: got .*\[4, 1\]"):
        buffer.combine(rows, handle, topk_weights=torch.ones(4, 1))
    with pytest.raises(ValueError, match="contiguous"):
        buffer.combine(rows, handle, row_weights=torch.ones(8)[::2])
    with pytest.raises(TypeError, match="handle must be what the dispatch returned"):
        buffer.combine(rows, handle[:-2])
    with pytest.raises(ValueError, match="handle: got expert parts of another handle"):
        buffer.combine(rows, (*handle[:-1], plain.meta))
    with pytest.raises(ValueError, match=r"handle\.expert_rows"):
        buffer.combine(rows, handle._replace(expert_rows=handle.expert_rows[:1]))
    with pytest.raises(ValueError, match=r"handle\.expert_offsets"):
        buffer.combine(rows, handle._replace(expert_offsets=handle.expert_offsets[1:]))
    assert torch.equal(buffer.combine(rows, handle)[0], torch.ones(2, 8))
