"""High-throughput exchanges between ranks that go round the GPUs: rows bit for bit, sums exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import reference

from ..support.attempts import attempt
from ..support.compare import same_bits, same_values
from ..support.gpu import ONE, WORLDS, World, on_gpu
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case, Inputs
from ..support.program import BufferOptions, Program

pytestmark = pytest.mark.gpus(1)

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
MAX_RANKS = max(world.ranks for world in WORLDS)


@pytest.fixture(params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.param
    return found


def case(name: str, tokens: tuple[int, ...] = (33, 20, 7, 16), **changes: Any) -> Case:
    return Case(name, tokens).but(**changes)


def of(ranks: int, whole: Case) -> Case:
    """The case on its first ranks."""
    return whole.but(tokens=whole.tokens[:ranks])


CASES = [
    case("bf16"),
    case("fp16", dtype=fp16),
    case("fp32", dtype=fp32),
    case("fp8", payload="fp8"),
    case("fp8-columns", payload="fp8_columns"),
    case("ue8m0", payload="ue8m0"),
    case("one-scale", payload="one_scale"),
    case("odd-scales", payload="opaque"),
    case("int32-ids", idx_dtype=torch.int32),
    case("a-rank-empty", tokens=(0, 16, 9, 0)),
    case("all-empty", tokens=(0, 0, 0, 0)),
    case("one-token", tokens=(1, 1, 1, 1)),
    case("nothing-selected", routing="none"),
    case("none-among-valid", routing="mixed"),
    case("half-go-nowhere", routing="half"),
    case("duplicates", routing="repeated"),
    case("hot-expert", routing="hot"),
    case("to-rank-0", routing="rank0"),
    case("fewer-experts-than-ranks", experts=3, topk=2),
    case("9-experts", experts=9),
    case("topk-1", topk=1),
    case("topk-16", topk=16, experts=60),
    case("smallest-row", hidden=8),
    case("hidden-2880", hidden=2880),
    case("hidden-7168", hidden=7168, tokens=(300, 256, 128, 100), experts=64, topk=8),
]


@pytest.mark.parametrize("whole", CASES, ids=str)
def test_round_trip(whole: Case, world: World) -> None:
    """Fused and V1 dispatch, other rows by the handle, weights and biases; a heap that grows from 0."""
    one = of(world.ranks, whole)
    given = one.inputs()
    world.run_program(
        Program(
            [
                Dispatch(given, path="fused"),
                Combine(0, seed=1, biases=1),
                CachedDispatch(0, one.rows(seed=3), plain_handle=True),
                Combine(0, seed=2, biases=2, in_heap=True),
                Dispatch(given, path="v1", alignment=16),
                Combine(4, seed=3, weights=False),
            ]
        )
    )


@pytest.mark.parametrize("whole", [CASES[0], CASES[4], CASES[9], CASES[12]], ids=str)
def test_num_worst_tokens(whole: Case, world: World) -> None:
    """All rows of the results are there, whatever arrives; what is past the rows that came is filled."""
    one = of(world.ranks, whole)
    most = sum(one.tokens) + 5
    world.run_program(
        Program(
            [
                Dispatch(one.inputs(), path="fused", worst=most),
                Combine(0, seed=1),
                Dispatch(one.inputs(), path="v1", worst=most),
                CachedDispatch(2, one.rows(seed=3)),
                Combine(2, seed=2, biases=1, in_heap=True),
            ],
            (BufferOptions(num_bytes=64 << 20),),
        )
    )


def test_sums_of_another_type(world: World) -> None:
    """What combine sums is of its own type: here fp32 and fp16 after fp8 rows."""
    given = of(world.ranks, CASES[3]).inputs()
    world.run_program(
        Program([Dispatch(given, path="fused"), Combine(0, dtype=fp32), Combine(0, dtype=fp16, biases=2)])
    )


def test_many_calls_reuse_the_heap(world: World) -> None:
    """Forty exchanges whose results all stay alive, on two Buffers in turn."""
    calls: list[Any] = []
    for turn in range(20):
        given = of(world.ranks, CASES[turn % 4].but(seed=turn)).inputs()
        calls += [
            Dispatch(given, path="fused", buffer=turn % 2),
            Combine(2 * turn, seed=turn, buffer=turn % 2),
        ]
    world.run_program(Program(calls, (BufferOptions(), BufferOptions(num_bytes=1 << 20))))


def on_this_rank(given: Inputs, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return on_gpu(given.x[rank]), on_gpu(given.topk_idx[rank]), on_gpu(given.topk_weights[rank])


def job_out(comm: Any, rank: int, given: Inputs) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = on_this_rank(given, rank)
    handle = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=given.experts)[4]
    rows = len(handle.recv_src_idx)
    out = torch.full_like(x, float("nan"))
    combined, _, _ = buffer.combine(
        torch.ones(rows, given.hidden, device="cuda", dtype=bf16), handle, out=out
    )
    assert combined is out
    return out


def test_combine_into_out(world: World) -> None:
    given = of(world.ranks, CASES[0]).inputs()
    for rank, out in enumerate(world.run(job_out, given)):
        ranks = reference.layout(given.topk_idx[rank], given.experts, world.ranks).is_token_in_rank.sum(1)
        same_values(out, ranks.to(bf16).unsqueeze(1).expand_as(out).contiguous(), f"rank {rank}")


def job_foreign_ids(comm: Any, rank: int, given: Inputs) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = on_this_rank(given, rank)
    for at, bad in enumerate((given.experts, given.experts + 1000, -2, -(1 << 40), 1 << 40)):
        idx[at, 0] = bad
    layout = buffer.get_dispatch_layout(idx, given.experts)
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=given.experts)
    return layout[0], layout[2], layout[3], got[0], got[2]


def test_ids_of_no_expert_are_counted_nowhere(world: World) -> None:
    given = of(world.ranks, case("foreign", tokens=(9, 8, 7, 6))).inputs()
    results = world.run(job_foreign_ids, given)
    for idx in given.topk_idx:
        idx[:5, 0] = -1
    received = reference.dispatch(given.x, given.topk_idx, given.experts, given.topk_weights)
    for rank, got in enumerate(results):
        route = reference.layout(given.topk_idx[rank], given.experts, world.ranks)
        same_bits(got[0], route.num_tokens_per_rank, f"rank {rank}, num_tokens_per_rank")
        same_bits(got[1], route.num_tokens_per_expert, f"rank {rank}, num_tokens_per_expert")
        same_bits(got[2], route.is_token_in_rank, f"rank {rank}, is_token_in_rank")
        same_bits(got[3], received[rank].x, f"rank {rank}, recv_x")
        same_bits(got[4], received[rank].topk_weights, f"rank {rank}, recv_topk_weights")


def job_worst_too_small(comm: Any, rank: int, given: Inputs) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = on_this_rank(given, rank)
    arguments: dict[str, Any] = {"topk_idx": idx, "topk_weights": weights, "num_experts": given.experts}

    def call_and_look() -> None:
        buffer.dispatch(x, **arguments, num_worst_tokens=sum(map(len, given.topk_idx)) - 1)
        torch.cuda.current_stream().synchronize()
        buffer.check()

    refused = attempt(call_and_look)
    comm.allgather(None)
    return refused, buffer.dispatch(x, **arguments)[0]


def test_num_worst_tokens_too_small(world: World) -> None:
    """An error on every rank, at the latest when it next looks; and then the Buffer works."""
    given = of(world.ranks, case("all-to-all", experts=8, topk=8)).inputs()
    received = reference.dispatch(given.x, given.topk_idx, given.experts, given.topk_weights)
    for rank, (refused, rows) in enumerate(world.run(job_worst_too_small, given)):
        refused.must_be(ValueError, "num_worst_tokens")
        same_bits(rows, received[rank].x, f"rank {rank}, recv_x")


class DispatchRows(torch.autograd.Function):
    """As published training programs write it: the backward of dispatch is a combine of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, idx: Any, weights: Any, buffer: Any, experts: int) -> Any:
        rows, ids, probs, _, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=experts,
            previous_event=deep_moe.EventOverlap(deep_moe.EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return rows, ids, probs, *handle

    @staticmethod
    def backward(ctx: Any, grad: Any, _ids: Any, grad_probs: Any, *_: Any) -> Any:
        grad_x, grad_weights, event = ctx.buffer.combine(
            grad.contiguous(),
            ctx.saved_tensors,
            topk_weights=grad_probs.float(),
            previous_event=deep_moe.EventOverlap(deep_moe.EventHandle()),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return grad_x, None, grad_weights, None, None


class CombineRows(torch.autograd.Function):
    """The backward of combine is a cached dispatch of the gradients."""

    @staticmethod
    def forward(ctx: Any, y: Any, buffer: Any, *handle: Any) -> Any:
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)[0], *[None] * 6


def job_autograd(comm: Any, rank: int, given: Inputs) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = on_this_rank(given, rank)
    x.requires_grad_()
    weights.requires_grad_()
    rows, ids, probs, *handle = DispatchRows.apply(x, idx, weights, buffer, given.experts)
    here = torch.where(ids >= 0, probs, 0.0)
    out = CombineRows.apply(rows * here.sum(1, keepdim=True), buffer, *handle)
    out.backward(torch.ones_like(out))
    return out, x.grad, weights.grad


@pytest.mark.parametrize("world", [ONE, World("process", 2)], ids=str)
def test_autograd(world: World) -> None:
    """Gradients through dispatch, weighted rows and combine; in whole numbers and eighths, so exactly."""
    given = of(world.ranks, case("training", dtype=fp32)).inputs()
    given.x[:] = [torch.randint(-4, 5, x.shape).float() for x in given.x if isinstance(x, torch.Tensor)]
    given.topk_weights[:] = [(weights * 8).round() / 8 for weights in given.topk_weights]
    for rank, (out, grad_x, grad_weights) in enumerate(world.run(job_autograd, given)):
        x, weights = given.x[rank], given.topk_weights[rank]
        assert isinstance(x, torch.Tensor)
        total = weights.sum(1, keepdim=True)
        same_values(out, x * total, f"rank {rank}, output")
        same_values(grad_x, total.expand_as(x).contiguous(), f"rank {rank}, gradient of x")
        expected = x.sum(1, keepdim=True).expand_as(weights).contiguous()
        same_values(grad_weights, expected, f"rank {rank}, gradient of the weights")
