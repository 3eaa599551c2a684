"""Random programs of calls, both modes, both forms of ranks, against the reference.

A hypothesis example is a whole program: some dispatches of random shapes, then combines and cached dispatches
along any of the live handles, in any order, on one or two Buffers. pytest --nightly runs 2000 examples a
test; DEEP_MOE_HYPOTHESIS_PROFILE=shrink looks for a smaller one where an example fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deep_moe import reference

from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import PAYLOADS, ROUTINGS, Case
from ..support.low_latency import LowLatencyCombine, LowLatencyDispatch
from ..support.program import BufferOptions, Call, Program, run
from ..support.ranks import FORMS

Draw = Any
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PATHS = ("v1", "fused", "layout only")
WAYS = ("plain", "plain", "logfmt", "zero copy")  # how a low-latency combine takes its rows


@st.composite
def cases(draw: Draw, ranks: int, most_tokens: int = 40, low_latency: bool = False) -> Case:
    """A shape, a way of routing and a payload."""
    payloads = [name for name in PAYLOADS if not (low_latency and name == "one_scale")]
    payload = draw(st.sampled_from(["plain"] * 3 + payloads))
    dtype = draw(st.sampled_from(FLOATS))
    unit = {"plain": 8, "ue8m0": 512, "fp8": 128, "fp8_columns": 128}.get(payload, 16)
    if low_latency and payload == "plain":
        unit = draw(st.sampled_from([8, 128, 512]))
    hidden = unit * draw(st.integers(1, max(1, 640 // unit)))
    tokens = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, most_tokens))
    return Case(
        "drawn",
        tuple(draw(st.lists(tokens, min_size=ranks, max_size=ranks))),
        hidden=hidden,
        experts=draw(st.integers(1, 40)),
        topk=draw(st.integers(1, 12)),
        dtype=dtype,
        routing=draw(st.sampled_from(list(ROUTINGS))),
        payload=payload,
        idx_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        seed=draw(st.integers(0, 2**20)),
    )


def most_received(case: Case) -> int:
    """The rows of the rank that receives most."""
    sent = [reference.layout(idx, case.experts, case.ranks) for idx in case.inputs().topk_idx]
    return int(torch.stack([one.num_tokens_per_rank for one in sent]).sum(0).max())


@st.composite
def dispatches(draw: Draw, ranks: int, buffers: int, paths: Sequence[str] = PATHS) -> tuple[Case, Dispatch]:
    case = draw(cases(ranks))
    worst = most_received(case) + draw(st.integers(0, 9)) if draw(st.integers(0, 3)) == 0 else 0
    call = Dispatch(
        case.inputs(),
        path=draw(st.sampled_from(paths)),
        alignment=draw(st.sampled_from([1, 1, 4, 128])),
        worst=worst,
        buffer=draw(st.integers(0, buffers - 1)),
    )
    return case, call


buffer_options = st.builds(
    BufferOptions,
    num_bytes=st.sampled_from([0, 0, 4096, 1 << 22]),
    num_ll_bytes=st.sampled_from([0, 0, 1 << 22]),
)


@st.composite
def high_throughput_programs(
    draw: Draw,
    ranks: int,
    buffers: int = 1,
    paths: Sequence[str] = PATHS,
    options: st.SearchStrategy[BufferOptions] = buffer_options,
) -> Program:
    """Up to six calls, then a combine of every dispatch that has had none, newest or oldest first."""
    calls: list[Call] = []
    live: list[tuple[int, Case, Dispatch]] = []

    def combine(index: int, dispatch: Dispatch) -> Combine:
        return Combine(
            index,
            seed=draw(st.integers(0, 99)),
            dtype=draw(st.sampled_from([None, None, *FLOATS])) if dispatch.inputs.hidden % 8 == 0 else None,
            weights=dispatch.path != "layout only" and draw(st.booleans()),
            biases=draw(st.integers(0, 2)),
            in_heap=draw(st.booleans()),
            out=draw(st.booleans()),
            buffer=dispatch.buffer,
        )

    for _ in range(draw(st.integers(1, 6))):
        what = draw(st.sampled_from(["dispatch", "combine", "cached"])) if live else "dispatch"
        if what == "dispatch":
            case, call = draw(dispatches(ranks, buffers, paths))
            live.append((len(calls), case, call))
            calls.append(call)
            continue
        index, case, dispatch = draw(st.sampled_from(live))
        if what == "combine":
            calls.append(combine(index, dispatch))
        else:
            rows = case.rows(draw(st.integers(1, 9)))
            calls.append(CachedDispatch(index, rows, draw(st.booleans()), buffer=dispatch.buffer))
    for index, _, dispatch in live if draw(st.booleans()) else reversed(live):
        calls.append(combine(index, dispatch))
    return Program(calls, [draw(options) for _ in range(buffers)])


@st.composite
def low_latency_calls(draw: Draw, ranks: int, at: int, buffer: int = 0) -> list[Call]:
    """A dispatch and one or two combines that answer it."""
    case = draw(cases(ranks, most_tokens=12, low_latency=True))
    plain = case.payload == "plain"
    fp8 = plain and case.hidden % 128 == 0 and draw(st.booleans())
    dispatch = LowLatencyDispatch(
        case.inputs(),
        max(*case.tokens, 1) + draw(st.integers(0, 5)),
        use_fp8=fp8,
        round_scale=fp8 and draw(st.booleans()),
        use_ue8m0=fp8 and case.hidden % 512 == 0 and draw(st.booleans()),
        hook=draw(st.sampled_from(["none", "now", "late"])),
        weights=draw(st.booleans()),
        buffer=buffer,
    )
    calls: list[Call] = [dispatch]
    for _ in range(draw(st.integers(1, 2))):
        copying = draw(st.sampled_from(WAYS))
        calls.append(
            LowLatencyCombine(
                at,
                seed=draw(st.integers(0, 99)),
                hook=draw(st.sampled_from(["none", "now", "late"])),
                logfmt=copying == "logfmt" and case.dtype == torch.bfloat16 and case.hidden % 128 == 0,
                zero_copy=copying == "zero copy" and plain,
                out=draw(st.booleans()),
                buffer=buffer,
            )
        )
    return calls


@st.composite
def mixed_programs(
    draw: Draw,
    ranks: int,
    buffers: int = 1,
    options: st.SearchStrategy[BufferOptions] = buffer_options,
) -> Program:
    """Low-latency exchanges with changing M, H and E, hooks pending or not, and the other mode in between."""
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)) == 0:
            _, dispatch = draw(dispatches(ranks, buffers))
            weights = dispatch.path != "layout only"
            calls += [dispatch, Combine(len(calls), weights=weights, buffer=dispatch.buffer)]
        else:
            calls += draw(low_latency_calls(ranks, len(calls), draw(st.integers(0, buffers - 1))))
    newest_first = draw(st.booleans())
    return Program(calls, [draw(options) for _ in range(buffers)], newest_first)


ranks_and_form = st.tuples(st.sampled_from([1, 2, 2, 3, 4, 5, 6]), st.sampled_from(FORMS))


def try_program(program: Program, ranks: int, form: str) -> None:
    note(f"{ranks} ranks as {form}: {[type(call).__name__ for call in program.calls]}, {program.buffers}")
    run(program, ranks, form)


@given(st.data(), ranks_and_form)
def test_high_throughput(data: st.DataObject, setting: tuple[int, str]) -> None:
    ranks, form = setting
    try_program(data.draw(high_throughput_programs(ranks)), ranks, form)


@given(st.data(), ranks_and_form)
def test_low_latency_and_mixed_modes(data: st.DataObject, setting: tuple[int, str]) -> None:
    ranks, form = setting
    try_program(data.draw(mixed_programs(ranks)), ranks, form)


@given(st.data(), ranks_and_form)
def test_two_interleaved_buffers(data: st.DataObject, setting: tuple[int, str]) -> None:
    ranks, form = setting
    programs = st.one_of(high_throughput_programs(ranks, 2), mixed_programs(ranks, 2))
    try_program(data.draw(programs), ranks, form)


@given(st.data(), st.sampled_from([(2, 1), (3, 1), (2, 2), (4, 1), (3, 2), (2, 3)]), st.sampled_from(FORMS))
def test_several_nodes(data: st.DataObject, world: tuple[int, int], form: str) -> None:
    """The same between nodes, on one Buffer or two, with the rings that they are born with."""
    nodes, local_ranks = world
    ranks = nodes * local_ranks
    programs = st.one_of(
        high_throughput_programs(ranks), high_throughput_programs(ranks, 2), mixed_programs(ranks)
    )
    try_program(replace(data.draw(programs), local_ranks=local_ranks), ranks, form)
