"""What the rank processes do: they check whole MoE layers, then time dispatch and combine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from .chains import PAIR, Chain, Check
from .collectives import (
    CollectiveHandle,
    CollectiveRows,
    collective_combine,
    collective_dispatch,
    exchange_counts,
)
from .experts import ExpertBank, ranks_of_tokens, relative_error
from .inputs import Inputs, gate_routes
from .options import BenchOptions
from .timing import CopyBuffers

TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 2e-5}


@dataclass
class Context:
    """What all jobs of a rank share."""

    options: BenchOptions
    rank: int
    device: torch.device
    inputs: Inputs
    bank: ExpertBank
    buffer: Any
    copies: CopyBuffers

    def check(self, name: str, result: torch.Tensor, expected: torch.Tensor) -> Check:
        """Compares on this rank; the tolerance is that of the run's type."""
        return Check(name, relative_error(result, expected), TOLERANCE[self.options.dtype])


class Job(Protocol):
    """One part of a run. All ranks call ``check`` and ``chains`` in the same order."""

    name: str

    def check(self) -> list[Check]:
        """Runs the layer once and compares it with the dense computation."""

    def chains(self) -> list[Chain]:
        """Makes the chains to time."""


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


class LayerJob:
    """The parts of the layer that move no rows between ranks: gate and experts."""

    name = "gate and experts"

    def __init__(self, context: Context) -> None:
        self._context = context

    def check(self) -> list[Check]:
        """Nothing to compare: the other jobs check whole layers."""
        return []

    def chains(self) -> list[Chain]:
        """The gate over this rank's tokens, and the experts over what they are sent."""
        context, inputs = self._context, self._context.inputs
        result = context.buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=context.options.experts,
        )
        recv_x, recv_idx, recv_weights = result[:3]
        rows = {"gate": len(inputs.x), "experts": len(recv_x)}
        experts = partial(context.bank.weighted_rows, recv_x.clone(), recv_idx, recv_weights)
        chains = []
        if inputs.gate is not None:
            gate = partial(gate_routes, context.options, inputs.x, inputs.gate)
            chains.append(Chain("layer", "layer", "", ("gate",), [gate], rows=rows))
        chains.append(Chain("layer", "layer", "", ("experts",), [experts], rows=rows))
        return chains


class GlooJob:
    """The exchange of the HT mode by torch.distributed, in the same run."""

    name = "gloo all_to_all_single"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._received: tuple[CollectiveRows, CollectiveHandle] | None = None
        self._out: torch.Tensor | None = None

    def _dispatch(self) -> tuple[CollectiveRows, CollectiveHandle]:
        inputs = self._context.inputs
        return collective_dispatch(
            inputs.x, inputs.topk_idx, inputs.topk_weights, self._context.options.experts
        )

    def check(self) -> list[Check]:
        """Compares the layer through gloo with the dense computation."""
        context, inputs = self._context, self._context.inputs
        rows, handle = self._dispatch()
        y = context.bank.weighted_rows(rows.x, rows.topk_idx, rows.topk_weights).to(inputs.x.dtype)
        dense = context.bank.dense(inputs.x, inputs.topk_idx, inputs.topk_weights, context.options.experts)
        return [context.check(f"gloo {context.options.dtype}", collective_combine(y, handle), dense)]

    def chains(self) -> list[Chain]:
        """Pairs whose received rows go straight back."""
        context, options = self._context, self._context.options
        traffic = Traffic.of(context.inputs, context)
        return [
            Chain(
                self.name,
                "gloo",
                f"HT {options.dtype}",
                PAIR,
                [self._step_dispatch, self._step_combine],
                before=self._clear,
                verify=self._verify,
                rows={"dispatch": traffic.received, "combine": traffic.summed},
                link_bytes={
                    "dispatch": traffic.received_remote * options.row_bytes,
                    "combine": traffic.summed_remote * options.row_bytes,
                },
            )
        ]

    def _step_dispatch(self) -> None:
        self._received = self._dispatch()

    def _step_combine(self) -> None:
        assert self._received is not None
        self._out = collective_combine(self._received[0].x, self._received[1])

    def _verify(self) -> Check:
        assert self._out is not None
        expected = expected_echo(self._context.inputs, self._context.options)
        return self._context.check("gloo, timed pairs", self._out, expected)

    def _clear(self) -> None:
        self._received = self._out = None


def expected_echo(inputs: Inputs, options: BenchOptions) -> torch.Tensor:
    """Returns what a pair without experts gives: each row times the number of its ranks, in float32."""
    copies = ranks_of_tokens(inputs.topk_idx, options.ranks, options.experts).sum(dim=1, keepdim=True)
    return inputs.x.float() * copies
