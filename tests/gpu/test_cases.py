"""Hostile inputs on a GPU: the rows of the list that are a matter of shapes and routes, as on the CPU.

Each test's id begins with the row's id.
"""

from __future__ import annotations

import time

import pytest
import torch

from ..cpu import test_cases_round_trip as on_cpus
from ..cpu.test_cases_round_trip import HIGH_THROUGHPUT, high_throughput, two
from ..support.gpu import VECTOR, World
from ..support.high_throughput import Combine, Dispatch
from ..support.inputs import Case
from ..support.program import BufferOptions, Program, run

pytestmark = pytest.mark.gpus(1)

PATHS = ["v1", "fused", "layout only"]
THREADS = "gpu thread"

# Ranks that are processes take turns of milliseconds: of each kind of row one.
IN_PROCESSES = [
    case
    for case in HIGH_THROUGHPUT
    if case.name.split("-")[0] in ("Z1", "Z2", "Z3", "Z4", "M1", "M2", "M4", "M5", "U1", "D2", "W3")
    or case.name in ("K1-topk32", "H1-hidden2880", "H1-fp8-hidden6144", "E1-60-experts-8-ranks")
]


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_threads(case: Case) -> None:
    run(high_throughput(case), case.ranks, THREADS)


@pytest.mark.parametrize("case", IN_PROCESSES, ids=str)
def test_processes(case: Case) -> None:
    run(high_throughput(case), case.ranks, "gpu process")


@pytest.mark.parametrize("case", HIGH_THROUGHPUT, ids=str)
def test_without_the_copy_engine(case: Case) -> None:
    """The kernels of older GPUs."""
    World("thread", case.ranks, VECTOR).run_program(high_throughput(case))


def test_z2_with_no_tokens_returns_at_once(form: str) -> None:
    case = two(name="Z2", tokens=(0, 0))
    program = Program([Dispatch(case.inputs()), Combine(0)])
    run(program, 2, form)  # the ranks are there from now on
    started = time.monotonic()
    run(program, 2, form)
    assert time.monotonic() - started < 2.0


def test_m1_sums_are_zero_on_memory_that_was_used(form: str) -> None:
    """Rows of an earlier exchange lie in the heap when nothing is selected."""
    full, none = two(name="full"), two(name="none", routing="none")
    calls = []
    for case in (full, none, full, none):
        calls += [Dispatch(case.inputs(), path="fused"), Combine(len(calls))]
    results = run(Program(calls), 2, form)
    for rank, tokens in enumerate(none.tokens):
        for call in (3, 7):
            assert torch.equal(results[rank][call]["x"], torch.zeros(tokens, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("path", PATHS[:2])
def test_m4_weights_of_a_repeated_expert_are_both_kept(path: str, form: str) -> None:
    on_cpus.test_m4_weights_of_a_repeated_expert_are_both_kept(path, form)


def test_m5_rows_that_go_nowhere_cost_nothing(form: str) -> None:
    given = two(name="M5", tokens=(64, 64), routing="half").inputs()
    results = run(Program([Dispatch(given, path="fused")]), 2, form)
    for rank in range(2):
        reached = sum(int(((idx >= 8 * rank) & (idx < 8 * rank + 8)).any(1).sum()) for idx in given.topk_idx)
        assert len(results[rank][0]["x"]) == reached <= 64


def test_u1_sizes_change_on_one_buffer() -> None:
    on_cpus.test_u1_sizes_change_on_one_buffer(THREADS)


def test_b3_two_buffers_are_independent(form: str) -> None:
    one, other = two(name="one").inputs(), two(name="other", tokens=(5, 40), hidden=1024, experts=10).inputs()
    calls = [
        Dispatch(one, buffer=0),
        Dispatch(other, buffer=1),
        Combine(1, buffer=1),
        Combine(0, buffer=0),
        Dispatch(other, buffer=1),
        Dispatch(one, buffer=0),
        Combine(4, buffer=1),
        Combine(5, buffer=0),
    ]
    run(Program(calls, [BufferOptions(), BufferOptions(1 << 20)]), 2, form)


@pytest.mark.parametrize("path", PATHS[:2])
def test_g1_no_sync_dispatch_pads_its_tail(path: str, form: str) -> None:
    on_cpus.test_g1_no_sync_dispatch_pads_its_tail(path, form)


@pytest.mark.parametrize("dtype", on_cpus.ROUNDED, ids=str)
def test_w3_sums_are_within_one_rounding_of_exact_ones(dtype: torch.dtype) -> None:
    on_cpus.test_w3_sums_are_within_one_rounding_of_exact_ones(dtype, THREADS)


@pytest.mark.parametrize("path", PATHS)
def test_w2_results_repeat_and_do_not_depend_on_others(path: str, form: str) -> None:
    on_cpus.test_w2_results_repeat_and_do_not_depend_on_others(path, form)
