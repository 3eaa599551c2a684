"""Dispatch and combine with gradients, for layers that train; ``torch.compile`` takes them into its graphs.

The backward of a dispatch is the combine of its gradients; that of a combine is the dispatch of its gradients
along the same ways. Both directions are collective: every rank of the Buffer makes the same calls in the same
order, and runs the backward of a call if any rank does, also a rank without tokens.

``import deep_moe`` does not import this; ``import deep_moe.nn`` does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..buffer import Buffer
from ..events import EventOverlap
from ..handles import DispatchHandle, InternodeDispatchHandle
from . import ops

__all__ = ["Combined", "Dispatched", "combine", "dispatch", "dispatch_by_handle"]


class Dispatched(NamedTuple):
    """What a rank has after :func:`dispatch`: N rows for its L local experts."""

    x: Tensor
    """[N, H] of the input's dtype, ordered by source rank, then source token. Has gradients."""
    topk_idx: Tensor
    """[N, K] of the input's dtype: local expert ids, -1 where the expert is elsewhere."""
    topk_weights: Tensor | None
    """[N, K] float32, 0 where the id is -1. Has gradients."""
    num_tokens_per_expert: Tensor | None
    """[L] int64 on the CPU: entries of topk_idx for each local expert; None with num_worst_tokens."""
    handle: DispatchHandle | InternodeDispatchHandle
    """For :func:`combine` and :func:`dispatch_by_handle`."""
    event: EventOverlap
    """What to wait for if ``async_finish``; otherwise there is nothing to wait for."""


class Combined(NamedTuple):
    """What a rank has after :func:`combine`: sums for its own T tokens."""

    x: Tensor
    """[T, H] of the rows' dtype. Has gradients."""
    topk_weights: Tensor | None
    """[T, K] float32, the weights' sums; None without weights. Has gradients."""
    event: EventOverlap
    """As in :class:`Dispatched`."""


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    num_experts: int,
    num_worst_tokens: int = 0,
    expert_alignment: int = 1,
    async_finish: bool = False,
) -> Dispatched:
    """Sends each token once to every rank that owns one of its experts. Collective, and so is its backward.

    Backward: a token's gradient is the sum of its rows' gradients; the gradient of a weight comes from the
    rank that owns its expert.

    Args:
        buffer: of all the ranks.
        x: ``[T, H]`` bfloat16, float16 or float32 on the Buffer's device.
        topk_idx: ``[T, K]`` int64 or int32, global expert ids, -1 for none.
        topk_weights: ``[T, K]`` float32.
        num_experts: E.
        num_worst_tokens: if not 0, the number of rows of all results; those past the ones that arrived are
            0. No size depends on the routing then, so that ``torch.compile`` needs no setting.
        expert_alignment: each count is rounded up to a multiple of it.
        async_finish: use the results only behind ``event`` (``with event: ...``). Compiled code orders its
            own work: there the call is synchronous all the same. Not with num_worst_tokens.

    Raises:
        ValueError, TypeError: wrong arguments, as :meth:`deep_moe.Buffer.dispatch`.
    """
    if async_finish and num_worst_tokens:
        with buffer._dispatch_checks:  # so that the peers do not wait
            raise ValueError(
                "async_finish=True together with num_worst_tokens: the call fills the rows behind; pass one"
            )
    num_ranks = buffer.group_size
    num_local_experts = num_experts // num_ranks + int(buffer.rank < num_experts % num_ranks)
    later = async_finish and not torch.compiler.is_compiling()
    num_nodes = buffer.num_nodes
    rows, ids, weights, counts, *parts = ops.dispatch(
        buffer.key,
        x,
        topk_idx,
        topk_weights,
        num_experts,
        num_local_experts,
        num_ranks,
        num_nodes,
        num_worst_tokens,
        expert_alignment,
        later,
    )
    handle = ops.handle_parts(parts, num_nodes)
    return Dispatched(
        rows,
        ids,
        None if topk_weights is None else weights,
        None if num_worst_tokens else counts,
        InternodeDispatchHandle(*handle) if num_nodes > 1 else DispatchHandle(*handle),
        EventOverlap(ops.take_event() if later else None),
    )


def combine(
    buffer: Buffer,
    x: Tensor,
    handle: DispatchHandle | InternodeDispatchHandle,
    topk_weights: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    async_finish: bool = False,
) -> Combined:
    """Adds up each token's rows, without weights. Collective, and so is its backward.

    Backward: every row gets the gradient of its token.

    Args:
        buffer: of the dispatch.
        x: ``[N, H]`` bfloat16, float16 or float32, rows as the dispatch gave them.
        handle: of the dispatch.
        topk_weights: ``[N, K]`` float32, summed in the same way.
        bias: ``[T, H]`` of x's dtype, added to every token.
        async_finish: as in :func:`dispatch`.

    Raises:
        ValueError, TypeError: wrong arguments, as :meth:`deep_moe.Buffer.combine`.
    """
    later = async_finish and not torch.compiler.is_compiling()
    summed, weights = ops.combine(buffer.key, x, list(handle), topk_weights, bias, later)
    return Combined(
        summed,
        None if topk_weights is None else weights,
        EventOverlap(ops.take_event() if later else None),
    )


def dispatch_by_handle(buffer: Buffer, x: Tensor, handle: DispatchHandle | InternodeDispatchHandle) -> Tensor:
    """Sends the rows of ``x`` the ways of an earlier dispatch. Collective, and so is its backward.

    Args:
        buffer: of the dispatch.
        x: ``[T, H]`` bfloat16, float16 or float32.
        handle: of the dispatch.

    Returns:
        ``[N, H]`` of x's dtype. Its backward is a combine.
    """
    rows: Tensor = ops.dispatch_by_handle(buffer.key, x, None, list(handle))[0]
    return rows
