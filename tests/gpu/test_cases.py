"""Hostile inputs on a GPU: the rows of the list that are a matter of shapes and routes, as on the CPU.

Each test's id begins with the row's id.
"""

from __future__ import annotations

import time

import pytest
import torch

from ..cpu import test_cases_round_trip as on_cpus
from ..cpu.test_cases_round_trip import (
    HIGH_THROUGHPUT,
    LOW_LATENCY,
    high_throughput,
    low_latency,
    two,
)
from ..support.gpu import VECTOR, World
from ..support.high_throughput import Combine, Dispatch
from ..support.inputs import Case
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import Call, Program, run

pytestmark = pytest.mark.gpus(1)

PATHS = ["v1", "fused", "layout only"]
THREADS = "gpu thread"


# Ranks that are processes take turns of milliseconds: of each kind of row one.
def some(cases: list[Case]) -> list[Case]:
    return [case for case in cases if is_one_of_some(case)]


def is_one_of_some(case: Case) -> bool:
    kinds = ("Z1", "Z2", "Z3", "Z4", "M1", "M2", "M4", "M5", "U1", "D2", "W3")
    names = ("K1-topk32", "H1-hidden2880", "H1-fp8-hidden6144", "E1-60-experts-8-ranks")
    return case.name.split("-")[0] in kinds or case.name in names


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_threads(case: Case) -> None:
    run(high_throughput(case), case.ranks, THREADS)


@pytest.mark.parametrize("case", some(HIGH_THROUGHPUT), ids=str)
def test_processes(case: Case) -> None:
    run(high_throughput(case), case.ranks, "gpu process")


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_without_the_copy_engine(case: Case) -> None:
    """The kernels of older GPUs."""
    World("thread", case.ranks, VECTOR).run_program(high_throughput(case))


@pytest.mark.parametrize("case", LOW_LATENCY, ids=str)
def test_low_latency(case: Case) -> None:
    run(low_latency(case), case.ranks, THREADS)


@pytest.mark.parametrize("case", some(LOW_LATENCY), ids=str)
def test_low_latency_in_processes(case: Case) -> None:
    run(low_latency(case), case.ranks, "gpu process")


def test_z2_with_no_tokens_returns_at_once(form: str) -> None:
    case = two(name="Z2", tokens=(0, 0))
    given = case.inputs()
    program = Program([Dispatch(given), Combine(0), LowLatencyDispatch(given, 8), LowLatencyCombine(2)])
    run(program, 2, form)  # the ranks are there from now on
    started = time.monotonic()
    run(program, 2, form)
    assert time.monotonic() - started < 2.0


def test_m1_sums_are_zero_on_memory_that_was_used(form: str) -> None:
    """Rows of an earlier exchange lie in the heap when nothing is selected."""
    full, none = two(name="full"), two(name="none", routing="none")
    calls: list[Call] = []
    for case in (full, none, full, none):
        at = len(calls)
        calls += [Dispatch(case.inputs(), path="fused"), Combine(at), LowLatencyDispatch(case.inputs(), 33)]
        calls += [LowLatencyCombine(at + 2, hook="now")]
    results = run(Program(calls), 2, form)
    for rank, tokens in enumerate(none.tokens):
        for call in (5, 7, 13, 15):
            assert torch.equal(results[rank][call]["x"], torch.zeros(tokens, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("path", PATHS[:2])
def test_m4_weights_of_a_repeated_expert_are_both_kept(path: str, form: str) -> None:
    on_cpus.test_m4_weights_of_a_repeated_expert_are_both_kept(path, form)


def test_m5_rows_that_go_nowhere_cost_nothing(form: str) -> None:
    given = two(name="M5", tokens=(64, 64), routing="half").inputs()
    results = run(Program([Dispatch(given, path="fused"), LowLatencyDispatch(given, 64)]), 2, form)
    for rank in range(2):
        reached = sum(int(((idx >= 8 * rank) & (idx < 8 * rank + 8)).any(1).sum()) for idx in given.topk_idx)
        assert len(results[rank][0]["x"]) == reached <= 64
        entries = sum(int(((idx >= 8 * rank) & (idx < 8 * rank + 8)).sum()) for idx in given.topk_idx)
        assert int(results[rank][1]["count"].sum()) == entries


def test_u1_sizes_change_on_one_buffer() -> None:
    on_cpus.test_u1_sizes_change_on_one_buffer(THREADS)


def test_b3_two_buffers_are_independent(form: str) -> None:
    on_cpus.test_b3_two_buffers_are_independent(form)


@pytest.mark.parametrize("path", PATHS[:2])
def test_g1_no_sync_dispatch_pads_its_tail(path: str, form: str) -> None:
    on_cpus.test_g1_no_sync_dispatch_pads_its_tail(path, form)


@pytest.mark.parametrize("dtype", on_cpus.ROUNDED, ids=str)
def test_w3_sums_are_within_one_rounding_of_exact_ones(dtype: torch.dtype) -> None:
    on_cpus.test_w3_sums_are_within_one_rounding_of_exact_ones(dtype, THREADS)


@pytest.mark.parametrize("path", PATHS)
def test_w2_results_repeat_and_do_not_depend_on_others(path: str, form: str) -> None:
    on_cpus.test_w2_results_repeat_and_do_not_depend_on_others(path, form)
