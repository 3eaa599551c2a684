"""What the rank processes do: they check whole MoE layers, then time dispatch and combine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from .experts import ExpertBank, ranks_of_tokens, relative_error
from .gloo import GlooHandle, GlooRows, exchange_counts, gloo_combine, gloo_dispatch
from .inputs import Inputs, gate_routes
from .options import BenchOptions
from .timing import PlainCopy, StepTimer

TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5}


@dataclass
class Check:
    """One comparison: the largest relative error seen and the largest allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


@dataclass
class Chain:
    """Marks of the clock for one chain of steps on one rank, with the rows and bytes that it moves there.

    ``kind`` is ``deep_moe``, ``memcpy``, ``gloo`` or ``layer``; ``limit`` names the memcpy chains of the same
    bytes.
    """

    name: str
    kind: str
    limit: str
    steps: list[str]
    marks: list[list[float]]
    rows: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values."""
        return asdict(self)


@dataclass
class Context:
    """What all jobs of a rank share."""

    options: BenchOptions
    rank: int
    device: torch.device
    inputs: Inputs
    bank: ExpertBank
    buffer: Any
    timer: StepTimer

    def check(self, name: str, result: torch.Tensor, expected: torch.Tensor) -> Check:
        """Compares on this rank; the tolerance is that of the run's type."""
        return Check(name, relative_error(result, expected), TOLERANCE[self.options.dtype])


class Job(Protocol):
    """One part of a run. ``check`` and ``time`` are called by all ranks in the same order."""

    name: str
    num_chains: int

    def check(self) -> list[Check]:
        """Runs the layer once and compares it with the dense computation."""

    def time(self) -> tuple[list[Chain], list[Check]]:
        """Times the chains, and checks what the last of them gave."""


@dataclass
class Traffic:
    """Rows of one exchange on one rank: received, summed, and how many of either crossed the link."""

    received: int
    summed: int
    received_remote: int
    summed_remote: int

    @staticmethod
    def of(inputs: Inputs, context: Context) -> Traffic:
        """Counts rows that go once to each rank that owns one of a token's experts; collective."""
        options = context.options
        sent = ranks_of_tokens(inputs.topk_idx, options.ranks, options.experts).sum(dim=0).cpu()
        received = exchange_counts(sent)
        own = int(sent[context.rank])
        return Traffic(int(received.sum()), int(sent.sum()), int(received.sum()) - own, int(sent.sum()) - own)


PAIR = ["dispatch", "combine"]


def copy_chains(context: Context, limit: str, dispatch_bytes: int, combine_bytes: int) -> list[Chain]:
    """Times memcpy of the bytes of dispatch, combine and a pair, in two ways; the faster one is the limit.

    ``combine_bytes`` is half of all that combine reads and writes, for a memcpy of n bytes reads n and
    writes n. Each is a chain of its own, as copying ranks do not keep step with each other.
    """
    chains = []
    for whole in (False, True):
        dispatch, combine = (
            PlainCopy(count, context.device, whole) for count in (dispatch_bytes, combine_bytes)
        )
        name = f"memcpy {'as a whole' if whole else 'in 1 MB pieces'} ({limit})"
        for step, copies in (("dispatch", [dispatch]), ("combine", [combine]), ("pair", [dispatch, combine])):
            marks = context.timer.chain([partial(run_all, copies)])
            chains.append(Chain(name, "memcpy", limit, [step], marks))
    return chains


def run_all(steps: list[PlainCopy]) -> None:
    """Runs one copy after another."""
    for step in steps:
        step()


class LayerJob:
    """The parts of the layer that move no rows between ranks: gate and experts."""

    name = "gate and experts"

    def __init__(self, context: Context) -> None:
        self._context = context
        self.num_chains = 1 if context.inputs.gate is None else 2

    def check(self) -> list[Check]:
        """Nothing to compare: the other jobs check whole layers."""
        return []

    def time(self) -> tuple[list[Chain], list[Check]]:
        """Times the gate over this rank's tokens and the experts over what they are sent."""
        context, inputs = self._context, self._context.inputs
        result = context.buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=context.options.experts,
        )
        recv_x, recv_idx, recv_weights = result[:3]
        rows = {"gate": len(inputs.x), "experts": len(recv_x)}

        def experts() -> torch.Tensor:
            return context.bank.weighted_rows(recv_x, recv_idx, recv_weights)

        gate = inputs.gate
        chains = []
        if gate is not None:
            marks = context.timer.chain([lambda: gate_routes(context.options, inputs.x, gate)])
            chains.append(Chain("layer", "layer", "", ["gate"], marks, rows))
        chains.append(Chain("layer", "layer", "", ["experts"], context.timer.chain([experts]), rows))
        return chains, []


class GlooJob:
    """The exchange of the HT mode by torch.distributed, in the same run."""

    name = "gloo all_to_all_single"
    num_chains = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._received: tuple[GlooRows, GlooHandle] | None = None
        self._out: torch.Tensor | None = None

    def _dispatch(self) -> tuple[GlooRows, GlooHandle]:
        inputs = self._context.inputs
        return gloo_dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, self._context.options.experts)

    def check(self) -> list[Check]:
        """Compares the layer through gloo with the dense computation."""
        context, inputs = self._context, self._context.inputs
        rows, handle = self._dispatch()
        y = context.bank.weighted_rows(rows.x, rows.topk_idx, rows.topk_weights).to(inputs.x.dtype)
        dense = context.bank.dense(inputs.x, inputs.topk_idx, inputs.topk_weights, context.options.experts)
        return [context.check(f"gloo {context.options.dtype}", gloo_combine(y, handle), dense)]

    def time(self) -> tuple[list[Chain], list[Check]]:
        """Times chained pairs: the received rows go straight back."""
        context, options = self._context, self._context.options

        def dispatch() -> None:
            self._received = self._dispatch()

        def combine() -> None:
            assert self._received is not None
            self._out = gloo_combine(self._received[0].x, self._received[1])

        marks = context.timer.chain([dispatch, combine], self._clear)
        traffic = Traffic.of(context.inputs, context)
        chain = Chain(
            "gloo all_to_all_single",
            "gloo",
            f"HT {options.dtype}",
            PAIR,
            marks,
            rows={"dispatch": traffic.received, "combine": traffic.summed},
            link_bytes={
                "dispatch": traffic.received_remote * options.row_bytes,
                "combine": traffic.summed_remote * options.row_bytes,
            },
        )
        assert self._out is not None
        expected = expected_echo(context.inputs, options)
        return [chain], [context.check("gloo, timed pairs", self._out, expected)]

    def _clear(self) -> None:
        self._received = self._out = None


def expected_echo(inputs: Inputs, options: BenchOptions) -> torch.Tensor:
    """Returns what a pair without experts gives: each row times the number of its ranks, in float32."""
    copies = ranks_of_tokens(inputs.topk_idx, options.ranks, options.experts).sum(dim=1, keepdim=True)
    return inputs.x.float() * copies
