"""The low-latency mode beyond plain exchanges: hooks, statistics, masks of ranks, codes, zero copy."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.attempts import attempt, good_program
from ..support.compare import one_rounding, same_bits, same_values, within
from ..support.device import where
from ..support.inputs import Case
from ..support.low_latency import (
    LOGFMT_RELATIVE_ERROR,
    LOGFMT_SMALLEST,
    LowLatencyCombine,
    LowLatencyDispatch,
)
from ..support.program import Program, check, execute, packed, run
from ..support.ranks import run_ranks

CASE = Case("low", (12, 9), hidden=512, experts=8)
GIVEN = CASE.inputs()
THREE = Case("three", (6, 8, 5), hidden=256, experts=9)


def inputs_of(buffer: deep_moe.Buffer, given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows, ids and weights, on the Buffer's device."""
    mine = given.x[buffer.rank], given.topk_idx[buffer.rank], given.topk_weights[buffer.rank]
    x, idx, weights = (where(buffer, one) for one in mine)
    return x, idx, weights


def wait_for_calls(buffer: deep_moe.Buffer) -> None:
    """Until the calls so far are over; on the CPU they are."""
    if buffer.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def send(buffer: deep_moe.Buffer, given: Any, **options: Any) -> Any:
    x, idx, _ = inputs_of(buffer, given)
    return buffer.low_latency_dispatch(x, idx, 12, given.experts, use_fp8=False, **options)


# ---- hooks ----
def test_send_half_does_not_wait_for_a_late_peer(form: str) -> None:
    """With a hook the calls return while rank 1 still sleeps; the hook is what waits."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        execute(good_program(), rank, [buffer])  # the staging is there from now on
        seconds = []
        first = send(buffer, GIVEN)
        _, idx, weights = inputs_of(buffer, GIVEN)
        comm.allgather(None)
        for call in (
            lambda: send(buffer, GIVEN, return_recv_hook=True),
            lambda: buffer.low_latency_combine(first[0], idx, weights, first[2], return_recv_hook=True),
        ):
            if rank == 1:
                time.sleep(1.5)
            sent = attempt(call)
            received = attempt(sent.value[4 if len(sent.value) == 5 else 2])
            seconds.append((sent.seconds, received.seconds))
            comm.allgather(None)
        return seconds

    (early, _) = run_ranks(rank_main, 2, form=form)
    for send_seconds, receive_seconds in early:
        assert send_seconds < 0.7 < receive_seconds, early


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("flying", [1, 2, 3])
def test_hooks_are_called_in_any_order(flying: int, newest_first: bool, form: str) -> None:
    """Up to three calls of different shapes in flight, received oldest or newest first."""
    cases = [Case(str(n), (5 + n, 4), hidden=128 * (n + 1), experts=6 + n) for n in range(flying)]
    calls = [LowLatencyDispatch(case.inputs(), 8 + 2 * n, hook="late") for n, case in enumerate(cases)]
    run(Program(calls, newest_hook_first=newest_first), 2, form)


def test_combine_is_deferred_while_the_next_dispatch_is_sent(form: str) -> None:
    """The pipeline of two micro-batches: a dispatch and a combine of the other one in flight together."""
    calls: list[Any] = [LowLatencyDispatch(GIVEN, 12, hook="late")]
    for step in range(6):
        calls.append(LowLatencyDispatch(CASE.but(seed=step).inputs(), 12, hook="late"))
        calls.append(LowLatencyCombine(max(0, 2 * step - 1), seed=step, hook="late"))
    run(Program(calls), 2, form)


def test_inputs_may_change_between_the_call_and_its_hook(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        x, idx, weights = (one.clone() for one in inputs_of(buffer, GIVEN))
        same_idx = idx.clone()
        low = buffer.low_latency_dispatch(x, idx, 12, 8, use_fp8=False, return_recv_hook=True)
        x.fill_(float("nan"))
        idx.fill_(-1)
        low[4]()
        y = low[0].clone()
        rows = packed(y, low[1])
        back = buffer.low_latency_combine(y, same_idx, weights, low[2], return_recv_hook=True)
        y.fill_(float("nan"))
        back[2]()
        return rows, low[1], back[0]

    received = reference.low_latency_dispatch(GIVEN.x, GIVEN.topk_idx, 12, 8, use_fp8=False)
    y = [one.x for one in received if isinstance(one.x, torch.Tensor)]
    sums = reference.low_latency_combine(y, GIVEN.topk_idx, GIVEN.topk_weights, 8, pre_reduced=False)
    for rank, (rows, count, combined) in enumerate(run_ranks(rank_main, 2, form=form)):
        same_bits(count, received[rank].count, f"rank {rank}, counts")
        same_bits(rows, packed(y[rank], count), f"rank {rank}, rows")
        same_values(combined, sums[rank], f"rank {rank}, sums")


def test_handle_may_come_back_as_a_plain_tuple(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        low = send(buffer, GIVEN)
        _, idx, weights = inputs_of(buffer, GIVEN)
        first = buffer.low_latency_combine(low[0], idx, weights, low[2])[0]
        return torch.equal(first, buffer.low_latency_combine(low[0], idx, weights, tuple(low[2]))[0])

    assert run_ranks(rank_main, 2, form=form) == [True, True]


# ---- statistics ----
def test_waits_are_charged_to_the_rank_waited_for(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        execute(good_program(), rank, [buffer])
        costs = [where(buffer, torch.full((2,), 5, dtype=torch.int64)) for _ in range(2)]
        low = send(buffer, GIVEN)
        _, idx, weights = inputs_of(buffer, GIVEN)
        for which in range(2):
            comm.allgather(None)
            if rank == 1:
                time.sleep(0.4)
            if which == 0:
                low = send(buffer, GIVEN, dispatch_wait_recv_cost_stats=costs[0])
            else:
                buffer.low_latency_combine(
                    low[0], idx, weights, low[2], combine_wait_recv_cost_stats=costs[1]
                )
            wait_for_calls(buffer)
        return costs

    early, late = run_ranks(rank_main, 2, form=form)
    for cost in early:
        assert 2e8 < int(cost[1]) < 3e9 and 5 <= int(cost[0]) < 1e8, early
    for cost in late:
        assert 5 <= int(cost[0]) < 2e8, late


# ---- masks of ranks ----
MASKS = {
    "update": lambda buffer: buffer.low_latency_update_mask_buffer(1, True),
    "query": lambda buffer: buffer.low_latency_query_mask_buffer(
        torch.zeros(2, dtype=torch.int32, device=buffer.device)
    ),
    "clean": lambda buffer: buffer.low_latency_clean_mask_buffer(),
}


@pytest.mark.parametrize("call", MASKS)
def test_masks_need_enable_shrink(call: str, form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        return attempt(lambda: MASKS[call](buffer))

    for tried in run_ranks(rank_main, 2, form=form):
        tried.must_be(ValueError, "enable_shrink")


def masked_exchange(buffer: deep_moe.Buffer, given: Any) -> Any:
    low = send(buffer, given)
    _, idx, weights = inputs_of(buffer, given)
    combined = buffer.low_latency_combine(low[0], idx, weights, low[2])[0]
    mask = torch.full((3,), 9, dtype=torch.int32, device=buffer.device)
    buffer.low_latency_query_mask_buffer(mask)
    return packed(low[0], low[1]), low[1], combined, mask.tolist()


def check_masked(results: list[Any], masked: set[int], pre_reduced: bool = True) -> None:
    """The rows of masked ranks are missing, and so is their part of the sums."""
    given = THREE.inputs()
    received = reference.low_latency_dispatch(given.x, given.topk_idx, 12, 9, use_fp8=False, masked=masked)
    y = [one.x for one in received if isinstance(one.x, torch.Tensor)]
    sums = reference.low_latency_combine(
        y, given.topk_idx, given.topk_weights, 9, pre_reduced=pre_reduced, masked=masked
    )
    for rank in sorted({0, 1, 2} - masked):
        rows, count, combined, mask = results[rank]
        same_bits(count, received[rank].count, f"rank {rank}, counts")
        same_bits(rows, packed(y[rank], count), f"rank {rank}, rows")
        same_values(combined, sums[rank], f"rank {rank}, sums")
        assert mask == [int(one in masked) for one in range(3)]


def test_masked_rank_is_left_out(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=5, enable_shrink=True)
        whole = masked_exchange(buffer, THREE.inputs())
        if rank == 2:
            return whole, None
        buffer.low_latency_update_mask_buffer(2, True)
        return whole, masked_exchange(buffer, THREE.inputs())

    results = run_ranks(rank_main, 3, form=form)
    check_masked([whole for whole, _ in results], set())
    check_masked([part for _, part in results], {2})


def test_silent_rank_is_masked_instead_of_a_failure(form: str) -> None:
    """After the time-out the others go on without it and do not wait again; all ranks together unmask it."""

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=1.0, enable_shrink=True)
        masked_exchange(buffer, THREE.inputs())
        comm.allgather(None)
        tried = [attempt(lambda: masked_exchange(buffer, THREE.inputs())) for _ in range(2 * (rank != 2))]
        comm.allgather(None)
        buffer.low_latency_clean_mask_buffer()
        return tried, masked_exchange(buffer, THREE.inputs())

    results = run_ranks(rank_main, 3, form=form)
    for which in range(2):
        attempts = [tried[which] if tried else None for tried, _ in results]
        assert all(one is None or one.error is None for one in attempts), attempts
        check_masked([one and one.value for one in attempts], {2})
    for tried, _ in results[:2]:
        assert tried[0].seconds > 0.8 > tried[1].seconds, tried
    check_masked([whole for _, whole in results], set())


# ---- what combine sends ----
@pytest.mark.parametrize("hook", ["none", "now"])
def test_logarithmic_codes_keep_zeros_signs_and_magnitudes(hook: str, form: str) -> None:
    """Every token has one expert and weight 1, so each result is one row decoded."""
    case = Case("codes", (12, 12), hidden=512, experts=4, topk=1)
    given = case.inputs()
    octaves = torch.linspace(-20, 4, 512)

    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        low = send(buffer, given)
        _, idx, weights = inputs_of(buffer, given)
        y = (low[0].float().sign() * 2.0 ** where(buffer, octaves)).bfloat16()
        y[..., ::7] = 0.0
        y[..., 128:256] = 0.0
        options: dict[str, Any] = {"use_logfmt": True, "return_recv_hook": hook == "now"}
        combined, _, receive = buffer.low_latency_combine(y, idx, torch.ones_like(weights), low[2], **options)
        if receive is not None:
            receive()
        return combined

    for rank, combined in enumerate(run_ranks(rank_main, 2, form=form)):
        want = (given.x[rank].float().sign() * 2.0**octaves).bfloat16()
        want[:, ::7] = 0.0
        want[:, 128:256] = 0.0
        assert torch.equal(combined == 0, want == 0) and torch.equal(combined.sign(), want.sign())
        magnitude = want.float().abs()
        largest = magnitude.unflatten(1, (-1, 128)).amax(-1).repeat_interleave(128, 1)
        allowed = magnitude * LOGFMT_RELATIVE_ERROR + largest * LOGFMT_SMALLEST
        within(combined, want, allowed + 3 * one_rounding(torch.bfloat16, magnitude), f"rank {rank}")
        error = ((combined.float() - want.float()).abs() / magnitude)[magnitude > 0]
        assert float(error.mean()) < LOGFMT_RELATIVE_ERROR / 2, float(error.mean())


def test_zero_copy_input_is_an_ordinary_tensor(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        low = send(buffer, GIVEN)
        one = buffer.get_next_low_latency_combine_buffer(low[2])
        form = tuple(one.shape), one.dtype
        one.copy_(low[0])
        _, idx, weights = inputs_of(buffer, GIVEN)
        sums = [
            buffer.low_latency_combine(one, idx, weights, low[2], zero_copy=True)[0],
            buffer.low_latency_combine(low[0], idx, weights, low[2])[0],
        ]
        kept = torch.equal(packed(one, low[1]), packed(low[0], low[1]))
        return form, torch.equal(*sums), kept

    for shape, equal, kept in run_ranks(rank_main, 2, form=form):
        assert shape == ((4, 24, 512), torch.bfloat16) and equal and kept


def test_caps_shapes_and_modes_change_on_one_buffer(form: str) -> None:
    calls: list[Any] = []
    for cap, hidden, experts, topk in ((12, 512, 8, 4), (40, 128, 5, 2), (12, 2048, 16, 8), (200, 256, 8, 1)):
        case = CASE.but(hidden=hidden, experts=experts, topk=topk)
        calls += [
            LowLatencyDispatch(case.inputs(), cap, use_fp8=hidden != 256),
            LowLatencyCombine(len(calls)),
        ]
    run(Program(calls), 2, form)


def test_clean_is_accepted_at_any_time(form: str) -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        buffer.clean_low_latency_buffer(16, 256, 8)
        good = execute(good_program(), rank, [buffer])
        buffer.clean_low_latency_buffer(16, 256, 8)
        wrong = attempt(lambda: buffer.clean_low_latency_buffer(-1, 256, 8))
        return good, execute(good_program(), rank, [buffer]), wrong

    results = run_ranks(rank_main, 2, form=form)
    check(good_program(), [first for first, _, _ in results])
    check(good_program(), [second for _, second, _ in results])
    for _, _, wrong in results:
        wrong.must_be(ValueError, "num_max_dispatch_tokens_per_rank")
