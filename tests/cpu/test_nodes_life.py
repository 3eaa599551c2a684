"""Between nodes: which ranks form one, what the rings take, and what goes wrong."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.attempts import Attempt, attempt, good_program, words
from ..support.device import where
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import Program, check, cut_into_nodes, execute
from ..support.ranks import run_ranks
from .test_failures import fused


# ---- topology ----
def outcomes(ranks: int, environment: Any, options: dict[str, Any] | None = None) -> list[Attempt]:
    """A Buffer and a good exchange on every rank; the variables are of its process."""

    def rank_main(comm: Any, rank: int) -> Any:
        os.environ.update(environment(rank))

        def use() -> Any:
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20, **(options or {}))
            where = buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()
            return where, execute(good_program(ranks), rank, [buffer])

        return attempt(use)

    result: list[Attempt] = run_ranks(rank_main, ranks)
    return result


def all_raise(tried: list[Attempt], *patterns: str) -> None:
    for one in tried:
        one.must_be(ValueError, *patterns)
    assert len({str(one.error) for one in tried}) == 1, "ranks disagree about what is wrong"


@pytest.mark.parametrize("local_ranks", [1, 2, 3, 4, 6, 8])
def test_local_ranks_cut_a_host(local_ranks: int) -> None:
    tried = outcomes(6, lambda rank: {"DEEP_MOE_LOCAL_RANKS": str(local_ranks)})
    if 6 % min(local_ranks, 6):
        all_raise(tried, r"nodes of 4, 2\b", "DEEP_MOE_LOCAL_RANKS=4")
        return
    for rank, one in enumerate(tried):
        assert one.error is None, one
        assert one.value[0] == (6 // min(local_ranks, 6), rank // min(local_ranks, 6))
    check(replace(good_program(6), local_ranks=min(local_ranks, 6)), [one.value[1] for one in tried])


@pytest.mark.parametrize("wrong", ["0", "-2", "two", "2.5", "99999999999"])
def test_local_ranks_that_are_no_number_of_ranks(wrong: str) -> None:
    tried = outcomes(2, lambda rank: {"DEEP_MOE_LOCAL_RANKS": wrong})
    all_raise(tried, "DEEP_MOE_LOCAL_RANKS", re.escape(wrong))


def test_local_ranks_that_differ() -> None:
    tried = outcomes(4, lambda rank: {"DEEP_MOE_LOCAL_RANKS": "2"} if rank < 3 else {})
    all_raise(tried, "DEEP_MOE_LOCAL_RANKS", *words(2, 3, 0))


def test_uneven_nodes_are_refused_everywhere() -> None:
    tried = outcomes(4, lambda rank: {"DEEP_MOE_NODE": "a" if rank < 3 else "b"})
    all_raise(tried, "equally many", r"nodes of 3, 1\b")


def test_machines_are_refused_on_the_cpu() -> None:
    """With DEEP_MOE_HOST_ID ranks share nothing with those of another name."""
    tried = outcomes(4, lambda rank: {"DEEP_MOE_HOST_ID": "ab"[rank // 2]})
    for rank, one in enumerate(tried):
        one.must_be(deep_moe.Error, "one machine only", *words(rank, 0 if rank > 1 else 2))
    assert all(one.error is None for one in outcomes(2, lambda rank: {"DEEP_MOE_HOST_ID": "same"}))


@pytest.mark.parametrize("order", ["abab", "abba", "baab"])
def test_ranks_in_any_order_over_the_nodes(order: str, form: str = "process") -> None:
    """Not node after node: tables say who is where. Sums follow the nodes."""
    nodes = [order.index(name) != 0 for name in order]
    given = Case("order", (25, 31, 17, 40), topk=6, experts=12).inputs()
    back = Combine(0, biases=1)
    calls: list[Any] = [Dispatch(given, path="fused"), back, CachedDispatch(0, given.case.rows(1))]

    def rank_main(comm: Any, rank: int) -> Any:
        os.environ["DEEP_MOE_NODE"] = order[rank]
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        assert (buffer.runtime.get_num_rdma_ranks(), buffer.runtime.get_rdma_rank()) == (2, int(nodes[rank]))
        per_node = buffer.get_dispatch_layout(where(buffer, given.topk_idx[rank]), 12)[1]
        return per_node, execute(Program(calls), rank, [buffer])

    results = run_ranks(rank_main, 4, form=form)
    in_rank = [reference.layout(idx, 12, 4).is_token_in_rank for idx in given.topk_idx]
    received = reference.dispatch(given.x, given.topk_idx, 12, given.topk_weights)
    y = [back.rows(rank, one.num_rows, 512, torch.bfloat16) for rank, one in enumerate(received)]
    bias = [back.bias(rank, len(in_rank[rank]), 512, torch.bfloat16) for rank in range(4)]
    weights = [one.topk_weights for one in received if one.topk_weights is not None]
    sums = reference.combine(y, in_rank, weights, bias, nodes=[int(node) for node in nodes])
    again = reference.dispatch_cached(given.case.rows(1), in_rank)
    for rank, (per_node, (sent, combined, cached)) in enumerate(results):
        assert torch.equal(per_node, reference.num_tokens_per_node(in_rank[rank], [int(n) for n in nodes]))
        assert torch.equal(sent["x"], received[rank].x) and torch.equal(sent["idx"], received[rank].topk_idx)
        assert torch.equal(combined["x"], sums[rank][0]) and torch.equal(combined["weights"], sums[rank][1])
        assert torch.equal(cached["x"], again[rank])


# ---- sizes ----
def test_rows_wider_than_a_slot_name_the_bytes(form: str) -> None:
    """Refused on every rank before anything moves; narrower rows work, and wide ones with those bytes."""
    wide, narrow = (Case("", (9, 6), hidden=h, experts=8, topk=3).inputs() for h in (8192, 64))

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 1):
            buffer = deep_moe.Buffer(None, num_rdma_bytes=1 << 20, comm=comm, timeout=20)
        tried = attempt(lambda: fused(buffer, wide))
        good = fused(buffer, narrow)[0]
        wanted = int(re.search(r"num_rdma_bytes=(\d+)", str(tried.error)).group(1))  # type: ignore[union-attr]
        with cut_into_nodes(comm, 1):
            larger = deep_moe.Buffer(None, num_rdma_bytes=wanted, comm=comm, timeout=20)
        return tried, good, fused(larger, wide)[0]

    results = run_ranks(rank_main, 2, form=form)
    for rank, (tried, good, rows) in enumerate(results):
        tried.must_be(deep_moe.BufferTooSmallError, "dispatch", "16[0-9]{3} bytes", "num_rdma_bytes=[0-9]+")
        for got, given in ((good, narrow), (rows, wide)):
            want = reference.dispatch(given.x, given.topk_idx, 8, given.topk_weights)[rank].x
            assert torch.equal(got, want)


def test_the_largest_num_rdma_bytes_counts(form: str) -> None:
    """Slots are as wide on all ranks, so that a row fits all rings or none."""
    given = Case("largest", (9, 6), hidden=8192, experts=8, topk=3).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 1):
            buffer = deep_moe.Buffer(None, num_rdma_bytes=(1 << 20, 32 << 20)[rank], comm=comm, timeout=20)
        return execute(Program([Dispatch(given, path="fused"), Combine(0)]), rank, [buffer])

    program = Program([Dispatch(given, path="fused"), Combine(0)], local_ranks=1)
    check(program, run_ranks(rank_main, 2, form=form))


@pytest.mark.parametrize("hidden", [1024, 7168])
@pytest.mark.parametrize("payload", ["plain", "fp8"])
def test_size_hint_is_enough(hidden: int, payload: str) -> None:
    """The wide rows of the hint fit, as they are and as fp8 with scales."""
    given = Case("hint", (20, 11), hidden=hidden, experts=8, topk=8, payload=payload).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 1):
            hint = deep_moe.Buffer.get_dispatch_config(2).get_rdma_buffer_size_hint(2 * hidden, 2)
            buffer = deep_moe.Buffer(None, num_rdma_bytes=hint, comm=comm, timeout=20)
        return hint, buffer.num_rdma_bytes, execute(Program([Dispatch(given), Combine(0)]), rank, [buffer])

    results = run_ranks(rank_main, 2, form="thread")
    check(Program([Dispatch(given), Combine(0)], local_ranks=1), [one for _, _, one in results])
    for hint, kept, _ in results:
        assert kept == hint and 2 * 128 * 8 * 2 * hidden < hint < 3 * 128 * 8 * 2 * hidden + (4 << 20)


def test_size_hint_without_several_nodes_is_nothing() -> None:
    config = deep_moe.Config()
    assert [config.get_rdma_buffer_size_hint(14336, ranks) for ranks in (1, 2, 8)] == [0, 0, 0]
    assert 0 < config.get_rdma_buffer_size_hint(14336, 16) < config.get_rdma_buffer_size_hint(14336, 512)


# ---- failures ----
def test_handles_of_other_nodes_are_refused(form: str) -> None:
    given = Case("other", (9, 6), experts=8, topk=3).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        plain = deep_moe.Buffer(None, comm=comm, timeout=20)
        with cut_into_nodes(comm, 1):
            rails = deep_moe.Buffer(None, comm=comm, timeout=20)
        on_one, between = fused(plain, given), fused(rails, given)
        tried = [
            attempt(lambda: rails.combine(on_one[0], on_one[4])),
            attempt(lambda: plain.combine(between[0], between[4])),
            attempt(lambda: rails.combine(between[0], (*between[4][:6], between[4][6][1:], between[4][7]))),
        ]
        return tried, torch.equal(
            rails.combine(between[0], between[4])[0], plain.combine(on_one[0], on_one[4])[0]
        )

    for tried, _ in run_ranks(rank_main, 2, form=form):
        tried[0].must_be(TypeError, "handle", *words(8))
        tried[1].must_be(ValueError, "handle", "2 nodes", "1 nodes")  # as many as one of rows by expert has
        tried[2].must_be(ValueError, "send_nvl_index")


def test_layout_of_other_nodes_is_refused(form: str) -> None:
    given = Case("layout", (9, 6), experts=8, topk=3).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 1):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        x, idx = given.x[rank], given.topk_idx[rank]
        wrong = torch.zeros(3, dtype=torch.int32)
        tried = attempt(
            lambda: buffer.dispatch(x, topk_idx=idx, num_experts=8, num_tokens_per_rdma_rank=wrong)
        )
        return tried, execute(good_program(), rank, [buffer])

    results = run_ranks(rank_main, 2, form=form)
    for tried, _ in results:
        tried.must_be(ValueError, "num_tokens_per_rdma_rank", *words(2))
    check(replace(good_program(), local_ranks=1), [good for _, good in results])


@pytest.mark.parametrize("late", ["dispatch", "combine"])
def test_a_late_rank_fails_all_and_reset_mends(late: str, form: str) -> None:
    """Rank 3 does not come; the rings begin anew in the next generation, whatever was left in them."""
    case = Case("late", (60, 50, 40, 30), topk=6)
    given = case.inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 2):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=0.6)
        sent = fused(buffer, given)
        comm.allgather(None)
        if rank == 3:
            time.sleep(1.5)
        call = (
            (lambda: fused(buffer, given))
            if late == "dispatch"
            else (lambda: buffer.combine(sent[0], sent[4]))
        )
        tried = attempt(call)
        tried.value = None
        comm.allgather(None)
        buffer.reset()
        return tried, execute(good_program(4), rank, [buffer])

    results = run_ranks(rank_main, 4, form=form)
    for tried, _ in results[:3]:
        tried.must_be(deep_moe.DeepMoeTimeoutError, r"rank 3\b", late)
    check(replace(good_program(4), local_ranks=2), [good for _, good in results])


def test_a_refusal_leaves_the_rings_in_step(form: str) -> None:
    """Calls that one rank refuses use no slots: the next ones find both ends at the same chunk."""
    given = Case("refused", (40, 30, 20, 10), topk=6).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 2):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        tried = []
        for bad in range(4):
            if rank == bad:
                x, idx = where(buffer, given.x[rank]), where(buffer, given.topk_idx[rank])
                tried.append(attempt(lambda: buffer.dispatch(x, topk_idx=idx)))  # noqa: B023
            else:
                tried.append(attempt(lambda: fused(buffer, given)))
            fused(buffer, given)
        return tried, execute(good_program(4), rank, [buffer])

    results = run_ranks(rank_main, 4, form=form)
    for rank, (tried, _) in enumerate(results):
        for bad, one in enumerate(tried):
            one.must_be(ValueError if rank == bad else deep_moe.PeerRefusedError, "num_experts")
    check(replace(good_program(4), local_ranks=2), [good for _, good in results])


def test_too_few_worst_tokens_are_refused_everywhere(form: str) -> None:
    given = Case("worst", (40, 30, 20, 10), topk=6).inputs()

    def rank_main(comm: Any, rank: int) -> Any:
        with cut_into_nodes(comm, 2):
            buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        x, idx = where(buffer, given.x[rank]), where(buffer, given.topk_idx[rank])

        def send() -> None:
            buffer.dispatch(x, topk_idx=idx, num_experts=16, num_worst_tokens=5)
            if x.is_cuda:  # the host has not waited for the counts
                torch.cuda.current_stream().synchronize()
                buffer.check()

        tried = attempt(send)
        return tried, execute(good_program(4), rank, [buffer])

    results = run_ranks(rank_main, 4, form=form)
    for tried, _ in results:
        tried.must_be(ValueError, "num_worst_tokens", *words(5))
    check(replace(good_program(4), local_ranks=2), [good for _, good in results])
