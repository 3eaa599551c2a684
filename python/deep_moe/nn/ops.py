"""The operators behind :mod:`deep_moe.nn`: dispatch, dispatch_by_handle, combine of ``torch.ops.deep_moe``.

A Buffer travels as its key, a string, so that graphs hold no object. Everything that decides a shape is an
argument, so the fake kernels need no Buffer. Outputs that a call does not have are empty.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from .._base import find_buffer
from ..events import EventHandle, EventOverlap

__all__ = ["combine", "dispatch", "dispatch_by_handle", "handle_parts", "take_event"]

NUM_ARRIVED, NUM_RECV = 2, 1  # words of a handle's meta
META_WORDS = 9  # on a GPU that knows its counts R more; on GPUs of several nodes one more

_last = threading.local()


def take_event() -> EventHandle | None:
    """The event of this thread's last asynchronous call, once."""
    event: EventHandle | None = _last.event
    _last.event = None
    return event


def _leave_event(event: EventOverlap, later: bool) -> None:
    if later:
        _last.event = event.event


def handle_parts(parts: Sequence[Tensor], num_nodes: int) -> list[Tensor]:
    """A handle's tensors, of those that :func:`dispatch` gives: within a node three of them are empty."""
    return list(parts) if num_nodes > 1 else [*parts[:4], parts[7]]


def _clear_tail(rows: Tensor, handle: Sequence[Tensor]) -> Tensor:
    """Zeroes the rows that nothing has arrived for: they are multiplied for the experts' gradients."""
    return rows.masked_fill_(handle[1].unsqueeze(1) < 0, 0)


def _has_tail(handle: Sequence[Tensor]) -> bool:
    return bool(handle[-1][NUM_RECV] != handle[-1][NUM_ARRIVED])


def _none(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


# ---- dispatch ----
@custom_op(
    "deep_moe::dispatch",
    mutates_args=(),
    schema="(str buffer, Tensor x, Tensor topk_idx, Tensor? topk_weights, int num_experts, "
    "int num_local_experts, int num_ranks, int num_nodes, SymInt num_worst_tokens, int expert_alignment, "
    "bool async_finish) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor)",
)
def dispatch(
    buffer: str,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    num_local_experts: int,
    num_ranks: int,
    num_nodes: int,
    num_worst_tokens: int,
    expert_alignment: int,
    async_finish: bool,
) -> tuple[Tensor, ...]:
    """``(rows, ids, weights, counts, *handle)``, with as many outputs on one node as between several."""
    rows, ids, weights, counts, handle, event = find_buffer(buffer).dispatch(
        x.contiguous(),
        topk_idx=topk_idx.contiguous(),
        topk_weights=None if topk_weights is None else topk_weights.contiguous(),
        num_experts=num_experts,
        num_worst_tokens=num_worst_tokens,
        expert_alignment=expert_alignment,
        async_finish=async_finish,
    )
    _leave_event(event, async_finish)
    if num_worst_tokens:
        _clear_tail(rows, handle)
    assert ids is not None
    if num_nodes == 1:
        handle = (*handle[:4], *(x.new_empty(0, dtype=torch.int32) for _ in range(3)), handle[4])
    return (
        rows,
        ids,
        _none(x) if weights is None else weights,
        torch.tensor(counts, dtype=torch.int64),
        *handle,
    )


@dispatch.register_fake
def _(
    buffer: str,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    num_local_experts: int,
    num_ranks: int,
    num_nodes: int,
    num_worst_tokens: int,
    expert_alignment: int,
    async_finish: bool,
) -> tuple[Tensor, ...]:
    padded = not (isinstance(num_worst_tokens, int) and num_worst_tokens == 0)
    num_recv = num_worst_tokens if padded else get_ctx().new_dynamic_size()
    num_tokens, topk = topk_idx.shape
    on_gpu, between = x.device.type == "cuda", num_nodes > 1
    known = num_ranks if on_gpu and not padded else 0
    # Between nodes on a GPU the columns for ranks and those for nodes lie side by side.
    pitch = num_ranks + num_nodes if on_gpu and between else 0

    def table(width: int, dtype: torch.dtype) -> Tensor:
        return x.new_empty_strided((num_tokens, width), (pitch or width, 1), dtype=dtype)

    words = [x.new_empty(0, dtype=torch.int32) for _ in range(3)]
    if between:
        num_local_ranks = num_ranks // num_nodes
        known_rows = on_gpu and padded
        num_forwarded: Any = num_recv * num_local_ranks if known_rows else get_ctx().new_dynamic_size()
        words = [
            table(num_nodes, torch.int32),
            x.new_empty((2, num_nodes) if on_gpu else (num_nodes,), dtype=torch.int32),
            x.new_empty((num_forwarded, num_local_ranks), dtype=torch.int32),
        ]
    return (
        x.new_empty((num_recv, x.shape[1])),
        topk_idx.new_empty((num_recv, topk)),
        _none(x) if topk_weights is None else topk_weights.new_empty((num_recv, topk)),
        torch.empty(0 if padded else num_local_experts, dtype=torch.int64),
        x.new_empty((num_ranks, num_ranks), dtype=torch.int32),
        x.new_empty(num_recv, dtype=torch.int32),
        table(num_ranks, torch.bool),
        table(num_ranks, torch.int32),
        *words,
        torch.empty(META_WORDS + known + int(on_gpu and between), dtype=torch.int64),
    )


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.buffer, ctx.has_weights = inputs[0], inputs[3] is not None
    ctx.save_for_backward(output[1], *handle_parts(output[4:], inputs[7]))


def _dispatch_backward(
    ctx: Any, grad_rows: Tensor, _ids: Any, grad_weights: Tensor, *_: Any
) -> tuple[Any, ...]:
    ids, *handle = ctx.saved_tensors
    # A weight is 0 by definition where its expert is elsewhere; only its owner's rank knows its gradient.
    of_mine = torch.where(ids >= 0, grad_weights, 0.0) if ctx.has_weights else None
    grad_x, grad_topk = combine(ctx.buffer, grad_rows, handle, of_mine, None, False)
    return None, grad_x, None, grad_topk if ctx.has_weights else None, *([None] * 7)


dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_context)


# ---- dispatch by handle ----
@custom_op(
    "deep_moe::dispatch_by_handle",
    mutates_args=(),
    schema="(str buffer, Tensor x, Tensor? weights, Tensor[] handle) -> (Tensor, Tensor)",
)
def dispatch_by_handle(
    buffer: str, x: Tensor, weights: Tensor | None, handle: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """``(rows, weights)``: weights ``[T, K]`` go with the rows, as scales would."""
    rows: Tensor
    of_rows: Tensor
    if weights is None:
        rows, of_rows = find_buffer(buffer).dispatch(x.contiguous(), tuple(handle))[0], _none(x)
    else:
        both = (x.contiguous(), weights.contiguous())
        rows, of_rows = find_buffer(buffer).dispatch(both, tuple(handle))[0]
    if _has_tail(handle):
        _clear_tail(rows, handle)
        if weights is not None:
            _clear_tail(of_rows, handle)
    return rows, of_rows


@dispatch_by_handle.register_fake
def _(buffer: str, x: Tensor, weights: Tensor | None, handle: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    num_recv = handle[1].shape[0]
    of_rows = _none(x) if weights is None else weights.new_empty((num_recv, weights.shape[1]))
    return x.new_empty((num_recv, x.shape[1])), of_rows


def _by_handle_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.buffer, ctx.has_weights = inputs[0], inputs[2] is not None
    ctx.save_for_backward(*inputs[3])


def _by_handle_backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
    handle = list(ctx.saved_tensors)
    weights = grad_weights if ctx.has_weights else None
    grad_x, summed = combine(ctx.buffer, grad_rows, handle, weights, None, False)
    return None, grad_x, summed if ctx.has_weights else None, [None] * len(handle)


dispatch_by_handle.register_autograd(_by_handle_backward, setup_context=_by_handle_context)


# ---- combine ----
@custom_op(
    "deep_moe::combine",
    mutates_args=(),
    schema="(str buffer, Tensor x, Tensor[] handle, Tensor? topk_weights, Tensor? bias, bool async_finish) "
    "-> (Tensor, Tensor)",
)
def combine(
    buffer: str,
    x: Tensor,
    handle: Sequence[Tensor],
    topk_weights: Tensor | None,
    bias: Tensor | None,
    async_finish: bool,
) -> tuple[Tensor, Tensor]:
    """``(sums, weights)``"""
    summed, weights, event = find_buffer(buffer).combine(
        x.contiguous(),
        tuple(handle),
        topk_weights=None if topk_weights is None else topk_weights.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        async_finish=async_finish,
    )
    _leave_event(event, async_finish)
    return summed, _none(x) if weights is None else weights


@combine.register_fake
def _(
    buffer: str,
    x: Tensor,
    handle: Sequence[Tensor],
    topk_weights: Tensor | None,
    bias: Tensor | None,
    async_finish: bool,
) -> tuple[Tensor, Tensor]:
    num_tokens = handle[3].shape[0]
    weights = (
        _none(x) if topk_weights is None else topk_weights.new_empty((num_tokens, topk_weights.shape[1]))
    )
    return x.new_empty((num_tokens, x.shape[1])), weights


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.buffer, ctx.has_weights, ctx.has_bias = inputs[0], inputs[3] is not None, inputs[4] is not None
    ctx.save_for_backward(*inputs[2])


def _combine_backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Any, ...]:
    handle = list(ctx.saved_tensors)
    weights = grad_weights if ctx.has_weights else None
    rows, of_rows = dispatch_by_handle(ctx.buffer, grad_x, weights, handle)
    of_weights = of_rows if ctx.has_weights else None
    return None, rows, [None] * len(handle), of_weights, grad_x if ctx.has_bias else None, None


combine.register_autograd(_combine_backward, setup_context=_combine_context)
