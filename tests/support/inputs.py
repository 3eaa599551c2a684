"""Inputs of all ranks for one exchange, and the cases that name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deep_moe import reference
from deep_moe.reference import Payload

Random = torch.Generator


def rng(*seeds: int) -> Random:
    """A generator of its own for every tuple of small numbers."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (2**61 - 1)
    return torch.Generator().manual_seed(mixed)


def random_rows(gen: Random, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, hidden, generator=gen).to(dtype)


# ---- routing: a function of (generator, T, E, K, rank, R) that gives topk_idx [T, K] ----
def _distinct(gen: Random, tokens: int, experts: int, topk: int) -> Tensor:
    """K different experts a row; where there are fewer than K experts, the rest is -1."""
    idx = torch.full((tokens, topk), -1)
    most = min(topk, experts)
    idx[:, :most] = torch.rand(tokens, experts, generator=gen).topk(most, 1).indices
    return idx


def _uniform(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    return _distinct(gen, tokens, experts, topk)


def _mixed(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    idx = _distinct(gen, tokens, experts, topk)
    return torch.where(torch.rand(idx.shape, generator=gen) < 0.4, -1, idx)


def _half(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    idx = _distinct(gen, tokens, experts, topk)
    idx[1::2] = -1
    return idx


def _none(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    return torch.full((tokens, topk), -1)


def _rank0(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    return _distinct(gen, tokens, len(reference.experts_of(0, ranks, experts)), topk)


def _lone(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    """Only the last rank selects anything."""
    idx = _distinct(gen, tokens, experts, topk)
    return idx if rank == ranks - 1 else torch.full_like(idx, -1)


def _hot(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    """The last expert is in every row."""
    idx = _distinct(gen, tokens, experts, topk)
    idx = torch.where(idx == experts - 1, -1, idx)
    idx[:, 0] = experts - 1
    return idx


def _repeated(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    """Drawn with replacement from a few experts: duplicates in most rows."""
    return torch.randint(0, min(experts, 3), (tokens, topk), generator=gen)


def _skewed(gen: Random, tokens: int, experts: int, topk: int, rank: int, ranks: int) -> Tensor:
    likely = 1.0 / torch.arange(1, experts + 1, dtype=torch.float32)
    drawn = torch.multinomial(likely, max(1, tokens * topk), replacement=True, generator=gen)
    return drawn[: tokens * topk].reshape(tokens, topk)


ROUTINGS: dict[str, Callable[..., Tensor]] = {
    "uniform": _uniform,
    "mixed": _mixed,
    "half": _half,
    "none": _none,
    "rank0": _rank0,
    "lone": _lone,
    "hot": _hot,
    "repeated": _repeated,
    "skewed": _skewed,
}


def gate(scores: Tensor, topk: int, groups: int = 0, topk_groups: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and weights from scores [T, E]; group-limited: the groups whose two best experts sum to most."""
    if groups:
        grouped = scores.reshape(len(scores), groups, scores.shape[1] // groups)
        best = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1).topk(topk_groups, -1).indices
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).reshape(scores.shape)
    weights, idx = scores.softmax(-1).topk(topk, -1)
    return idx, weights / weights.sum(-1, keepdim=True)


# ---- payloads: what a row is made of ----
def _fp8(rows: Tensor) -> Payload:
    return reference.cast_fp8(rows)


def _fp8_columns(rows: Tensor) -> Payload:
    data, scales = reference.cast_fp8(rows)
    return data, torch.empty(scales.shape[1], scales.shape[0]).t().copy_(scales)


def _ue8m0(rows: Tensor) -> Payload:
    return reference.cast_fp8(rows, use_ue8m0=True)


def _one_scale(rows: Tensor) -> Payload:
    return rows.to(torch.float8_e5m2), rows.float().abs().sum(1)


def _opaque(rows: Tensor) -> Payload:
    """Bytes with three bytes of scales a row, as packed four-bit formats have."""
    return rows.contiguous().view(torch.uint8), rows[:, :3].float().mul(50).to(torch.int8)


PAYLOADS: dict[str, Callable[[Tensor], Payload]] = {
    "plain": lambda rows: rows,
    "fp8": _fp8,
    "fp8_columns": _fp8_columns,
    "ue8m0": _ue8m0,
    "one_scale": _one_scale,
    "opaque": _opaque,
}


@dataclass(frozen=True)
class Inputs:
    """What each rank passes to a dispatch. Lists are by rank; on a rank, only its own entries are there."""

    x: list[Payload] = field(repr=False)
    topk_idx: list[Tensor] = field(repr=False)
    topk_weights: list[Tensor] = field(repr=False)
    experts: int
    hidden: int  # of the rows that combine gives back
    dtype: torch.dtype  # of those rows
    case: Case | None = None  # what they were made from

    @property
    def ranks(self) -> int:
        return len(self.x)

    def only(self, rank: int) -> Inputs:
        def own(items: list[Any]) -> list[Any]:
            return [item if one == rank else None for one, item in enumerate(items)]

        return replace(self, x=own(self.x), topk_idx=own(self.topk_idx), topk_weights=own(self.topk_weights))


@dataclass(frozen=True)
class Case:
    """A readable description of inputs; its name is the id of its tests."""

    name: str
    tokens: tuple[int, ...]
    hidden: int = 512
    experts: int = 16
    topk: int = 4
    dtype: torch.dtype = torch.bfloat16
    routing: str = "uniform"
    payload: str = "plain"
    idx_dtype: torch.dtype = torch.int64
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def rows(self, seed: int = 0) -> list[Payload]:
        """The payload of every rank; other seeds give other rows for the same routes."""
        return [
            PAYLOADS[self.payload](random_rows(rng(self.seed, seed, rank), count, self.hidden, self.dtype))
            for rank, count in enumerate(self.tokens)
        ]

    def inputs(self) -> Inputs:
        idx, weights = [], []
        for rank, count in enumerate(self.tokens):
            gen = rng(self.seed, 77, rank)
            route = ROUTINGS[self.routing](gen, count, self.experts, self.topk, rank, self.ranks)
            idx.append(route.to(self.idx_dtype))
            weights.append(torch.rand(count, self.topk, generator=gen))
        return Inputs(self.rows(), idx, weights, self.experts, self.hidden, self.dtype, self)
