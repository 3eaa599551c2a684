"""The high-throughput calls of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deep_moe import reference

from .compare import same_bits, same_values
from .device import where
from .inputs import Inputs, random_rows, rng
from .program import Call, Expected, Here


@dataclass(frozen=True)
class Dispatch(Call):
    inputs: Inputs
    path: str = "v1"  # "v1": layout first; "fused": num_experts=; "layout only": no ids and weights travel
    alignment: int = 1
    worst: int = 0
    buffer: int = 0

    def only(self, rank: int) -> Dispatch:
        return replace(self, inputs=self.inputs.only(rank))

    def run(self, here: Here) -> Any:
        buffer, mine, rank = here.buffers[self.buffer], self.inputs, here.rank
        x, idx, weights = mine.x[rank], mine.topk_idx[rank], mine.topk_weights[rank]
        arguments: dict[str, Any] = {"expert_alignment": self.alignment, "num_worst_tokens": self.worst}
        layout = None
        if self.path == "fused":
            arguments["num_experts"] = mine.experts
        else:
            layout = buffer.get_dispatch_layout(idx, mine.experts)
            arguments["num_tokens_per_rank"] = layout[0]
            arguments["num_tokens_per_rdma_rank"] = layout[1]
            arguments["num_tokens_per_expert"] = layout[2]
            arguments["is_token_in_rank"] = layout[3]
        if self.path != "layout only":
            arguments["topk_idx"], arguments["topk_weights"] = idx, weights
        return layout, buffer.dispatch(x, **arguments)

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        layout, (x, idx, weights, counts, handle, event) = kept
        return {
            "layout": layout and [layout[0], layout[2], layout[3]],
            "per node": layout and layout[1],
            "x": x,
            "idx": idx,
            "weights": weights,
            "counts": counts,
            "in rank": handle.is_token_in_rank,
            "event": event.event is None,
        }

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> Routed:
        given = self.inputs
        routes = [reference.layout(idx, given.experts, given.ranks) for idx in given.topk_idx]
        received = reference.dispatch(
            given.x,
            given.topk_idx,
            given.experts,
            given.topk_weights,
            expert_alignment=self.alignment,
            num_worst_tokens=self.worst,
        )
        for rank, (got, want, route) in enumerate(zip(results, received, routes, strict=True)):
            at = f"{what}, rank {rank}"
            if got["layout"] is not None:
                same_bits(got["layout"][0], route.num_tokens_per_rank, f"{at}, num_tokens_per_rank")
                same_bits(got["layout"][1], route.num_tokens_per_expert, f"{at}, num_tokens_per_expert")
                same_bits(got["layout"][2], route.is_token_in_rank, f"{at}, is_token_in_rank")
            self._check_nodes(got, route, expected, at)
            assert got["event"], f"{at}: the event of a synchronous call is not empty"
            same_bits(got["in rank"], route.is_token_in_rank, f"{at}, handle.is_token_in_rank")
            assert got["counts"] == want.num_tokens_per_expert, f"{at}: {got['counts']}"
            assert all(type(count) is int for count in got["counts"]), f"{at}: counts are not Python ints"
            self._check_rows(got, want, at)
        return Routed(given, [route.is_token_in_rank for route in routes], received)

    def _check_nodes(self, got: dict[str, Any], route: reference.Layout, expected: Expected, at: str) -> None:
        if got["layout"] is None:
            return
        nodes = expected.nodes(self.inputs.ranks)
        if max(nodes) == 0:
            assert got["per node"] is None, f"{at}: num_tokens_per_rdma_rank is not None on one node"
            return
        counts = reference.num_tokens_per_node(route.is_token_in_rank, nodes)
        same_bits(got["per node"], counts, f"{at}, num_tokens_per_rdma_rank")

    def _check_rows(self, got: dict[str, Any], want: reference.Received, at: str) -> None:
        rows = (
            want.x[: want.num_rows]
            if isinstance(want.x, Tensor)
            else tuple(x[: want.num_rows] for x in want.x)
        )
        same_rows(got["x"], rows, len(want.topk_idx), f"{at}, recv_x")
        if isinstance(want.x, tuple) and got["x"][1].dim() == 2 and min(got["x"][1].shape) > 1:
            columns = self.inputs.x[0][1].stride(0) == 1
            assert got["x"][1].stride(0 if columns else 1) == 1, f"{at}: the order of the scales has changed"
        if self.path == "layout only":
            assert got["idx"] is None and got["weights"] is None, f"{at}: ids from nowhere"
        else:
            same_bits(got["idx"], want.topk_idx, f"{at}, recv_topk_idx")
            same_bits(got["weights"], want.topk_weights, f"{at}, recv_topk_weights")


@dataclass(frozen=True)
class Routed:
    """What later calls need to know of a dispatch."""

    inputs: Inputs
    in_rank: list[Tensor]
    received: list[reference.Received]


@dataclass(frozen=True)
class CachedDispatch(Call):
    """Other rows along the routes of an earlier dispatch."""

    of: int
    x: list[Any] = field(repr=False)
    plain_handle: bool = False  # pass the handle as a plain tuple of tensors, as autograd gives it back
    buffer: int = 0

    def only(self, rank: int) -> CachedDispatch:
        return replace(self, x=[x if one == rank else None for one, x in enumerate(self.x)])

    def run(self, here: Here) -> Any:
        handle = here.kept[self.of][1][4]
        if self.plain_handle:
            handle = tuple(handle)
        return here.buffers[self.buffer].dispatch(self.x[here.rank], handle=handle)

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        return {"x": kept[0], "rest": [part is None for part in kept[1:5]]}

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> None:
        routed: Routed = expected[self.of]
        rows = reference.dispatch_cached(self.x, routed.in_rank)
        for rank, (got, want) in enumerate(zip(results, rows, strict=True)):
            same_rows(got["x"], want, len(routed.received[rank].topk_idx), f"{what}, rank {rank}")
            assert got["rest"] == [True] * 4, (
                f"{what}, rank {rank}: only rows come back from a cached dispatch"
            )


@dataclass(frozen=True)
class Combine(Call):
    """Random rows from every rank back to their owners."""

    of: int
    seed: int = 0
    dtype: torch.dtype | None = None  # of the rows; that of the dispatch's inputs where not given
    weights: bool = True
    biases: int = 0
    in_heap: bool = False  # the rows lie in a tensor from buffer.empty
    out: bool = False
    buffer: int = 0

    def rows(self, rank: int, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        return random_rows(rng(self.seed, 5, rank), num_rows, hidden, dtype)

    def bias(self, rank: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        gen = rng(self.seed, 6, rank)
        return tuple(random_rows(gen, tokens, hidden, dtype) for _ in range(self.biases))

    def run(self, here: Here) -> Any:
        buffer, dispatch = here.buffers[self.buffer], here.kept[self.of][1]
        call: Any = here.calls[self.of]
        given, handle, weights = call.inputs, dispatch[4], dispatch[2] if self.weights else None
        dtype = self.dtype or given.dtype
        data = dispatch[0] if isinstance(dispatch[0], Tensor) else dispatch[0][0]
        tokens = len(given.topk_idx[here.rank])
        y = self.rows(here.rank, len(data), given.hidden, dtype)
        if dispatch[1] is not None:
            y[int((dispatch[1] >= 0).any(1).sum()) :] = float("nan")  # rows that num_worst_tokens has added
        if self.in_heap:
            y = buffer.empty(y.shape, dtype).copy_(y)
        bias = self.bias(here.rank, tokens, given.hidden, dtype)
        arguments: dict[str, Any] = {"bias": (None, *bias)[-1] if len(bias) < 2 else bias}
        if self.out:
            arguments["out"] = where(buffer, torch.full((tokens, given.hidden), float("nan")).to(dtype))
        return y, arguments.get("out"), buffer.combine(y, handle, topk_weights=weights, **arguments)

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        _, out, (combined, weights, event) = kept
        into_out = out is None or combined.data_ptr() == out.data_ptr()
        return {"x": combined, "weights": weights, "event": event.event is None, "out": into_out}

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> None:
        routed: Routed = expected[self.of]
        given, ranks = routed.inputs, range(routed.inputs.ranks)
        dtype = self.dtype or given.dtype
        received = routed.received
        y = [self.rows(rank, len(received[rank].topk_idx), given.hidden, dtype) for rank in ranks]
        biases = [self.bias(rank, len(routed.in_rank[rank]), given.hidden, dtype) for rank in ranks]
        weights = [one.topk_weights for one in received if one.topk_weights is not None]
        nodes = expected.nodes(len(y))
        combined = reference.combine(
            y, routed.in_rank, weights if self.weights else None, biases, nodes=nodes
        )
        for rank, (got, want) in enumerate(zip(results, combined, strict=True)):
            at = f"{what}, rank {rank}"
            same_values(got["x"], want[0], f"{at}, combined_x")
            same_values(got["weights"], want[1], f"{at}, combined_topk_weights")
            assert got["event"], f"{at}: the event of a synchronous call is not empty"
            assert got["out"], f"{at}: the result is not in the tensor given as out"


def same_rows(got: Any, rows: Any, total: int, what: str) -> None:
    """`got` begins with exactly these rows and has `total` in all; pairs part by part."""
    got, rows = (got, rows) if isinstance(rows, tuple) else ((got,), (rows,))
    assert isinstance(got, tuple) and len(got) == len(rows), f"{what}: not the same parts as were sent"
    for part, want in zip(got, rows, strict=True):
        assert len(part) == total, f"{what}: {len(part)} rows, expected {total}"
        same_bits(part[: len(want)], want, what)
