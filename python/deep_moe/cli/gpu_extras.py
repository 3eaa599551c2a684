"""More measurements on GPUs: a GEMM beside a dispatch; pairs so small that the host's time bounds them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from ..buffer import Buffer
from ..comm import thread_comms
from ..events import cuda
from .gpu_calls import CppCalls
from .gpu_plan import GRAPH_REPEATS, OVERLAP_SMS, PAIR, PAIR_BY_HANDLE, Call
from .gpu_world import World
from .inputs import Inputs
from .options import BenchOptions

GEMM = (8192, 8192, 2048)  # rows, columns, inner
GEMM_SAMPLES = 41
OVERLAP_REPEATS = 8  # the dispatch has this many times the run's tokens, to outlast the GEMM
SOLO_REPEATS = 12  # of one to the rank itself, which stores rows once
HOLD_NS = 6_000_000
HOLD_STARTS_SECONDS = 200e-6
PAIRS = 200
GRAPH_TOKENS = 128
SOLO_BYTES = 64 << 20


@contextmanager
def solo_buffer(world: World, num_bytes: int) -> Iterator[Buffer]:
    """A Buffer of this rank alone."""
    buffer = Buffer(
        None, num_bytes, comm=thread_comms(1)[0], device=world.device, explicitly_destroy=True, timeout=20.0
    )
    try:
        yield buffer
    finally:
        torch.cuda.current_stream().synchronize()
        buffer.destroy()


class Overlap:
    """How much longer a GEMM takes beside a dispatch than beside a kernel that only holds as many SMs.

    Each sample: the ranks start a dispatch with ``async_finish`` (or the holding kernel); rank 0 then runs
    the GEMM on its compute stream. The dispatch has to outlast the GEMM; whether it did is reported.
    """

    def __init__(self, world: World, options: BenchOptions, inputs: Inputs, buffer: Buffer) -> None:
        self._world, self._options, self._inputs, self._buffer = world, options, inputs, buffer
        rows, columns, inner = GEMM
        self._a = torch.randn(rows, inner, device=world.device, dtype=torch.bfloat16)
        self._b = torch.randn(inner, columns, device=world.device, dtype=torch.bfloat16)
        self._out = torch.matmul(self._a, self._b)
        torch.cuda.current_stream().synchronize()

    def measure(self) -> list[dict[str, Any]]:
        """Collective: one entry for rank 0's dispatch alone (to itself), one for all ranks together."""
        world, entries = self._world, []
        world.phase("time a GEMM beside a dispatch")
        world.quiet()
        if world.rank == 0:
            rows = SOLO_REPEATS * self._options.tokens * (self._options.row_bytes + 1024)
            with solo_buffer(world, 2 * rows) as solo:
                entries.append(self._entry(solo, 1, self._wait_alone))
        world.quiet()
        if self._options.ranks > 1:
            entries.append(self._entry(self._buffer, self._options.ranks, world.at_rest))
        return entries

    def _wait_alone(self) -> None:
        torch.cuda.current_stream().synchronize()

    def _entry(self, buffer: Buffer, ranks: int, at_rest: Callable[[], None]) -> dict[str, Any]:
        # torch notes that the Buffer's stream uses them; so they end with this function, before the Buffer.
        repeats = SOLO_REPEATS if ranks == 1 else OVERLAP_REPEATS
        x = self._inputs.x.repeat(repeats, 1)
        topk_idx = self._inputs.topk_idx.repeat(repeats, 1)
        samples: dict[str, list[float]] = {"alone": [], "hold": [], "dispatch": []}
        covered = True

        def dispatch() -> Any:
            experts = self._options.experts
            return buffer.dispatch(x, topk_idx=topk_idx, num_experts=experts, async_finish=True)

        Buffer.set_num_sms(OVERLAP_SMS)
        for sample in range(GEMM_SAMPLES + 1):
            for beside, times in samples.items():
                at_rest()
                took, outlasted = self._sample(buffer, ranks, beside, dispatch)
                if sample > 0:
                    times.append(took)
                    covered = covered and outlasted
        at_rest()
        return {"dispatching_ranks": ranks, "num_sms": OVERLAP_SMS, "gemm": GEMM, "us": samples} | {
            "covered": covered,
            "dispatched_tokens": len(x),
        }

    def _sample(
        self, buffer: Buffer, ranks: int, beside: str, dispatch: Callable[[], Any]
    ) -> tuple[float, bool]:
        """Returns the GEMM's time, and whether what was beside it ended after it."""
        world = self._world
        begin, end, over = (cuda.Event(enable_timing=True) for _ in range(3))
        kept: Any = None
        if beside == "hold":
            _C.bench_hold(world.device.index, OVERLAP_SMS, ranks, HOLD_NS, world.side.cuda_stream)
            over.record(world.side)
        time.sleep(HOLD_STARTS_SECONDS)  # as long before each GEMM
        if beside == "dispatch":
            kept = dispatch()
            over.record(buffer.get_comm_stream())
        if world.rank == 0:
            begin.record()
            torch.matmul(self._a, self._b, out=self._out)
            end.record()
        torch.cuda.current_stream().synchronize()
        if beside != "alone":
            over.synchronize()
        if kept is not None:
            kept[5].current_stream_wait()
        if world.rank != 0:
            return 0.0, True
        return 1e3 * begin.elapsed_time(end), beside == "alone" or end.elapsed_time(over) > 0


def host_cost(world: World, options: BenchOptions, inputs: Inputs, buffer: Buffer) -> list[dict[str, Any]]:
    """Collective: wall time a pair of one token from Python on one rank, and from C++; graphs of 128."""
    one, some = inputs.head(1), inputs.head(min(GRAPH_TOKENS, options.tokens))
    entries: list[dict[str, Any]] = []
    sms = options.num_sms[-1]
    world.phase("time pairs of one token")
    world.quiet()
    if world.rank == 0:
        with solo_buffer(world, SOLO_BYTES) as solo:
            entries += _from_python(solo, one, options)
            entries += _from_cpp(_bench_rank(solo, one, options, 1), options, sms, 1, lambda: None)
    world.quiet()
    if options.ranks > 1:
        world.at_rest()
        rank = _bench_rank(buffer, one, options, options.ranks)
        entries += _from_cpp(rank, options, sms, options.ranks, world.at_rest)
    world.at_rest()
    rank = _bench_rank(buffer, some, options, options.ranks)
    entries.append(
        _samples(PAIR, CppCalls(rank, GRAPH_REPEATS), sms, options, options.ranks, len(some.x), world.at_rest)
    )
    world.at_rest()
    return entries


def _bench_rank(buffer: Buffer, inputs: Inputs, options: BenchOptions, ranks: int) -> _C.BenchRank:
    rank = _C.BenchRank(buffer.runtime)
    rank.set_inputs(
        inputs.x,
        inputs.topk_idx,
        inputs.topk_weights,
        options.experts,
        inputs.x.repeat(ranks, 1),
        [],
    )
    return rank


def _from_cpp(
    rank: _C.BenchRank, options: BenchOptions, num_sms: int, ranks: int, at_rest: Callable[[], None]
) -> list[dict[str, Any]]:
    calls = (PAIR, PAIR_BY_HANDLE)
    return [_samples(call, CppCalls(rank), num_sms, options, ranks, 1, at_rest) for call in calls]


def _samples(
    call: Call,
    driver: CppCalls,
    num_sms: int,
    options: BenchOptions,
    ranks: int,
    tokens: int,
    at_rest: Callable[[], None],
) -> dict[str, Any]:
    count = PAIRS // GRAPH_REPEATS if driver.name == "graph" else PAIRS
    at_rest()
    driver.prepare(call.steps, num_sms)
    times = []
    for sample in range(options.warmup + options.iters):
        at_rest()
        took = driver.run(count)
        if sample >= options.warmup:
            times.append(took[2])
    at_rest()
    return _entry(call.name, driver.name, ranks, tokens, num_sms, times)


def _entry(name: str, driver: str, ranks: int, tokens: int, num_sms: int, us: list[float]) -> dict[str, Any]:
    return {"call": name, "driver": driver, "ranks": ranks, "tokens": tokens, "num_sms": num_sms, "us": us}


def _from_python(buffer: Buffer, one: Inputs, options: BenchOptions) -> list[dict[str, Any]]:
    def dispatch() -> Any:
        return buffer.dispatch(
            one.x, topk_idx=one.topk_idx, topk_weights=one.topk_weights, num_experts=options.experts
        )

    first = dispatch()

    def pair() -> None:
        recv = dispatch()
        buffer.combine(recv[0], recv[4])

    def pair_by_handle() -> None:
        recv = buffer.dispatch(one.x, handle=first[4])
        buffer.combine(recv[0], first[4])

    Buffer.set_num_sms(options.num_sms[-1])
    entries = []
    for call, chain in ((PAIR, pair), (PAIR_BY_HANDLE, pair_by_handle)):
        times = []
        for sample in range(options.warmup + options.iters):
            took = _wall_us(chain)
            if sample >= options.warmup:
                times.append(took)
        entries.append(_entry(call.name, "Python", 1, 1, options.num_sms[-1], times))
    return entries


def _wall_us(chain: Callable[[], None]) -> float:
    stream = torch.cuda.current_stream()
    chain()
    stream.synchronize()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(PAIRS):
            chain()
        stream.synchronize()
        return 1e6 * (time.perf_counter() - start) / PAIRS
    finally:
        gc.enable()
