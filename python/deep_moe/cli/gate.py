"""Routing: a gate over embeddings, made-up skews, and saved top-k arrays.

All give ``topk_idx [T, K] int64`` (global expert ids, -1 = none) and ``topk_weights [T, K] float32``.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

Routes = tuple[torch.Tensor, torch.Tensor]


def gate_weight(hidden: int, num_experts: int, seed: int) -> torch.Tensor:
    """Returns the gate's matrix ``[hidden, num_experts] float32``, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden, num_experts, generator=generator).div_(math.sqrt(hidden))


def choose(scores: torch.Tensor, topk: int, groups: int = 0, topk_groups: int = 0) -> Routes:
    """Picks ``topk`` experts a row from ``scores [T, E]``, best first, and normalises their scores to sum 1.

    With ``groups`` > 0 the experts form that many equal blocks; a block is scored by the sum of its two best
    experts, and only the ``topk_groups`` best blocks of a row are eligible.
    """
    num_tokens, num_experts = scores.shape
    eligible = scores
    if groups > 0:
        blocks = scores.view(num_tokens, groups, num_experts // groups)
        block_scores = blocks.topk(min(2, blocks.shape[2]), dim=2).values.sum(dim=2)
        kept = torch.zeros_like(block_scores, dtype=torch.bool)
        kept.scatter_(1, block_scores.topk(topk_groups, dim=1).indices, True)
        eligible = blocks.masked_fill(~kept.unsqueeze(2), -math.inf).view(num_tokens, num_experts)
    topk_idx = eligible.topk(topk, dim=1).indices
    weights = scores.gather(1, topk_idx)
    return topk_idx, weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-20)


def run_gate(
    x: torch.Tensor, weight: torch.Tensor, kind: str, topk: int, groups: int = 0, topk_groups: int = 0
) -> Routes:
    """Routes ``x [T, H]`` by a linear gate, scored by ``softmax`` or ``sigmoid``, then :func:`choose`."""
    logits = x.float() @ weight
    scores = logits.softmax(dim=1) if kind == "softmax" else logits.sigmoid()
    return choose(scores, topk, groups, topk_groups)


def made_up_routes(kind: str, num_tokens: int, num_experts: int, topk: int, seed: int) -> Routes:
    """Draws routes of a known skew.

    ``uniform``: every expert alike. ``zipf``: expert e with odds 1 / (1 + e). ``hot``: expert 0 in every row,
    the others alike. The experts of a row are distinct; weights are random and sum to 1.
    """
    generator = torch.Generator().manual_seed(seed)
    odds = torch.zeros(num_experts)
    if kind == "zipf":
        odds = -torch.log1p(torch.arange(num_experts, dtype=torch.float32))
    elif kind == "hot":
        odds[0] = math.inf
    elif kind != "uniform":
        raise ValueError(f"routing: got {kind!r}; allowed are uniform, zipf and hot")
    noise = torch.rand(num_tokens, num_experts, generator=generator).clamp_(1e-6, 1 - 1e-6)
    topk_idx = (odds - torch.log(-torch.log(noise))).topk(topk, dim=1).indices
    weights = torch.rand(num_tokens, topk, generator=generator) + 0.1
    return topk_idx, weights / weights.sum(dim=1, keepdim=True)


def load_trace(path: str) -> torch.Tensor:
    """Reads a saved top-k array: ``.npy`` or ``.pt``, integers, ``[..., T, K]``; returns ``[N, K] int64``."""
    file = Path(path)
    if file.suffix not in (".npy", ".pt", ".pth"):
        raise ValueError(f"trace: got {file.name}; allowed are files that end in .npy, .pt or .pth")
    try:
        if file.suffix == ".npy":
            trace = torch.from_numpy(np.load(file, allow_pickle=False))
        else:
            trace = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"trace: there is no file {path}") from None
    except Exception as error:
        raise ValueError(
            f"trace: {file.name} cannot be read as a saved array ({type(error).__name__})"
        ) from error
    if (
        not isinstance(trace, torch.Tensor)
        or trace.dtype.is_floating_point
        or trace.ndim < 2
        or not trace.numel()
    ):
        raise ValueError(
            f"trace: {file.name} must hold one array of integers of at least 2 dimensions [..., T, K]"
        )
    trace = trace.reshape(-1, trace.shape[-1]).to(torch.int64).contiguous()
    if int(trace.min()) < -1:
        raise ValueError(
            f"trace: {file.name} holds the id {int(trace.min())}; allowed are expert ids and -1 (none)"
        )
    return trace


def trace_routes(trace: torch.Tensor, begin: int, num_tokens: int, seed: int) -> Routes:
    """Takes rows of ``trace`` from ``begin`` on (it starts again where it ends), with random weights."""
    rows = (torch.arange(num_tokens) + begin) % trace.shape[0]
    topk_idx = trace[rows]
    weights = torch.rand(topk_idx.shape, generator=torch.Generator().manual_seed(seed)) + 0.1
    weights = weights.masked_fill(topk_idx < 0, 0.0)
    return topk_idx, weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-20)
