"""The HT and LL modes of deep_moe as jobs of the bench."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .chains import PAIR, Chain, Check, copy_chains
from .experts import cast_fp8, uncast_fp8
from .inputs import Inputs
from .jobs import Context, Traffic, expected_echo
from .options import BenchOptions


def through_fp8(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` as a receiver of fp8 rows sees it, rounded back to x's type."""
    return uncast_fp8(*cast_fp8(x)).to(x.dtype)


def payload_bytes(options: BenchOptions, fp8: bool) -> int:
    """Returns the bytes of one dispatched row; fp8: a byte an element, a float32 scale a block of 128."""
    return options.hidden + options.hidden // 128 * 4 if fp8 else options.row_bytes


class HtJob:
    """High throughput: rows in the run's type, or cast to fp8 by the caller before dispatch."""

    def __init__(self, context: Context, fp8: bool = False) -> None:
        self._context, self._fp8 = context, fp8
        self.name = f"HT {'fp8' if fp8 else context.options.dtype}"
        inputs = context.inputs
        self._payload: Any = cast_fp8(inputs.x) if fp8 else inputs.x
        self._seen = (
            Inputs(through_fp8(inputs.x), inputs.topk_idx, inputs.topk_weights, None) if fp8 else inputs
        )
        self._received: Any = None
        self._out: Any = None

    def _dispatch(self) -> Any:
        inputs = self._context.inputs
        return self._context.buffer.dispatch(
            self._payload,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=self._context.options.experts,
        )

    def _rows(self, recv_x: Any) -> torch.Tensor:
        rows: torch.Tensor = uncast_fp8(*recv_x).to(self._context.inputs.x.dtype) if self._fp8 else recv_x
        return rows

    def _in_heap(self, y: torch.Tensor, recv_x: Any) -> torch.Tensor:
        """Puts ``y`` where peers read in place: over the received rows, or in a new tensor of the heap."""
        target: torch.Tensor = self._context.buffer.empty(y.shape, y.dtype) if self._fp8 else recv_x
        return target.copy_(y)

    def check(self) -> list[Check]:
        """Runs the layer with combine's input in an ordinary tensor and in the heap."""
        context, seen = self._context, self._seen
        recv_x, recv_idx, recv_weights, _, handle, _ = self._dispatch()
        y = context.bank.weighted_rows(self._rows(recv_x), recv_idx, recv_weights).to(seen.x.dtype)
        dense = context.bank.dense(seen.x, seen.topk_idx, seen.topk_weights, context.options.experts)
        ordinary = context.buffer.combine(y, handle)[0]
        in_heap = context.buffer.combine(self._in_heap(y, recv_x), handle)[0]
        return [
            context.check(f"{self.name}, input in an ordinary tensor", ordinary, dense),
            context.check(f"{self.name}, input in the heap", in_heap, dense),
        ]

    def chains(self) -> list[Chain]:
        """Memcpy, pairs whose combine reads the heap, and pairs whose combine reads an ordinary tensor."""
        context, options = self._context, self._context.options
        traffic = Traffic.of(context.inputs, context)
        row_bytes = payload_bytes(options, self._fp8)
        combine_bytes = (traffic.summed + len(context.inputs.x)) * options.row_bytes // 2
        chains = copy_chains(context.copies, self.name, traffic.received * row_bytes, combine_bytes)
        first = self._dispatch()[0]
        ordinary = self._rows(first).clone()
        heap = self._in_heap(ordinary, first) if self._fp8 else None
        for place, y in (("heap", heap), ("ordinary tensor", ordinary)):
            chains.append(
                Chain(
                    f"{self.name}, {place}",
                    "deep_moe",
                    self.name,
                    PAIR,
                    [self._step_dispatch, partial(self._step_combine, y)],
                    before=self._clear,
                    verify=partial(self._verify, f"{self.name}, timed pairs, {place}"),
                    rows={"dispatch": traffic.received, "combine": traffic.summed},
                    link_bytes={
                        "dispatch": traffic.received_remote * row_bytes,
                        "combine": traffic.summed_remote * options.row_bytes,
                    },
                )
            )
        return chains

    def _verify(self, name: str) -> Check:
        expected = expected_echo(self._seen, self._context.options)
        return self._context.check(name, self._out[0], expected)

    def _step_dispatch(self) -> None:
        self._received = self._dispatch()

    def _step_combine(self, y: torch.Tensor | None) -> None:
        recv = self._received
        self._out = self._context.buffer.combine(recv[0] if y is None else y, recv[4])

    def _clear(self) -> None:
        self._received = self._out = None


class LlJob:
    """Low latency: packed rows a local expert; with ``fp8`` the library casts while it sends."""

    def __init__(self, context: Context, fp8: bool = False) -> None:
        self._context, self._fp8 = context, fp8
        self.name = f"LL {'fp8' if fp8 else context.options.dtype}"
        inputs = context.inputs.head(context.options.ll_tokens)
        self._inputs = inputs
        self._seen = (
            Inputs(through_fp8(inputs.x), inputs.topk_idx, inputs.topk_weights, None) if fp8 else inputs
        )
        self._received: Any = None
        self._out: Any = None

    def _dispatch(self) -> Any:
        options, inputs = self._context.options, self._inputs
        return self._context.buffer.low_latency_dispatch(
            inputs.x,
            inputs.topk_idx,
            options.ll_tokens,
            options.experts,
            use_fp8=self._fp8,
            topk_weights=inputs.topk_weights,
        )

    def _combine(self, y: torch.Tensor, handle: Any) -> Any:
        return self._context.buffer.low_latency_combine(
            y, self._inputs.topk_idx, self._inputs.topk_weights, handle
        )

    def _rows(self, recv_x: Any, counts: list[int]) -> torch.Tensor:
        if not self._fp8:
            rows: torch.Tensor = recv_x
            return rows
        data, scales = recv_x
        rows = torch.zeros(data.shape, dtype=self._inputs.x.dtype, device=data.device)
        for local, count in enumerate(counts):
            rows[local, :count] = uncast_fp8(data[local, :count], scales[local, :count]).to(rows.dtype)
        return rows

    def check(self) -> list[Check]:
        """Runs the layer once."""
        context, seen = self._context, self._seen
        recv_x, recv_count, handle, _, _ = self._dispatch()
        counts = recv_count.tolist()
        rows = self._rows(recv_x, counts)
        y = context.bank.packed_rows(rows, counts, torch.zeros_like(rows))
        dense = context.bank.dense(seen.x, seen.topk_idx, seen.topk_weights, context.options.experts)
        return [context.check(self.name, self._combine(y, handle)[0], dense)]

    def chains(self) -> list[Chain]:
        """Memcpy of the packed rows, and pairs whose packed rows go straight back."""
        context, options = self._context, self._context.options
        recv_x, recv_count, _, _, _ = self._dispatch()
        counts = recv_count.tolist()
        y = self._rows(recv_x, counts) if self._fp8 else None
        del recv_x
        traffic = Traffic.of(self._inputs, context)
        packed, row_bytes = sum(counts), payload_bytes(options, self._fp8)
        combine_bytes = (packed + len(self._inputs.x)) * options.row_bytes // 2
        chains = copy_chains(context.copies, self.name, packed * row_bytes, combine_bytes)
        chains.append(
            Chain(
                self.name,
                "deep_moe",
                self.name,
                PAIR,
                [self._step_dispatch, partial(self._step_combine, y)],
                before=self._clear,
                verify=self._verify,
                rows={"dispatch": packed, "combine": packed},
                link_bytes={
                    "dispatch": traffic.received_remote * row_bytes,
                    "combine": traffic.summed_remote * options.row_bytes,
                },
            )
        )
        return chains

    def _verify(self) -> Check:
        weights = self._seen.topk_weights.masked_fill(self._seen.topk_idx < 0, 0.0)
        expected = self._seen.x.float() * weights.sum(dim=1, keepdim=True)
        return self._context.check(f"{self.name}, timed pairs", self._out[0], expected)

    def _step_dispatch(self) -> None:
        self._received = self._dispatch()

    def _step_combine(self, y: torch.Tensor | None) -> None:
        recv = self._received
        self._out = self._combine(recv[0] if y is None else y, recv[2])

    def _clear(self) -> None:
        self._received = self._out = None
