"""The low-latency mode on a GPU: hooks, streams, statistics, staging; as on the CPU, and more."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..cpu import test_low_latency as on_cpus
from ..cpu.test_low_latency import CASE, GIVEN, inputs_of, send
from ..support.attempts import attempt, good_program, words
from ..support.compare import same_bits, same_values
from ..support.gpu import ONE, World, on_gpu, side_stream
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case, Inputs
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import BufferOptions, Call, Program, check, execute, packed, run

pytestmark = pytest.mark.gpus(1)

THREADS = "gpu thread"
TWO = World("thread", 2)
COUNTS = [World("thread", ranks) for ranks in (1, 2, 3, 4, 8)] + [World("process", ranks) for ranks in (2, 4)]
LATE = 20_000_000  # clock cycles, some 10 ms
MIB = 1 << 20


# ---- as on the CPU ----
def test_send_half_does_not_wait_for_a_late_peer() -> None:
    """On a GPU no call waits: what takes until rank 1 comes is the work of the hook."""

    results = TWO.run(job_late_peer, None)
    for sent, received in results[0]:
        assert sent < 0.25 < received, results


def job_late_peer(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    execute(good_program(), rank, [buffer])
    first = send(buffer, GIVEN)
    _, idx, weights = inputs_of(buffer, GIVEN)
    stream = torch.cuda.current_stream()
    seconds = []
    for which in range(2):
        stream.synchronize()
        comm.allgather(None)
        if rank == 1:
            torch.cuda._sleep(LATE * 40)
        hook = []
        calls = [
            lambda: send(buffer, GIVEN, return_recv_hook=True)[4],
            lambda: buffer.low_latency_combine(first[0], idx, weights, first[2], return_recv_hook=True)[2],
        ]
        sent = attempt(lambda: (hook.append(calls[which]()), stream.synchronize()))  # noqa: B023
        received = attempt(lambda: (hook[0](), stream.synchronize()))  # noqa: B023
        assert sent.error is None and received.error is None, (sent, received)
        seconds.append((sent.seconds, received.seconds))
    return seconds


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("flying", [1, 2, 3])
def test_hooks_are_called_in_any_order(flying: int, newest_first: bool, form: str) -> None:
    on_cpus.test_hooks_are_called_in_any_order(flying, newest_first, form)


def test_combine_is_deferred_while_the_next_dispatch_is_sent(form: str) -> None:
    on_cpus.test_combine_is_deferred_while_the_next_dispatch_is_sent(form)


def test_inputs_may_change_between_the_call_and_its_hook() -> None:
    on_cpus.test_inputs_may_change_between_the_call_and_its_hook(THREADS)


def test_handle_may_come_back_as_a_plain_tuple() -> None:
    on_cpus.test_handle_may_come_back_as_a_plain_tuple(THREADS)


def test_waits_are_charged_to_the_rank_waited_for() -> None:
    on_cpus.test_waits_are_charged_to_the_rank_waited_for(THREADS)


def test_zero_copy_input_is_an_ordinary_tensor() -> None:
    on_cpus.test_zero_copy_input_is_an_ordinary_tensor(THREADS)


def test_caps_shapes_and_modes_change_on_one_buffer(form: str) -> None:
    on_cpus.test_caps_shapes_and_modes_change_on_one_buffer(form)


def test_clean_is_accepted_at_any_time() -> None:
    on_cpus.test_clean_is_accepted_at_any_time(THREADS)


# ---- ranks, modes, repeats ----
def every_kind(ranks: int) -> Program:
    """Both modes by turns, all payloads, with and without hooks, nothing cleaned in between."""
    case = Case("every", tuple((7 * rank + 3) % 11 for rank in range(ranks)), hidden=512, experts=25, topk=6)
    given = case.inputs()
    calls: list[Call] = []
    for turn, payload in enumerate(("plain", "fp8", "ue8m0", "opaque")):
        other = case.but(payload=payload, seed=turn, dtype=torch.float16 if turn % 2 else torch.bfloat16)
        at = len(calls)
        calls += [
            LowLatencyDispatch(other.inputs(), 11 + turn, hook="late", weights=turn % 2 == 0),
            Dispatch(given, path="fused"),
            Combine(at + 1, seed=turn),
            LowLatencyCombine(at, seed=turn, hook="late", out=turn % 2 == 1),
            LowLatencyDispatch(given, 11, use_fp8=True, use_ue8m0=turn == 1, round_scale=turn == 2),
            LowLatencyCombine(at + 4, zero_copy=True),
            LowLatencyCombine(at + 4, seed=turn, logfmt=True, hook=("none", "now")[turn % 2], out=turn > 1),
            CachedDispatch(at + 1, case.rows(turn)),
        ]
    return Program(calls)


@pytest.mark.parametrize("world", COUNTS, ids=str)
def test_rank_counts_and_modes_on_one_buffer(world: World) -> None:
    world.run_program(every_kind(world.ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_repeat(ranks: int) -> None:
    """Bit for bit: once more, and between processes."""
    program = every_kind(ranks)
    worlds = [World("thread", ranks)] * 2 + ([World("process", 2)] if ranks == 2 else [])
    first, *others = (world.run_program(program) for world in worlds)
    for other in others:
        for rank, (calls, again) in enumerate(zip(first, other, strict=True)):
            for call, (one, two) in enumerate(zip(calls, again, strict=True)):
                if isinstance(program.calls[call], LowLatencyCombine):
                    same_bits(one["x"], two["x"], f"rank {rank}, call {call}")


def test_many_calls_reuse_the_memory() -> None:
    """Sixty exchanges of the same shape hold no more memory than the first few."""
    for early, late in TWO.run(job_memory, None):
        assert late["heap_bytes"] == early["heap_bytes"] and late["segments"] == early["segments"]
        assert late["ll_staging_bytes"] == early["ll_staging_bytes"] > 0


def job_memory(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    given = Case("memory", (40, 30), hidden=2048).inputs()
    x, idx, weights = inputs_of(buffer, given)
    stats = []
    for turn in range(60):
        low = buffer.low_latency_dispatch(x, idx, 64, given.experts, use_fp8=False)
        buffer.low_latency_combine(low[0], idx, weights, low[2])
        if turn in (5, 59):
            stats.append(buffer.memory_stats())
    return stats


# ---- hooks and streams ----
def job_too_many(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    sent = [send(buffer, GIVEN, return_recv_hook=True) for _ in range(3)]
    fourth = attempt(lambda: send(buffer, GIVEN, return_recv_hook=True))
    for one in sent[1:]:
        one[4]()
    twice = attempt(sent[1][4])
    early = attempt(lambda: buffer.low_latency_combine(sent[0][0], *inputs_of(buffer, GIVEN)[1:], sent[0][2]))
    sent[0][4]()
    rows = [packed(one[0], one[1]) for one in sent]
    torch.cuda.current_stream().synchronize()
    reported = attempt(buffer.check)
    return fourth, twice, early, reported, rows, execute(good_program(), rank, [buffer])


def test_a_fourth_call_in_flight_is_refused() -> None:
    results = TWO.run(job_too_many)
    received = reference.low_latency_dispatch(GIVEN.x, GIVEN.topk_idx, 12, GIVEN.experts, use_fp8=False)
    for rank, (fourth, twice, early, _, rows, _) in enumerate(results):
        fourth.must_be(deep_moe.Error, r"3 low-latency calls are in flight", "hook")
        twice.must_be(deep_moe.Error, "called before")
        early.must_be(ValueError, "handle", "hook")
        for one in rows:
            want = received[rank]
            assert isinstance(want.x, torch.Tensor)
            same_bits(one, packed(want.x, want.count), f"rank {rank}")
    check(good_program(), [good for *_, good in results])


def job_dropped_hook(comm: Any, rank: int, _: Any) -> Any:
    """Hooks that nobody calls hold nothing up."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    for turn in range(9):
        stats = torch.zeros(len(reference.experts_of(rank, 2, 8)), dtype=torch.int32, device="cuda")
        options = {"cumulative_local_expert_recv_stats": stats}
        sent = send(buffer, CASE.but(seed=turn).inputs(), return_recv_hook=True, **options)
        del sent, stats
    return execute(good_program(), rank, [buffer])


def test_dropped_hooks_hold_nothing_up() -> None:
    check(good_program(), TWO.run(job_dropped_hook))


def job_streams(comm: Any, rank: int, given: Inputs) -> Any:
    """A call behind late work, its hook on another stream, results dropped there: nothing is reused early."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    source, idx, weights = inputs_of(buffer, given)
    main, side = torch.cuda.current_stream(), side_stream()
    results = []
    for turn in range(4):
        x = torch.full_like(source, float("nan"))
        torch.cuda._sleep(LATE)
        x.copy_(source)
        low = buffer.low_latency_dispatch(x, idx, 64, given.experts, use_fp8=False, return_recv_hook=True)
        x.fill_(float("nan"))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            low[4]()
            back = buffer.low_latency_combine(low[0], idx, weights, low[2], return_recv_hook=True)
        main.wait_stream(side)
        back[2]()
        results.append((packed(low[0], low[1]), back[0].clone()))
        with torch.cuda.stream(side if turn % 2 else main):
            del low, back
    return results


def test_hooks_on_other_streams() -> None:
    given = Case("streams", (64, 50), hidden=1024, experts=8, topk=3).inputs()
    check_plain(given, 64, TWO.run(job_streams, given), pre_reduced=False)


def check_plain(given: Inputs, cap: int, results: list[Any], pre_reduced: bool = True) -> None:
    """Each rank's pairs (packed rows, sums of them) are those of the reference."""
    received = reference.low_latency_dispatch(given.x, given.topk_idx, cap, given.experts, use_fp8=False)
    y = [one.x for one in received if isinstance(one.x, torch.Tensor)]
    sums = reference.low_latency_combine(
        y, given.topk_idx, given.topk_weights, given.experts, pre_reduced=pre_reduced
    )
    for rank, pairs in enumerate(results):
        for rows, total in pairs:
            same_bits(rows, packed(y[rank], received[rank].count), f"rank {rank}, rows")
            same_values(total, sums[rank], f"rank {rank}, sums")


def job_async(comm: Any, rank: int, given: Inputs) -> Any:
    """On the comm stream, behind the current stream; beside it other work of the current stream goes on."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
    source, idx, weights = inputs_of(buffer, given)
    results = []
    for _ in range(3):
        x = torch.full_like(source, float("nan"))
        torch.cuda._sleep(LATE)
        x.copy_(source)
        low = buffer.low_latency_dispatch(x, idx, 64, given.experts, use_fp8=False, async_finish=True)
        assert isinstance(low[3].event, deep_moe.EventHandle) and low[3].event.cuda_event != 0
        assert low[3].extra_tensors is not None and any(one is x for one in low[3].extra_tensors)
        assert low[4] is None
        del x
        taken = [torch.full_like(source, float("nan")) for _ in range(4)]
        low[3].current_stream_wait()
        y = low[0].clone()
        back = buffer.low_latency_combine(y, idx, weights, low[2], async_finish=True)
        with back[1]:
            torch.cuda._sleep(1000)
        results.append((packed(low[0], low[1]), back[0].clone()))
        del taken
    return results


@pytest.mark.parametrize("world", [ONE, TWO, World("process", 2)], ids=str)
def test_async_finish(world: World) -> None:
    given = Case("async", (64, 50)[: world.ranks], hidden=1024, experts=8, topk=3).inputs()
    check_plain(given, 64, world.run(job_async, given))


# ---- staging ----
def packed_shape(rows: Any) -> tuple[int, ...]:
    """[L, R*M]"""
    return tuple((rows[0] if isinstance(rows, tuple) else rows).shape[:2])


def job_size_hint(comm: Any, rank: int, shape: tuple[int, int, int]) -> Any:
    cap, hidden, experts = shape
    hint = deep_moe.Buffer.get_low_latency_rdma_size_hint(cap, hidden, comm.Get_size(), experts)
    buffer = deep_moe.Buffer(None, 0, hint, low_latency_mode=True, comm=comm, timeout=20)
    given = Case("hint", (cap, 3, 0, 9, 1, 2, 5, 4), hidden=hidden, experts=experts, topk=8).inputs()
    x, idx, weights = inputs_of(buffer, given)
    before = buffer.memory_stats()["ll_staging_bytes"]
    for fp8, with_weights, hook in ((True, False, False), (False, True, True), (False, False, True)):
        options = {"topk_weights": weights} if with_weights else {}
        low = buffer.low_latency_dispatch(x, idx, cap, experts, use_fp8=fp8, **options)
        y = torch.zeros(hidden, device="cuda", dtype=torch.bfloat16).expand(*packed_shape(low[0]), hidden)
        back = buffer.low_latency_combine(y, idx, weights, low[2], return_recv_hook=hook)
        if back[2] is not None:
            back[2]()
        zero = bool((back[0] == 0).all())
    return hint, before, buffer.memory_stats()["ll_staging_bytes"], zero


def test_staging_is_within_the_size_hint_and_does_not_grow() -> None:
    """At the shape of the published comparisons: 0.15 GB at most."""
    for hint, before, after, zero in World("thread", 8).run(job_size_hint, (128, 7168, 256)):
        assert before == after <= hint <= 150_000_000 and zero


def job_growth(comm: Any, rank: int, _: Any) -> Any:
    """Staging that is too small for the next call grows with calls in flight, on all ranks."""
    buffer = deep_moe.Buffer(None, 0, 1 << 16, low_latency_mode=True, comm=comm, timeout=20)
    calls: list[Call] = []
    for turn, hidden in enumerate((128, 512, 2048, 256)):
        given = CASE.but(hidden=hidden, seed=turn).inputs()
        calls.append(LowLatencyDispatch(given, 12 << turn, hook="late"))
    calls += [LowLatencyCombine(of, hook="late") for of in range(4)]
    program = Program(calls)
    return program, execute(program, rank, [buffer]), buffer.memory_stats()["ll_staging_bytes"]


def test_staging_grows_with_calls_in_flight() -> None:
    results = TWO.run(job_growth)
    check(results[0][0], [done for _, done, _ in results])
    assert results[0][2] == results[1][2] > 1 << 16


def job_no_room(comm: Any, rank: int, _: Any) -> Any:
    """Rank 1's heap is bounded: it can have staging for small calls alone."""
    if rank == 1:
        os.environ["DEEP_MOE_MAX_HEAP_BYTES"] = str(24 * MIB)
    buffer = deep_moe.Buffer(None, 0, MIB, low_latency_mode=True, comm=comm, timeout=20)
    os.environ.pop("DEEP_MOE_MAX_HEAP_BYTES", None)
    large = Case("large", (12, 9), hidden=4096).inputs()
    x, idx, _ = inputs_of(buffer, large)
    tried = [
        attempt(lambda: buffer.low_latency_dispatch(x, idx, 1024, large.experts, use_fp8=False))
        for _ in range(2)
    ]
    for one in tried:
        one.value = None
    gc.collect()
    return tried, execute(good_program(), rank, [buffer])


def test_staging_that_one_rank_cannot_have_is_refused_everywhere() -> None:
    results = World("process", 2).run(job_no_room)
    for tried, _ in results:
        for one in tried:
            one.must_be(deep_moe.BufferTooSmallError, "staging", r"rank 1\b", "DEEP_MOE_MAX_HEAP_BYTES|24")
            assert one.seconds < 5.0
    check(good_program(), [good for _, good in results])


def job_growth_refused(comm: Any, rank: int, what: str) -> Any:
    """Rank 0 asks for larger staging, and rank 1 does not come to that."""
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    given = CASE.inputs()
    x, idx, _ = inputs_of(buffer, given)
    buffer.low_latency_dispatch(x, idx, 12, given.experts, use_fp8=False)
    cap = 12 if rank == 1 and what == "other call" else 4 if rank == 1 else 4000

    def call() -> None:
        buffer.low_latency_dispatch(x, idx, cap, given.experts, use_fp8=False)
        torch.cuda.current_stream().synchronize()
        buffer.check()

    return attempt(call), execute(good_program(), rank, [buffer])


@pytest.mark.parametrize("what", ["refused", "other call"])
def test_growth_that_some_rank_does_not_come_to(what: str, form: str) -> None:
    (first, good0), (second, good1) = World(form.removeprefix("gpu "), 2).run(job_growth_refused, what)
    if what == "refused":
        first.must_be(deep_moe.PeerRefusedError, r"rank 1\b", "num_max_dispatch_tokens_per_rank")
        second.must_be(ValueError, *words("num_max_dispatch_tokens_per_rank", 4))
    else:
        first.must_be(deep_moe.CallMismatchError, *words(4000, 12))
        second.must_be(deep_moe.Error, *words(4000, 12))
    assert max(first.seconds, second.seconds) < 5.0
    check(good_program(), [good0, good1])


# ---- rows as logarithms ----
@pytest.mark.parametrize("hook", ["none", "now"])
def test_logarithmic_codes_keep_zeros_signs_and_magnitudes(hook: str, form: str) -> None:
    on_cpus.test_logarithmic_codes_keep_zeros_signs_and_magnitudes(hook, form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logarithmic_codes_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Bit for bit, reduced by the holders and by expert, in one launch and in halves."""
    case = Case("codes", (31, 24), hidden=1152, experts=9, topk=5, dtype=dtype)
    calls: list[Call] = []
    for weights in (False, True):
        for hook in ("none", "late"):
            calls.append(LowLatencyDispatch(case.but(seed=len(calls)).inputs(), 32, weights=weights))
            calls.append(LowLatencyCombine(len(calls) - 1, seed=len(calls), hook=hook, logfmt=True))
    on_the_cpu = run(Program(calls, [BufferOptions(device="cpu")]), 2, "thread")
    for rank, (mine, theirs) in enumerate(zip(TWO.run_program(Program(calls)), on_the_cpu, strict=True)):
        for call in range(1, len(calls), 2):
            same_bits(mine[call]["x"], theirs[call]["x"], f"rank {rank}, call {call}")


# ---- ids of no expert ----
def test_foreign_ids_are_sent_nowhere() -> None:
    given = Case("foreign", (9, 8), hidden=256).inputs()
    for idx in given.topk_idx:
        for at, bad in enumerate((given.experts, given.experts + 1000, -2, 1 << 30, -(1 << 30))):
            idx[at, 0] = bad
    results = TWO.run(job_foreign, given)
    for idx in given.topk_idx:
        idx[:5, 0] = -1
    check_plain(given, 9, results)


def job_foreign(comm: Any, rank: int, given: Inputs) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm, timeout=10)
    x, idx, weights = inputs_of(buffer, given)
    pairs = []
    for ids in (idx, on_gpu(given.topk_idx[rank].int())):
        low = buffer.low_latency_dispatch(x, ids, 9, given.experts, use_fp8=False)
        pairs.append((packed(low[0], low[1]), buffer.low_latency_combine(low[0], ids, weights, low[2])[0]))
    return pairs


def test_buffers_of_both_modes_and_sizes() -> None:
    """Two Buffers with staging of different sizes, whose low-latency calls interleave."""
    given = CASE.inputs()
    calls: list[Call] = []
    for turn in range(6):
        calls += [
            LowLatencyDispatch(given, 12, buffer=turn % 2, hook="late"),
            LowLatencyCombine(2 * turn, buffer=turn % 2, seed=turn, hook="late"),
        ]
    run(Program(calls, [BufferOptions(), BufferOptions(1 << 20, 1 << 22)]), 2, THREADS)
