"""Random programs of calls on ranks that go round the GPUs, drawn as those of the CPU are.

pytest --nightly runs 2000 examples a test with threads, and 200 with processes.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from ..cpu.test_properties import PATHS, high_throughput_programs, mixed_programs
from ..support.gpu import VECTOR, World
from ..support.program import BufferOptions, Program

pytestmark = pytest.mark.gpus(1)

NIGHTLY = hypothesis.settings().max_examples > 1000
buffer_options = st.builds(
    BufferOptions,
    num_bytes=st.sampled_from([0, 0, 4096, 1 << 22]),
    num_ll_bytes=st.sampled_from([0, 0, 1 << 22]),
)
thread_worlds = st.sampled_from([World("thread", ranks) for ranks in (1, 2, 2, 3, 4, 8)])


def programs(ranks: int, buffers: int = 1) -> Any:
    return high_throughput_programs(ranks, buffers, PATHS, buffer_options)


def low_latency_programs(ranks: int, buffers: int = 1) -> Any:
    """Both modes on one Buffer."""
    return mixed_programs(ranks, buffers, options=buffer_options)


def try_program(program: Program, world: World) -> None:
    note(f"{world}: {[type(call).__name__ for call in program.calls]}, {program.buffers}")
    world.run_program(program)


@settings(max_examples=2000 if NIGHTLY else 50)
@given(st.data(), thread_worlds)
def test_threads(data: st.DataObject, world: World) -> None:
    try_program(data.draw(programs(world.ranks)), world)


@settings(max_examples=2000 if NIGHTLY else 25)
@given(st.data(), thread_worlds)
def test_two_interleaved_buffers(data: st.DataObject, world: World) -> None:
    two = st.one_of(programs(world.ranks, 2), low_latency_programs(world.ranks, 2))
    try_program(data.draw(two), world)


@settings(max_examples=2000 if NIGHTLY else 60)
@given(st.data(), thread_worlds)
def test_low_latency_and_mixed_modes(data: st.DataObject, world: World) -> None:
    try_program(data.draw(low_latency_programs(world.ranks)), world)


@settings(max_examples=2000 if NIGHTLY else 25)
@given(st.data(), st.sampled_from([World("thread", ranks, VECTOR) for ranks in (1, 2, 4)]))
def test_without_the_copy_engine(data: st.DataObject, world: World) -> None:
    try_program(data.draw(programs(world.ranks)), world)


@settings(max_examples=200 if NIGHTLY else 10)
@given(st.data(), st.sampled_from([World("process", 2), World("process", 3)]))
def test_processes(data: st.DataObject, world: World) -> None:
    either = st.one_of(programs(world.ranks), low_latency_programs(world.ranks))
    try_program(data.draw(either), world)
