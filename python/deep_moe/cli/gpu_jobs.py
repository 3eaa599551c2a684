"""What each rank of a run on GPUs does: checks whole layers, then times calls, plain copies and NCCL."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import _C
from ..buffer import Buffer
from .chains import Check
from .exchange_jobs import payload_bytes, through_fp8
from .experts import ExpertBank, cast_fp8, local_experts, ranks_of_tokens, relative_error, uncast_fp8
from .gpu_calls import CppCalls, Driver, NcclCalls, PythonCalls
from .gpu_plan import (
    AS_TIMED,
    BY_NCCL,
    CALLS_A_CHAIN,
    COPY_SHAPES,
    FROM_PYTHON,
    GRAPH_REPEATS,
    IN_GRAPHS,
    LAYOUT,
    Call,
    calls_of,
    payloads,
)
from .gpu_world import World
from .inputs import Inputs
from .jobs import TOLERANCE, expected_echo
from .options import BenchOptions

CHECKED_TOKENS = 256


@dataclass
class Traffic:
    """Rows of one exchange on one rank, all of them and those that cross to or from other ranks."""

    received: int
    sent: int
    received_remote: int
    sent_remote: int

    @staticmethod
    def of(inputs: Inputs, options: BenchOptions, world: World) -> Traffic:
        """Collective."""
        sent = ranks_of_tokens(inputs.topk_idx, options.ranks, options.experts).sum(dim=0).tolist()
        received = sum(counts[world.rank] for counts in world.comm.allgather(sent))
        own = sent[world.rank]
        return Traffic(received, sum(sent), received - own, sum(sent) - own)


@dataclass
class Line:
    """The samples of one line of the table on one rank, in microseconds a chain.

    ``kind`` is ``deep_moe``, ``copy`` or ``nccl``. Bytes: of rows that come from other ranks, and of all.
    """

    call: str
    payload: str
    num_sms: int
    driver: str
    kind: str
    limit: str
    link_bytes: int
    row_bytes: int
    device_us: list[float] = field(default_factory=list)
    issue_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def add(self, times: tuple[float, float, float]) -> None:
        """Takes the times of one run."""
        for samples, value in zip((self.device_us, self.issue_us, self.wall_us), times, strict=True):
            samples.append(value)


class ExchangeJob:
    """The exchange of one payload type: checks and lines."""

    def __init__(
        self, world: World, options: BenchOptions, inputs: Inputs, buffer: Buffer, payload: str
    ) -> None:
        self._world, self._options, self._inputs, self._buffer = world, options, inputs, buffer
        self.payload = payload
        self._rows: Any = cast_fp8(inputs.x) if payload == "fp8" else inputs.x
        self._traffic = Traffic.of(inputs, options, world)
        self._rank = _C.BenchRank(buffer.runtime)
        self._landing = self._share_landing()
        self._ordinary = inputs.x.repeat(options.ranks, 1)
        self.lines: list[Line] = []
        self.checks: list[Check] = []
        world.at_rest()
        self._rank.set_inputs(
            self._rows,
            inputs.topk_idx,
            inputs.topk_weights,
            options.experts,
            self._ordinary,
            [tensor.data_ptr() for tensor in self._landing],
        )
        world.at_rest()

    def _share_landing(self) -> list[torch.Tensor]:
        """For each rank the part of its memory where this rank's plain copies go."""
        options, tokens = self._options, len(self._inputs.x)
        row_bytes = max(options.row_bytes, payload_bytes(options, self.payload == "fp8"))
        mine = torch.zeros(options.ranks, tokens * row_bytes, dtype=torch.uint8, device=self._world.device)
        torch.cuda.current_stream().synchronize()
        return [of_rank[self._world.rank] for of_rank in self._world.share(mine)]

    def _line(self, call: Call, num_sms: int, driver: str, kind: str) -> Line:
        options, traffic = self._options, self._traffic
        sent_bytes = payload_bytes(options, self.payload == "fp8")
        link = rows = 0
        if call.limit in ("dispatch", "pair"):
            link, rows = link + traffic.received_remote * sent_bytes, rows + traffic.received * sent_bytes
        if call.limit in ("combine", "pair"):
            link = link + traffic.sent_remote * options.row_bytes
            rows = rows + traffic.sent * options.row_bytes
        return Line(call.name, self.payload, num_sms, driver, kind, call.limit, link, rows)

    def time(self, call: Call, num_sms: int, driver: Driver, kind: str = "deep_moe") -> None:
        """Collective: all samples of one line; a combine of what was dispatched is checked at the end."""
        world, options = self._world, self._options
        line = self._line(call, num_sms, driver.name, kind)
        count = CALLS_A_CHAIN // GRAPH_REPEATS if driver.name == "graph" else CALLS_A_CHAIN
        world.phase(f"time {call.name}, {self.payload}, {num_sms} SMs, {driver.name}")
        world.at_rest()
        driver.prepare(call.steps, num_sms)
        for sample in range(options.warmup + options.iters):
            world.at_rest()
            times = driver.run(count)
            if sample >= options.warmup:
                line.add(times)
        world.at_rest()
        self.lines.append(line)
        if options.check and kind != "copy" and call.limit == "pair" and self.payload != "fp8":
            name = f"{call.name}, {self.payload}, {num_sms} SMs, {driver.name}{AS_TIMED}"
            self.checks.append(self._check(name, driver.combined(), expected_echo(self._inputs, options)))
        world.at_rest()

    def _check(self, name: str, result: torch.Tensor | None, expected: torch.Tensor) -> Check:
        error = float("inf") if result is None else relative_error(result, expected)
        return Check(name, error, TOLERANCE[self._options.dtype])

    def time_all(self, nccl: Any) -> None:
        """All lines: for each number of SMs the copies and the calls; then those of Python and NCCL."""
        options, cpp = self._options, CppCalls(self._rank)
        calls = calls_of(self.payload, options)
        for num_sms in options.num_sms:
            for step, shapes in COPY_SHAPES.items():
                if not self._rank.can_copy() or (step == "combine" and self.payload == "fp8"):
                    continue
                copy = Call(f"plain copy for {step}", (f"copy_for_{step}",), step)
                for repeats in (0, GRAPH_REPEATS) if options.graph else (0,):
                    for shape in shapes:
                        self.time(copy, num_sms, CppCalls(self._rank, repeats, shape), "copy")
            for call in calls:
                self.time(call, num_sms, cpp)
            if options.graph:
                graphs = CppCalls(self._rank, GRAPH_REPEATS)
                for call in IN_GRAPHS:
                    self.time(call, num_sms, graphs)
        if self.payload == "fp8":
            return
        num_sms = options.num_sms[-1]
        self.time(LAYOUT, num_sms, cpp)
        inputs, experts = self._inputs, options.experts
        self._world.at_rest()
        python = PythonCalls(self._buffer, self._rows, inputs, experts)
        for call in FROM_PYTHON:
            self.time(call, num_sms, python)
        if nccl is not None:
            by_nccl = NcclCalls(nccl, inputs, experts)
            for call in BY_NCCL:
                self.time(call, num_sms, by_nccl, "nccl")


def check_layers(world: World, options: BenchOptions, inputs: Inputs, buffer: Buffer) -> list[Check]:
    """Runs whole layers over some of the tokens and compares them with a dense computation of the same."""
    mine = local_experts(world.rank, options.ranks, options.experts)
    bank = ExpertBank(mine, options.hidden, options.ffn, options.seed, world.device)
    checks = []
    some = inputs.head(min(len(inputs.x), CHECKED_TOKENS))
    for payload in payloads(options):
        is_fp8 = payload == "fp8"
        seen = replace(some, x=through_fp8(some.x)) if is_fp8 else some
        rows: Any = cast_fp8(some.x) if is_fp8 else some.x
        dense = bank.dense(seen.x, seen.topk_idx, seen.topk_weights, options.experts)
        world.at_rest()
        received: Any = buffer.dispatch(
            rows, topk_idx=some.topk_idx, topk_weights=some.topk_weights, num_experts=options.experts
        )
        recv_x, recv_idx, recv_weights, _, handle, _ = received
        world.at_rest()
        taken = uncast_fp8(*recv_x).to(some.x.dtype) if is_fp8 else recv_x
        y = bank.weighted_rows(taken, recv_idx, recv_weights).to(some.x.dtype)
        in_heap = buffer.empty(y.shape, y.dtype).copy_(y)
        world.at_rest()
        results = [buffer.combine(y, handle)[0], buffer.combine(in_heap, handle)[0]]
        world.at_rest()
        for place, result in zip(("an ordinary tensor", "the heap"), results, strict=True):
            error = relative_error(result, dense)
            checks.append(Check(f"HT {payload}, input in {place}", error, TOLERANCE[options.dtype]))
        world.at_rest()
    return checks
