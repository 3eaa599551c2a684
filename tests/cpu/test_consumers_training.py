"""The calls that published programs for training make, exactly as they make them: each must run unchanged.

They import ``deep_ep``, as the programs do; the shim gives them deep_moe. On GPUs ``gpu/test_consumers``
runs them.
Results are checked against the reference; beyond that it matters that the calls are taken, and that what
comes back has the form that the program relies on.
"""

from __future__ import annotations

from typing import Any

import torch

from deep_moe import reference

from ..support.compare import same_values
from ..support.device import on_cpu, where
from ..support.inputs import Case
from ..support.ranks import run_job
from ..support.shim import deep_ep

CASE = Case("consumer", (12, 9), hidden=512, experts=8, topk=4)
GIVEN = CASE.inputs()

EventHandle, EventOverlap = deep_ep.utils.EventHandle, deep_ep.utils.EventOverlap


class FusedDispatch(torch.autograd.Function):
    """Megatron's: the backward of dispatch is a combine of the gradients, with the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, weights: Any, buffer: Any) -> Any:
        previous = EventOverlap(EventHandle())
        layout = buffer.get_dispatch_layout(
            idx, 8, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, ids, probs, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return rows, ids, probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, grad: Any, _ids: Any, grad_probs: Any, _counts: Any, _handle: Any) -> Any:
        grad_x, grad_weights, event = ctx.buffer.combine(
            grad.contiguous(),
            ctx.handle,
            topk_weights=grad_probs.float(),
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_x, None, grad_weights, None


class FusedCombine(torch.autograd.Function):
    """Megatron's: the backward of combine is a cached dispatch of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, handle: Any, buffer: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        previous = EventOverlap(EventHandle())
        out, _, event = buffer.combine(
            x, handle=handle, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        event.current_stream_wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows, _, _, _, _, event = ctx.buffer.dispatch(
            grad.contiguous(),
            handle=ctx.handle,
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return rows, None, None


def job_megatron(comm: Any, rank: int, given: tuple[list[torch.Tensor], list[torch.Tensor]]) -> Any:
    buffer = deep_ep.Buffer(None, comm=comm)
    x, weights = (where(buffer, part[rank]).clone().requires_grad_() for part in given)
    idx = where(buffer, GIVEN.topk_idx[rank])
    rows, ids, probs, _, handle = FusedDispatch.apply(x, idx, weights, buffer)
    y = rows * torch.where(ids >= 0, probs, 0.0).sum(1, keepdim=True)
    out = FusedCombine.apply(y, handle, buffer)
    out.backward(torch.ones_like(out))
    return on_cpu((out, x.grad, weights.grad))


def test_megatron_autograd(form: str) -> None:
    """Gradients through dispatch, weighted rows and combine are those of the same layer on one rank."""
    whole = [torch.randint(-4, 5, x.shape).float() for x in GIVEN.x if isinstance(x, torch.Tensor)]
    eighths = [(weights * 8).round() / 8 for weights in GIVEN.topk_weights]
    results = run_job(job_megatron, (whole, eighths), form=form)
    for rank, (out, grad_x, grad_weights) in enumerate(results):
        total = eighths[rank].sum(1, keepdim=True)
        same_values(out, whole[rank] * total, f"rank {rank}, output")
        same_values(grad_x, total.expand_as(grad_x).contiguous(), f"rank {rank}, gradient of x")
        expected = whole[rank].sum(1, keepdim=True).expand_as(grad_weights).contiguous()
        same_values(grad_weights, expected, f"rank {rank}, gradient of the weights")


def job_megatron_buffers(comm: Any, rank: int, _: Any) -> Any:
    kept: list[Any] = []

    def get_buffer(hidden_bytes: int) -> Any:
        size = comm.Get_size()
        nvl = rdma = 0
        for config in (deep_ep.Buffer.get_dispatch_config(size), deep_ep.Buffer.get_combine_config(size)):
            nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size), nvl)
            rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size), rdma)
        last = kept[-1] if kept else None
        too_small = last is None or last.num_nvl_bytes < nvl or last.num_rdma_bytes < rdma
        if too_small or last.group != comm:
            kept.append(deep_ep.Buffer(None, nvl, rdma, comm=comm))
        return kept[-1]

    def layer(x: Any) -> Any:
        buffer = get_buffer(x.size(1) * max(x.element_size(), 2))
        idx = where(buffer, GIVEN.topk_idx[rank])
        sent = buffer.dispatch(where(buffer, x), topk_idx=idx, num_experts=8)
        return buffer.combine(sent[0], sent[4])[0]

    narrow, wide = GIVEN.x[rank][:, :256].contiguous(), GIVEN.x[rank]
    return [layer(x) for x in (narrow, narrow, wide, narrow)], len(kept)


def test_megatron_keeps_a_buffer_while_it_is_large_enough(form: str) -> None:
    """It asks the configs for sizes at every layer; a new Buffer is made only if the old one reports less."""
    for rank, (outs, buffers) in enumerate(run_job(job_megatron_buffers, form=form)):
        assert buffers == 2
        ranks = reference.layout(GIVEN.topk_idx[rank], 8, 2).is_token_in_rank.sum(1, keepdim=True)
        for out in outs:
            x = GIVEN.x[rank][:, : out.shape[1]]
            same_values(out, (x.float() * ranks).to(x.dtype), f"rank {rank}")


class SavedHandle(torch.autograd.Function):
    """xtuner's: the handle goes through save_for_backward and comes back as a plain tuple."""

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, buffer: Any) -> Any:
        waits = EventOverlap(None)
        waits.event = deep_ep.Buffer.capture().event
        rows, _, _, _, handle, event = buffer.dispatch(x, topk_idx=idx, num_experts=8, previous_event=waits)
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.buffer.combine(grad, ctx.saved_tensors)[0], None, None


def job_xtuner(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_ep.Buffer(None, comm=comm)
    x = where(buffer, GIVEN.x[rank]).clone().requires_grad_()
    SavedHandle.apply(x, where(buffer, GIVEN.topk_idx[rank]), buffer).float().sum().backward()
    return on_cpu(x.grad)


def test_xtuner_saves_the_handle_for_backward(form: str) -> None:
    for rank, grad in enumerate(run_job(job_xtuner, form=form)):
        ranks = reference.layout(GIVEN.topk_idx[rank], 8, 2).is_token_in_rank.sum(1, keepdim=True)
        same_values(grad, ranks.to(grad.dtype).expand_as(grad).contiguous(), f"rank {rank}")
