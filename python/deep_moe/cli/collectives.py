"""The same exchange by plain torch.distributed collectives (gloo, NCCL): gather, all_to_all_single, scatter.

``group`` is a process group, None the default one. Tensors are where its backend takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .experts import local_experts, ranks_of_tokens


def exchange_counts(counts: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sends ``counts[r]`` to rank r and returns ``[R] int64``, what each rank has sent here."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


@dataclass
class CollectiveHandle:
    """What dispatch keeps for combine."""

    order: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    num_tokens: int
    group: Any


@dataclass
class CollectiveRows:
    """Rows in order of source rank and token, with local expert ids (-1 elsewhere) and weights."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def _exchange(rows: torch.Tensor, send_splits: list[int], recv_splits: list[int], group: Any) -> torch.Tensor:
    received = torch.empty(sum(recv_splits), rows.shape[1], dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(received, rows, recv_splits, send_splits, group=group)
    return received


def collective_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    group: Any = None,
) -> tuple[CollectiveRows, CollectiveHandle]:
    """Sends each row of ``x [T, H]`` once to every rank that owns one of its experts, with ids and weights.

    Three collectives: the counts, the rows, and ids with weights packed into one array.
    """
    num_ranks, rank, topk = dist.get_world_size(group), dist.get_rank(group), topk_idx.shape[1]
    is_in = ranks_of_tokens(topk_idx, num_ranks, num_experts)
    order = is_in.t().nonzero()[:, 1].contiguous()
    counts = is_in.sum(dim=0)
    send_splits, recv_splits = counts.tolist(), exchange_counts(counts, group).tolist()
    extra = torch.cat([topk_idx.to(torch.int32), topk_weights.view(torch.int32)], dim=1)
    rows = _exchange(x.index_select(0, order), send_splits, recv_splits, group)
    extra = _exchange(extra.index_select(0, order), send_splits, recv_splits, group)
    mine = local_experts(rank, num_ranks, num_experts)
    global_idx = extra[:, :topk].to(torch.int64)
    is_local = (global_idx >= mine.start) & (global_idx < mine.stop)
    received = CollectiveRows(
        x=rows,
        topk_idx=torch.where(is_local, global_idx - mine.start, -1),
        topk_weights=torch.where(is_local, extra[:, topk:].contiguous().view(torch.float32), 0.0),
    )
    return received, CollectiveHandle(order, send_splits, recv_splits, x.shape[0], group)


def collective_combine(y: torch.Tensor, handle: CollectiveHandle) -> torch.Tensor:
    """Sends the rows ``y [N, H]`` back and sums them per token: ``[T, H]`` in y's type.

    The sum is ``index_add_`` in y's own type: for 16-bit types less exact, but much quicker than by float32.
    """
    rows = _exchange(y, handle.recv_splits, handle.send_splits, handle.group)
    out = torch.zeros(handle.num_tokens, y.shape[1], dtype=y.dtype, device=y.device)
    return out.index_add_(0, handle.order, rows)
