"""The expert-major calls of a program, and what they mean: a reference in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import deep_moe
from deep_moe import reference
from deep_moe.reference import Payload

from .compare import same_bits, same_values
from .device import where
from .inputs import Inputs, random_rows, rng
from .program import Call, Expected, Here


# ---- the reference ----
@dataclass(frozen=True)
class Groups:
    """Where the rows of one rank go."""

    offsets: Tensor  # [L + 1] int32
    counts: Tensor  # [L] int32
    rows: Tensor  # [N, K] int32, or -1
    experts: Tensor  # [P] int32, or -1

    @property
    def used(self) -> int:
        """Rows of the groups; a fixed number of rows has more behind them."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> list[int]:
        return self.offsets.diff().tolist()


def groups_of(topk_idx: Tensor, local_experts: int, alignment: int) -> Groups:
    """From the local ids ``[N, K]`` of received rows."""
    offsets, counts, experts = [0], [], []
    rows = torch.full(topk_idx.shape, -1, dtype=torch.int32)
    for expert in range(local_experts):
        entries = (topk_idx == expert).nonzero()  # by row, then by k
        rows[entries[:, 0], entries[:, 1]] = offsets[-1] + torch.arange(len(entries), dtype=torch.int32)
        size = -(-len(entries) // alignment) * alignment
        counts.append(len(entries))
        experts += [expert] * len(entries) + [-1] * (size - len(entries))
        offsets.append(offsets[-1] + size)
    return Groups(
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        rows,
        torch.tensor(experts, dtype=torch.int32),
    )


def with_tail(groups: Groups, num_rows: int) -> Groups:
    """The same groups, and rows behind them that belong to no expert."""
    tail = torch.full((num_rows - groups.used,), -1, dtype=torch.int32)
    return replace(groups, experts=torch.cat([groups.experts, tail]))


def grouped(received: Tensor, groups: Groups) -> Tensor:
    """Rows ``[N, ...]``, or scales, as ``[P, ...]``; padding is zero."""
    out = torch.zeros(len(groups.experts), *received.shape[1:], dtype=received.dtype)
    row, k = (groups.rows >= 0).nonzero(as_tuple=True)
    as_bytes = out.view(torch.uint8) if out.element_size() == 1 else out
    source = received.contiguous().view(torch.uint8) if out.element_size() == 1 else received
    as_bytes[groups.rows[row, k].long()] = source[row]
    return out


def summed(y: Tensor, groups: Groups, weights: Tensor | None) -> Tensor:
    """One row ``[N, H]`` for each received one: fp32, in the order of k, rounded once."""
    total = torch.zeros(len(groups.rows), y.shape[1])
    for k in range(groups.rows.shape[1]):
        here = (groups.rows[:, k] >= 0).nonzero().flatten()
        rows = groups.rows[here, k].long()
        values = y[rows].float()
        total[here] += values if weights is None else weights[rows, None] * values
    return total.to(y.dtype)


# ---- the calls ----
@dataclass(frozen=True)
class GroupedDispatch(Call):
    inputs: Inputs
    path: str = "fused"  # or "v1"
    alignment: int = 1
    weights: bool = True
    asynchronous: bool = False
    worst: int = 0
    buffer: int = 0

    def only(self, rank: int) -> GroupedDispatch:
        return replace(self, inputs=self.inputs.only(rank))

    def run(self, here: Here) -> Any:
        buffer, mine, rank = here.buffers[self.buffer], self.inputs, here.rank
        arguments: dict[str, Any] = {"expert_alignment": self.alignment, "expert_major": True}
        arguments["num_worst_tokens"] = self.worst
        arguments["topk_idx"] = mine.topk_idx[rank]
        arguments["topk_weights"] = mine.topk_weights[rank] if self.weights else None
        if self.path == "fused":
            arguments["num_experts"] = mine.experts
        else:
            layout = buffer.get_dispatch_layout(mine.topk_idx[rank], mine.experts)
            arguments["num_tokens_per_rank"] = layout[0]
            arguments["num_tokens_per_rdma_rank"] = layout[1]
            arguments["num_tokens_per_expert"] = layout[2]
            arguments["is_token_in_rank"] = layout[3]
        result = buffer.dispatch(mine.x[rank], async_finish=self.asynchronous, **arguments)
        if self.asynchronous:
            result[5].current_stream_wait()
        return result

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        x, idx, weights, sizes, handle, event = kept
        kinds = (deep_moe.ExpertMajorHandle, deep_moe.InternodeExpertMajorHandle)
        assert isinstance(handle, kinds), type(handle)
        return {
            "x": x,
            "idx": idx,
            "weights": weights,
            "sizes": sizes,
            "offsets": handle.expert_offsets,
            "counts": handle.expert_counts,
            "rows": handle.expert_rows,
            "event": event.event is not None,
        }

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> Placed:
        given = self.inputs
        routes = [reference.layout(idx, given.experts, given.ranks) for idx in given.topk_idx]
        received = reference.dispatch(
            given.x, given.topk_idx, given.experts, given.topk_weights, num_worst_tokens=self.worst
        )
        placed = []
        for rank, (got, want) in enumerate(zip(results, received, strict=True)):
            at = f"{what}, rank {rank}"
            local = len(reference.experts_of(rank, given.ranks, given.experts))
            groups = groups_of(want.topk_idx, local, self.alignment)
            if self.worst:
                groups = with_tail(groups, self.most_rows(local))
            placed.append(groups)
            same_bits(got["offsets"], groups.offsets, f"{at}, expert_offsets")
            same_bits(got["counts"], groups.counts, f"{at}, expert_counts")
            same_bits(got["rows"], groups.rows, f"{at}, expert_rows")
            same_bits(got["idx"], groups.experts, f"{at}, recv_topk_idx")
            sizes = [] if self.worst else groups.sizes
            assert got["sizes"] == sizes, f"{at}: {got['sizes']}, expected {sizes}"
            assert got["event"] == self.asynchronous, f"{at}: the event of the other kind of call"
            weights = torch.zeros(len(groups.experts))
            assert want.topk_weights is not None
            weights[groups.rows[groups.rows >= 0].long()] = want.topk_weights[groups.rows >= 0]
            same_bits(got["weights"], weights if self.weights else None, f"{at}, recv_topk_weights")
            same_groups(got["x"], want.x, groups, f"{at}, recv_x")
            if isinstance(got["x"], tuple) and got["x"][1].dim() == 2 and min(got["x"][1].shape) > 1:
                columns = self.inputs.x[0][1].stride(0) == 1
                assert got["x"][1].stride(0 if columns else 1) == 1, f"{at}: the scales' order has changed"
        return Placed(given, [route.is_token_in_rank for route in routes], placed)

    def most_rows(self, local_experts: int) -> int:
        entries = self.worst * self.inputs.topk_idx[0].shape[1]
        return -(-(entries + local_experts * (self.alignment - 1)) // self.alignment) * self.alignment


@dataclass(frozen=True)
class Placed:
    """What later calls need to know of an expert-major dispatch."""

    inputs: Inputs
    in_rank: list[Tensor]
    groups: list[Groups]


@dataclass(frozen=True)
class GroupedCachedDispatch(Call):
    """Other rows along the routes and into the groups of an earlier dispatch."""

    of: int
    x: list[Any] = field(repr=False)
    plain_handle: bool = False  # as autograd gives it back
    said: bool = False  # expert_major is passed too
    buffer: int = 0

    def only(self, rank: int) -> GroupedCachedDispatch:
        return replace(self, x=[x if one == rank else None for one, x in enumerate(self.x)])

    def run(self, here: Here) -> Any:
        handle = here.kept[self.of][4]
        handle = tuple(handle) if self.plain_handle else handle
        return here.buffers[self.buffer].dispatch(self.x[here.rank], handle=handle, expert_major=self.said)

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        return {"x": kept[0], "rest": [part is None for part in kept[1:5]]}

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> None:
        placed: Placed = expected[self.of]
        rows = reference.dispatch_cached(self.x, placed.in_rank)
        for rank, (got, want) in enumerate(zip(results, rows, strict=True)):
            same_groups(got["x"], want, placed.groups[rank], f"{what}, rank {rank}")
            assert got["rest"] == [True] * 4, f"{what}, rank {rank}: more than rows"


@dataclass(frozen=True)
class GroupedCombine(Call):
    """Random rows from every group back to their tokens. The padding is NaN, which nothing may read."""

    of: int
    seed: int = 0
    dtype: torch.dtype | None = None
    row_weights: bool = False
    weights: bool = True
    biases: int = 0
    strided: bool = False  # the rows have gaps
    out: bool = False
    asynchronous: bool = False
    buffer: int = 0

    def rows(self, rank: int, groups: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
        y = random_rows(rng(self.seed, 8, rank), len(groups), hidden, dtype)
        y[groups.cpu() < 0] = float("nan")
        return y

    def bias(self, rank: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        gen = rng(self.seed, 9, rank)
        return tuple(random_rows(gen, tokens, hidden, dtype) for _ in range(self.biases))

    def factors(self, rank: int, num_rows: int, which: int) -> Tensor:
        return torch.rand(num_rows, generator=rng(self.seed, 10 + which, rank)) - 0.25

    def run(self, here: Here) -> Any:
        buffer, dispatch = here.buffers[self.buffer], here.kept[self.of]
        call: Any = here.calls[self.of]
        given, dtype = call.inputs, self.dtype or call.inputs.dtype
        tokens = len(given.topk_idx[here.rank])
        y = self.rows(here.rank, dispatch[1], given.hidden, dtype)
        if self.strided:
            wide = torch.zeros(len(y), given.hidden + 16, dtype=dtype)
            wide[:, : given.hidden] = y
            y = where(buffer, wide)[:, : given.hidden]
        bias = self.bias(here.rank, tokens, given.hidden, dtype)
        arguments: dict[str, Any] = {"bias": (None, *bias)[-1] if len(bias) < 2 else bias}
        if self.weights:
            arguments["topk_weights"] = self.factors(here.rank, len(y), 0)
        if self.row_weights:
            arguments["row_weights"] = self.factors(here.rank, len(y), 1)
        if self.out:
            arguments["out"] = where(buffer, torch.full((tokens, given.hidden), float("nan")).to(dtype))
        result = buffer.combine(y, dispatch[4], async_finish=self.asynchronous, **arguments)
        if self.asynchronous:
            result[2].current_stream_wait()
        return arguments.get("out"), result

    def collect(self, here: Here, kept: Any) -> dict[str, Any]:
        out, (combined, weights, _) = kept
        return {"x": combined, "weights": weights, "out": out is None or combined is out}

    def check(self, results: Sequence[dict[str, Any]], expected: Expected, what: str) -> None:
        placed: Placed = expected[self.of]
        given, dtype = placed.inputs, self.dtype or placed.inputs.dtype
        y, weights = [], []
        for rank, groups in enumerate(placed.groups):
            num_rows = len(groups.experts)
            factors = self.factors(rank, num_rows, 1) if self.row_weights else None
            rows = self.rows(rank, groups.experts, given.hidden, dtype)
            y.append(summed(rows, groups, factors))
            by_entry = torch.zeros(groups.rows.shape)
            here = groups.rows >= 0
            by_entry[here] = self.factors(rank, num_rows, 0)[groups.rows[here].long()]
            weights.append(by_entry)
        biases = [self.bias(rank, len(sent), given.hidden, dtype) for rank, sent in enumerate(placed.in_rank)]
        combined = reference.combine(
            y,
            placed.in_rank,
            weights if self.weights else None,
            biases,
            nodes=expected.nodes(len(y)),
        )
        for rank, (got, want) in enumerate(zip(results, combined, strict=True)):
            at = f"{what}, rank {rank}"
            same_values(got["x"], want[0], f"{at}, combined_x")
            same_values(got["weights"], want[1], f"{at}, combined_topk_weights")
            assert got["out"], f"{at}: the result is not in the tensor given as out"


def same_groups(got: Payload, received: Payload, groups: Groups, what: str) -> None:
    """Every row of the groups; those behind them may hold anything."""
    got, received = (got, received) if isinstance(received, tuple) else ((got,), (received,))
    assert isinstance(got, tuple) and len(got) == len(received), f"{what}: not the same parts as were sent"
    for part, source in zip(got, received, strict=True):
        assert len(part) == len(groups.experts), f"{what}: {len(part)} rows"
        same_bits(part[: groups.used], grouped(source, groups)[: groups.used], what)
