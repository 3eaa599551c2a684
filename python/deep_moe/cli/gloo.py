"""The same exchange by plain torch.distributed collectives: gather, all_to_all_single, scatter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .experts import local_experts, ranks_of_tokens


def exchange_counts(counts: torch.Tensor) -> torch.Tensor:
    """Sends ``counts[r]`` to rank r and returns ``[R] int64``, what each rank has sent here."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return received


@dataclass
class GlooHandle:
    """What dispatch keeps for combine."""

    order: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    num_tokens: int


@dataclass
class GlooRows:
    """Rows in order of source rank and token, with local expert ids (-1 elsewhere) and weights."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def _exchange(rows: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> torch.Tensor:
    received = torch.empty(sum(recv_splits), rows.shape[1], dtype=rows.dtype)
    dist.all_to_all_single(received, rows, recv_splits, send_splits)
    return received


def gloo_dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> tuple[GlooRows, GlooHandle]:
    """Sends each row of ``x [T, H]`` once to every rank that owns one of its experts, with ids and weights.

    Three collectives: the counts, the rows, and ids with weights packed into one array.
    """
    num_ranks, rank, topk = dist.get_world_size(), dist.get_rank(), topk_idx.shape[1]
    is_in = ranks_of_tokens(topk_idx, num_ranks, num_experts)
    order = is_in.t().nonzero()[:, 1].contiguous()
    counts = is_in.sum(dim=0)
    send_splits, recv_splits = counts.tolist(), exchange_counts(counts).tolist()
    extra = torch.cat([topk_idx.to(torch.int32), topk_weights.view(torch.int32)], dim=1)
    rows = _exchange(x.index_select(0, order), send_splits, recv_splits)
    extra = _exchange(extra.index_select(0, order), send_splits, recv_splits)
    mine = local_experts(rank, num_ranks, num_experts)
    global_idx = extra[:, :topk].to(torch.int64)
    is_local = (global_idx >= mine.start) & (global_idx < mine.stop)
    received = GlooRows(
        x=rows,
        topk_idx=torch.where(is_local, global_idx - mine.start, -1),
        topk_weights=torch.where(is_local, extra[:, topk:].contiguous().view(torch.float32), 0.0),
    )
    return received, GlooHandle(order, send_splits, recv_splits, x.shape[0])


def gloo_combine(y: torch.Tensor, handle: GlooHandle) -> torch.Tensor:
    """Sends the rows ``y [N, H]`` back and sums them per token: ``[T, H]`` in y's type.

    The sum is ``index_add_`` in y's own type: for 16-bit types less exact, but much quicker than by float32.
    """
    rows = _exchange(y, handle.recv_splits, handle.send_splits)
    out = torch.zeros(handle.num_tokens, y.shape[1], dtype=y.dtype)
    return out.index_add_(0, handle.order, rows)
