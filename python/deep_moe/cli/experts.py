"""The experts of the bench's MoE layer, for dispatched rows and, in the check, for a rank's own."""

from __future__ import annotations

import math

import torch

FP8_MAX = 448.0


def local_experts(rank: int, num_ranks: int, num_experts: int) -> range:
    """Returns the contiguous block of experts that ``rank`` owns; the first E % R ranks own one more."""
    share, extra = divmod(num_experts, num_ranks)
    begin = rank * share + min(rank, extra)
    return range(begin, begin + share + (rank < extra))


def owners(num_ranks: int, num_experts: int) -> torch.Tensor:
    """Returns ``[E] int64``: the rank that owns each expert."""
    sizes = torch.tensor([len(local_experts(r, num_ranks, num_experts)) for r in range(num_ranks)])
    return torch.repeat_interleave(torch.arange(num_ranks), sizes)


def ranks_of_tokens(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> torch.Tensor:
    """Returns ``[T, R] bool``: whether a token has an expert on a rank."""
    owner = torch.cat([owners(num_ranks, num_experts), torch.tensor([num_ranks])]).to(topk_idx.device)
    is_in = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_in.scatter_(1, owner[topk_idx], True)  # -1 takes the last entry, a rank that is cut off below
    return is_in[:, :num_ranks]


class ExpertBank:
    """Two-layer experts ``silu(x @ w1) @ w2`` in float32; weights come from expert and seed alone."""

    def __init__(self, experts: range, hidden: int, ffn: int, seed: int, device: torch.device) -> None:
        self.experts, self.hidden, self.ffn, self.seed, self.device = experts, hidden, ffn, seed, device
        self._weights = [self._make(expert) for expert in experts]

    def _make(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + expert + 1)
        w1 = torch.randn(self.hidden, self.ffn, generator=generator).div_(math.sqrt(self.hidden))
        w2 = torch.randn(self.ffn, self.hidden, generator=generator).div_(math.sqrt(self.ffn))
        return w1.to(self.device), w2.to(self.device)

    @staticmethod
    def _apply(weights: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.float() @ weights[0]) @ weights[1]

    def weighted_rows(self, x: torch.Tensor, local_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Applies the local experts to received rows.

        ``x [N, H]``, ``local_idx [N, K]`` local ids or -1, ``weights [N, K] float32``; returns ``[N, H]
        float32``, each row the weighted sum of its experts' outputs.
        """
        out = torch.zeros(x.shape[0], self.hidden, dtype=torch.float32, device=x.device)
        for local in range(len(self.experts)):
            rows, ks = (local_idx == local).nonzero(as_tuple=True)
            if len(rows):
                result = self._apply(self._weights[local], x[rows])
                out.index_add_(0, rows, result * weights[rows, ks].unsqueeze(1))
        return out

    def packed_rows(self, x: torch.Tensor, counts: list[int], out: torch.Tensor) -> torch.Tensor:
        """Applies expert l to the first ``counts[l]`` rows of ``x[l]``, into ``out[l]``: ``[L, P, H]``."""
        for local, count in enumerate(counts):
            if count:
                out[local, :count] = self._apply(self._weights[local], x[local, :count]).to(out.dtype)
        return out

    def dense(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> torch.Tensor:
        """Computes the layer for ``x [T, H]`` with no exchange, expert by expert: ``[T, H] float32``."""
        out = torch.zeros(x.shape[0], self.hidden, dtype=torch.float32, device=x.device)
        for expert in range(num_experts):
            rows, ks = (topk_idx == expert).nonzero(as_tuple=True)
            if len(rows):
                result = self._apply(self._make(expert), x[rows])
                out.index_add_(0, rows, result * topk_weights[rows, ks].unsqueeze(1))
        return out


def cast_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts ``x [T, H]`` to e4m3 by blocks of 128: ``[T, H]`` and scales ``[T, H / 128] float32``."""
    blocks = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    amax = blocks.abs().amax(dim=2).clamp_min(1e-4)
    factor = torch.full_like(amax, FP8_MAX) / amax  # a number / tensor would be a reciprocal and a product
    data = (blocks * factor.unsqueeze(2)).to(torch.float8_e4m3fn)
    return data.view(x.shape), amax / FP8_MAX


def uncast_fp8(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of fp8 ``data [..., H]`` with ``scales [..., H / 128]``."""
    blocks = data.float().view(*data.shape[:-1], data.shape[-1] // 128, 128)
    return (blocks * scales.unsqueeze(-1)).view(data.shape)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference of any row, in units of that row's largest expected magnitude.

    A result of another shape, or one that is not finite, has an infinite error; rows that must be zero count
    their difference as it is.
    """
    if result.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (result.float() - expected.float()).abs().amax(dim=1)
    if not bool(torch.isfinite(difference).all()):
        return math.inf
    size = expected.float().abs().amax(dim=1)
    return float((difference / torch.where(size > 0, size, torch.ones_like(size))).max())
