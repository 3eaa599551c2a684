"""``deep_moe.nn``: gradients are those of a dense computation of all ranks' tokens, and graphs do not break.

The experts of these tests: expert e turns a row into ``tanh(row * scale[e])``. On GPUs
``gpu/test_nn`` runs them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import deep_moe
import deep_moe.nn as moe
from deep_moe import reference
from deep_moe.comm import ThreadComm

from ..support.attempts import attempt
from ..support.device import on_cpu, settle, where
from ..support.inputs import Case, Inputs
from ..support.program import cut_into_nodes
from ..support.ranks import run_job, run_ranks

CASES = [
    Case("even", (6, 6), hidden=32, experts=4, topk=2),
    Case("odd", (5, 0, 9), hidden=16, experts=7, topk=3, routing="mixed"),
    Case("repeated", (4, 6), hidden=32, experts=5, topk=3, routing="repeated"),
    Case("rank0", (3, 8), hidden=32, experts=6, topk=2, routing="rank0"),
    Case("none", (3, 4), hidden=32, experts=6, topk=2, routing="none"),
    Case("alone", (7,), hidden=32, experts=4, topk=2),
]
FOUR = Case("nodes", (6, 0, 5, 7), hidden=32, experts=10, topk=3, routing="mixed")


def rows_of(given: Inputs, rank: int) -> Tensor:
    x = given.x[rank]
    assert isinstance(x, Tensor)
    return x.float().clone().requires_grad_()


def weights_of(given: Inputs, rank: int) -> Tensor:
    return given.topk_weights[rank].clone().requires_grad_()


def leaf(buffer: deep_moe.Buffer, values: Tensor) -> Tensor:
    """The values on the Buffer's device, for gradients."""
    return where(buffer, values.detach()).clone().requires_grad_()


def mine(buffer: deep_moe.Buffer, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rows, ids and weights on the Buffer's device; rows and weights have gradients."""
    rank = buffer.rank
    x, weights = leaf(buffer, rows_of(given, rank)), leaf(buffer, given.topk_weights[rank])
    return x, where(buffer, given.topk_idx[rank]), weights


def scales_of(case: Case) -> Tensor:
    return torch.linspace(0.5, 1.5, case.experts * case.hidden).reshape(case.experts, case.hidden)


def experts(rows: Tensor, ids: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """The weighted sum of what each row's local experts make of it."""
    out = torch.tanh(rows.unsqueeze(1) * scales[ids.clamp(min=0)])
    return (out * torch.where(ids >= 0, weights, 0.0).unsqueeze(2)).sum(1)


def layer(
    buffer: deep_moe.Buffer,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor,
    case: Case,
    worst: int = 0,
) -> Tensor:
    sent = moe.dispatch(buffer, x, ids, weights, num_experts=case.experts, num_worst_tokens=worst)
    assert sent.topk_weights is not None
    y = experts(sent.x, sent.topk_idx, sent.topk_weights, scales)
    return moe.combine(buffer, y, sent.handle).x


def local_scales(case: Case, rank: int, ranks: int) -> Tensor:
    mine = reference.experts_of(rank, ranks, case.experts)
    return scales_of(case)[mine.start : mine.stop].clone().requires_grad_()


def gradients(
    case: Case, comm: Any, rank: int, worst: bool = False, backend: str = "", fullgraph: bool = True
) -> Any:
    """Output and gradients of one rank; the loss weighs every element differently."""
    buffer = deep_moe.Buffer(None, comm=comm)
    ranks = comm.Get_size()
    x, idx, weights = mine(buffer, case.inputs())
    scales = leaf(buffer, local_scales(case, rank, ranks))
    run = torch.compile(layer, backend=backend, fullgraph=fullgraph) if backend else layer
    rows = ranks * max(case.tokens) if worst else 0
    for _ in range(2):  # the second time compiled code is there
        x.grad = weights.grad = scales.grad = None
        out = run(buffer, x, idx, weights, scales, case, rows)
        (out * loss_weights(out)).sum().backward()
    return on_cpu((out, x.grad, weights.grad, scales.grad))


def loss_weights(out: Tensor) -> Tensor:
    return torch.arange(out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape).sin()


def apart(call: Callable[[], Any]) -> Any:
    """What the call gives in a child, without GPUs: backward starts threads, and takes GPUs that it sees.

    Ranks could not be forked any more from a process that has done so.
    """

    def alone(comm: Any, rank: int) -> Any:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return call()

    return run_ranks(alone, 1)[0]


@functools.cache
def dense_gradients(case: Case) -> list[tuple[Tensor, ...]]:
    """The same by one process that holds all tokens and experts."""
    found: list[tuple[Tensor, ...]] = apart(lambda: dense_layer(case))
    return found


def dense_layer(case: Case) -> list[tuple[Tensor, ...]]:
    given, ranks = case.inputs(), len(case.tokens)
    scales = scales_of(case).requires_grad_()
    xs = [rows_of(given, rank) for rank in range(ranks)]
    weights = [weights_of(given, rank) for rank in range(ranks)]
    outs = [experts(x, idx, w, scales) for x, idx, w in zip(xs, given.topk_idx, weights, strict=True)]
    sum((out * loss_weights(out)).sum() for out in outs).backward()  # type: ignore[union-attr]
    found: list[Any] = []
    for rank in range(ranks):
        mine = reference.experts_of(rank, ranks, case.experts)
        grad = scales.grad[mine.start : mine.stop] if scales.grad is not None else None
        found.append((outs[rank].detach(), xs[rank].grad, weights[rank].grad, grad))
    return found


def same_gradients(case: Case, results: list[Any]) -> None:
    for rank, (got, want) in enumerate(zip(results, dense_gradients(case), strict=True)):
        for name, one, other in zip(("output", "x", "weights", "experts"), got, want, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, r=rank, n=name: f"rank {r}, {n}: {text}")


def job_gradients(comm: Any, rank: int, work: tuple[Case, bool]) -> Any:
    case, worst = work
    return gradients(case, comm, rank, worst)


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_the_dense_layer(case: Case, worst: bool, form: str) -> None:
    same_gradients(case, run_job(job_gradients, (case, worst), ranks=len(case.tokens), form=form))


def job_between_nodes(comm: Any, rank: int, work: tuple[Case, int, bool]) -> Any:
    case, local_ranks, worst = work
    with cut_into_nodes(comm, local_ranks):
        return gradients(case, comm, rank, worst)


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
@pytest.mark.parametrize("local_ranks", [1, 2])
def test_gradients_between_nodes(local_ranks: int, worst: bool, form: str) -> None:
    same_gradients(FOUR, run_job(job_between_nodes, (FOUR, local_ranks, worst), ranks=4, form=form))


def job_by_handle_between_nodes(comm: Any, rank: int, case: Case) -> Any:
    with cut_into_nodes(comm, 2):
        return job_by_handle(comm, rank, case)


def job_what_comes_back(comm: Any, rank: int, case: Case) -> Any:
    buffer, given = deep_moe.Buffer(None, comm=comm), case.inputs()
    x, idx, weights = (where(buffer, part[rank]) for part in (given.x, given.topk_idx, given.topk_weights))
    sent = moe.dispatch(buffer, x, idx, weights, num_experts=case.experts, expert_alignment=4)
    bare = moe.dispatch(buffer, x, idx, num_experts=case.experts)
    fixed = moe.dispatch(buffer, x, idx, weights, num_experts=case.experts, num_worst_tokens=40)
    assert bare.topk_weights is None and fixed.num_tokens_per_expert is None
    assert moe.combine(buffer, bare.x, bare.handle).topk_weights is None
    assert sent.event.event is None and isinstance(sent.handle, deep_moe.DispatchHandle)
    tail = [part[sent.x.shape[0] :] for part in (fixed.x, fixed.topk_weights)]
    return on_cpu((sent.x, sent.topk_idx, sent.topk_weights, sent.num_tokens_per_expert, tail))


def test_what_comes_back(form: str) -> None:
    case = CASES[1]
    given = case.inputs()
    expected = reference.dispatch(
        given.x, given.topk_idx, case.experts, given.topk_weights, expert_alignment=4
    )
    for got, want in zip(run_job(job_what_comes_back, case, ranks=3, form=form), expected, strict=True):
        x, ids, weights, counts, tail = got
        assert torch.equal(x, want.x) and torch.equal(ids, want.topk_idx)
        assert torch.equal(weights, want.topk_weights) and counts.tolist() == want.num_tokens_per_expert
        assert [part.shape[0] for part in tail] == [40 - x.shape[0]] * 2
        assert all(not part.any() for part in tail)


def job_old_nans(comm: Any, rank: int, case: Case) -> Any:
    buffer = deep_moe.Buffer(None, num_nvl_bytes=1 << 22, comm=comm)
    nans = where(buffer, torch.full((64, case.hidden), torch.nan))
    everywhere = where(buffer, torch.arange(case.experts).repeat(64, 1))
    buffer.dispatch(nans, topk_idx=everywhere, num_experts=case.experts)
    x, idx, _ = mine(buffer, case.inputs())
    scales = leaf(buffer, local_scales(case, rank, 2))
    sent = moe.dispatch(buffer, x, idx, num_experts=case.experts, num_worst_tokens=96)
    y = sent.x * scales.sum(0)
    rows = moe.combine(buffer, y, sent.handle).x
    again = moe.dispatch_by_handle(buffer, rows, sent.handle)
    (again**2).sum().backward()
    return on_cpu((x.grad, scales.grad, again, sent.handle.recv_src_idx))


def test_a_tail_of_old_nans_stays_out_of_the_gradients(form: str) -> None:
    """Rows that nothing arrives for lie where NaNs lay before."""
    for *finite, again, source in run_job(job_old_nans, CASES[0], form=form):
        tail = again[source < 0]
        assert all(torch.isfinite(grad).all() for grad in finite)
        assert len(tail) > 80 and not tail.any()


def job_by_handle(comm: Any, rank: int, case: Case) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = mine(buffer, case.inputs())
    bias = leaf(buffer, torch.full((case.tokens[rank], case.hidden), 0.5))
    sent = moe.dispatch(buffer, x.detach(), idx, weights, num_experts=case.experts)
    rows = moe.dispatch_by_handle(buffer, x, sent.handle)
    settle(buffer)
    assert torch.equal(rows, sent.x) and sent.topk_weights is not None
    back = moe.combine(buffer, rows, sent.handle, sent.topk_weights * 3, bias)
    assert back.topk_weights is not None
    loss = (back.x * loss_weights(back.x)).sum() + (back.topk_weights * loss_weights(weights)).sum()
    loss.backward()
    return on_cpu((back.x, back.topk_weights, x.grad, weights.grad, bias.grad))


def test_gradients_of_weights_bias_and_dispatch_by_handle(form: str) -> None:
    gradients_by_handle(CASES[1], job_by_handle, form)


def test_gradients_by_handle_between_nodes(form: str) -> None:
    gradients_by_handle(FOUR, job_by_handle_between_nodes, form)


def gradients_by_handle(case: Case, job: Callable[[Any, int, Case], Any], form: str) -> None:
    given, ranks = case.inputs(), len(case.tokens)
    results = run_job(job, case, ranks=ranks, form=form)
    for rank, (out, summed, *grads) in enumerate(results):
        idx = given.topk_idx[rank]
        times = reference.layout(idx, case.experts, ranks).is_token_in_rank.sum(1, keepdim=True)
        x, weights = rows_of(given, rank).detach(), given.topk_weights[rank]
        torch.testing.assert_close(out, x * times + 0.5)
        torch.testing.assert_close(summed, torch.where(idx >= 0, weights * 3, 0.0))
        torch.testing.assert_close(grads[0], loss_weights(x) * times)
        torch.testing.assert_close(grads[1], torch.where(idx >= 0, loss_weights(weights) * 3, 0.0))
        torch.testing.assert_close(grads[2], loss_weights(x))


def twice(x: Tensor, out: Tensor) -> Tensor:
    """The gradient of the square of a gradient."""
    (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return second


def job_twice(comm: Any, rank: int, case: Case) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = mine(buffer, case.inputs())
    scales = leaf(buffer, local_scales(case, rank, 2))
    return on_cpu(twice(x, layer(buffer, x, idx, weights.detach(), scales, case)))


def test_gradients_of_gradients(form: str) -> None:
    case = CASES[0]
    wanted = apart(lambda: [dense_twice(case, rank) for rank in range(2)])
    for got, want in zip(run_job(job_twice, case, form=form), wanted, strict=True):
        torch.testing.assert_close(got, want)


def dense_twice(case: Case, rank: int) -> Tensor:
    given = case.inputs()
    x = rows_of(given, rank)
    return twice(x, experts(x, given.topk_idx[rank], given.topk_weights[rank], scales_of(case)))


def job_overlap(comm: Any, rank: int, case: Case) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, _ = mine(buffer, case.inputs())
    sent = moe.dispatch(buffer, x, idx, num_experts=case.experts, async_finish=True)
    assert sent.event.event is not None
    with sent.event(release_handle=True):
        shared = x * 2
    back = moe.combine(buffer, sent.x, sent.handle, async_finish=True)
    assert back.event.event is not None and sent.event.event is None
    with back.event:
        shared = shared + 1
    (back.x + shared).sum().backward()
    wrong = attempt(
        lambda: moe.dispatch(buffer, x, idx, num_experts=4, num_worst_tokens=40, async_finish=True)
    )
    return on_cpu(x.grad), wrong


def test_overlap_by_the_events_context(form: str) -> None:
    case = CASES[0]
    given = case.inputs()
    for rank, (grad, wrong) in enumerate(run_job(job_overlap, case, form=form)):
        times = reference.layout(given.topk_idx[rank], case.experts, 2).is_token_in_rank.sum(1, keepdim=True)
        torch.testing.assert_close(grad, (times + 2.0).expand_as(grad))
        wrong.must_be(ValueError, "async_finish", "num_worst_tokens")


# ---- torch.compile ----
def as_new(comm: Any, rank: int) -> None:
    """Nothing compiled by an earlier job; ranks may be threads, which share what has been."""
    comm.allgather(None)
    if rank == 0 or not isinstance(comm, ThreadComm):
        torch._dynamo.reset()
    comm.allgather(None)


def job_compiled(comm: Any, rank: int, work: tuple[Case, bool]) -> Any:
    case, worst = work
    as_new(comm, rank)
    torch._dynamo.config.capture_dynamic_output_shape_ops = not worst
    return gradients(case, comm, rank, worst, backend="aot_eager")


@pytest.mark.parametrize("worst", [False, True], ids=["exact", "worst"])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_compiled_without_a_graph_break(case: Case, worst: bool, form: str) -> None:
    """Sizes that depend on the routing need torch's setting for them; fixed ones need none."""
    same_gradients(case, run_job(job_compiled, (case, worst), ranks=len(case.tokens), form=form, timeout=200))


def job_compiled_between_nodes(comm: Any, rank: int, case: Case) -> Any:
    as_new(comm, rank)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    with cut_into_nodes(comm, 2):
        return gradients(case, comm, rank, backend="aot_eager")


def test_compiled_between_nodes(form: str) -> None:
    same_gradients(FOUR, run_job(job_compiled_between_nodes, FOUR, ranks=4, form=form, timeout=200))


def job_inductor(comm: Any, rank: int, case: Case) -> Any:
    as_new(comm, rank)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True  # what was compiled for an older operator
    return gradients(case, comm, rank, worst=True, backend="inductor")


@pytest.mark.slow
def test_compiled_by_inductor(process_form: str) -> None:
    same_gradients(CASES[0], run_job(job_inductor, CASES[0], form=process_form, timeout=250))


def job_explain(comm: Any, rank: int, case: Case) -> Any:
    as_new(comm, rank)
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = mine(buffer, case.inputs())
    scales = leaf(buffer, local_scales(case, rank, 2))
    found = torch._dynamo.explain(layer)(buffer, x, idx, weights, scales, case, 24)
    targets = [str(node.target) for node in found.graphs[0].graph.nodes]
    names = [name.removesuffix(".default") for name in targets if name.startswith("deep_moe.")]
    return found.graph_break_count, found.graph_count, names


def test_the_graph_has_the_operators(process_form: str) -> None:
    for found in run_job(job_explain, CASES[0], form=process_form, timeout=200):
        assert found == (0, 1, ["deep_moe.dispatch", "deep_moe.combine"])


def test_without_the_setting_the_graph_breaks_and_the_result_is_right() -> None:
    case = CASES[1]

    def rank_main(comm: Any, rank: int) -> Any:
        return gradients(case, comm, rank, backend="aot_eager", fullgraph=False)

    same_gradients(case, run_ranks(rank_main, len(case.tokens), timeout=200))


def fake_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx and topk_weights of 4 tokens on a GPU, in FakeTensorMode."""
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda:0")
    return x, x.new_empty(4, 2, dtype=torch.int64), x.new_empty(4, 2, dtype=torch.float32)


@pytest.mark.parametrize("worst", [0, 24])
def test_shapes_on_a_gpu_as_the_compiler_sees_them(worst: int) -> None:
    """The fake kernels need none: tensors are where the Buffer puts them, meta is on the CPU."""

    def rank_main(comm: Any, rank: int) -> Any:
        with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
            x, idx, weights = fake_inputs()
            *received, counts, h0, h1, h2, h3, h4, h5, h6, meta = moe.ops.dispatch(
                "none", x, idx, weights, 10, 4, 3, 1, worst, 1, False
            )
            handle = moe.ops.handle_parts([h0, h1, h2, h3, h4, h5, h6, meta], 1)
            assert [tensor.numel() for tensor in (h4, h5, h6)] == [0, 0, 0] and handle[-1] is meta
            back = moe.ops.combine("none", received[0], handle, received[2], None, False)
            again = moe.ops.dispatch_by_handle("none", x, weights, handle)
            rows = received[0].shape[0]
            on_gpu = [*received, h0, h1, h2, h3, *back, *again]
            return (
                {str(tensor.device) for tensor in on_gpu},
                {str(tensor.device) for tensor in (counts, meta)},
                [[int(size) for size in tensor.shape[1:]] for tensor in on_gpu],
                [list(t.shape) for t in (counts, meta, back[0], back[1])],
                all(tensor.shape[0] == rows for tensor in (*received, h1, *again)),
            )

    ((on_gpu, on_cpu, widths, shapes, same_rows),) = run_ranks(rank_main, 1)
    assert (on_gpu, on_cpu, same_rows) == ({"cuda:0"}, {"cpu"}, True)
    assert widths == [[64], [2], [2], [3], [], [3], [3], [64], [2], [64], [2]]
    assert shapes == [[0 if worst else 4], [9 if worst else 12], [4, 64], [4, 2]]


@pytest.mark.parametrize("worst", [0, 24])
def test_shapes_between_nodes_on_gpus_as_the_compiler_sees_them(worst: int) -> None:
    """As a GPU's dispatch between 3 nodes of 2 ranks gives them: columns of ranks and nodes side by side."""

    def rank_main(comm: Any, rank: int) -> Any:
        with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
            x, idx, _ = fake_inputs()
            *_, h2, h3, h4, h5, h6, meta = moe.ops.dispatch(
                "none", x, idx, None, 12, 2, 6, 3, worst, 1, False
            )
            sizes = [[int(size) for size in tensor.shape] for tensor in (h2, h3, h4, h5, meta)]
            forwarded = int(h6.shape[0]) if worst else "any"
            return sizes, [tensor.stride() for tensor in (h2, h3, h4, h5)], forwarded, int(h6.shape[1])

    ((sizes, strides, forwarded, width),) = run_ranks(rank_main, 1)
    assert sizes == [[4, 6], [4, 6], [4, 3], [2, 3], [10 if worst else 16]]
    assert strides == [(9, 1), (9, 1), (9, 1), (3, 1)]
    assert (forwarded, width) == (48 if worst else "any", 2)


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def job_rules(comm: Any, rank: int, work: tuple[Case, int]) -> Any:
    case, worst = work
    as_new(comm, rank)
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = mine(buffer, case.inputs())
    call = (buffer.key, x, idx, weights, case.experts, case.experts, 1, 1, worst, 1, False)
    bare = (buffer.key, x, idx, None, case.experts, case.experts, 1, 1, worst, 1, False)
    rows, _, of_rows, _, *parts = (part.detach() for part in moe.ops.dispatch(*call))
    handle = moe.ops.handle_parts(parts, 1)
    for tensor in (rows, of_rows):
        tensor.requires_grad_()
    bias = leaf(buffer, torch.ones(case.tokens[0], case.hidden))
    for op, arguments in (
        (moe.ops.dispatch, call),
        (moe.ops.dispatch, bare),
        (moe.ops.dispatch_by_handle, (buffer.key, x, weights, handle)),
        (moe.ops.dispatch_by_handle, (buffer.key, x, None, handle)),
        (moe.ops.combine, (buffer.key, rows, handle, of_rows, bias, False)),
        (moe.ops.combine, (buffer.key, rows, handle, None, None, False)),
    ):
        # A handle has the number of its call, so that two dispatches are never equal.
        checks = ALL_CHECKS[:3] if op is moe.ops.dispatch else ALL_CHECKS
        torch.library.opcheck(op, arguments, test_utils=checks)
    return len(handle)


def job_rules_between_nodes(comm: Any, rank: int, case: Case) -> Any:
    as_new(comm, rank)
    with cut_into_nodes(comm, 1):
        buffer = deep_moe.Buffer(None, comm=comm)
    x, idx, weights = mine(buffer, case.inputs())
    call = (buffer.key, x, idx, weights, case.experts, case.experts // 2, 2, 2, 0, 1, False)
    torch.library.opcheck(moe.ops.dispatch, call, test_utils=("test_schema", "test_faketensor"))
    comm.allgather(None)
    return True


def test_operators_keep_torchs_rules_between_nodes(process_form: str) -> None:
    """What the fake kernel says of shapes and strides is what comes."""
    case = Case("pair", (4, 3), hidden=32, experts=6, topk=2)
    assert all(run_job(job_rules_between_nodes, case, form=process_form, timeout=200))


@pytest.mark.parametrize("worst", [0, 20])
def test_operators_keep_torchs_rules(worst: int, process_form: str) -> None:
    """Schemas, fake kernels, autograd and tracing, by torch's own checks."""
    work = CASES[-1], worst
    assert run_job(job_rules, work, ranks=1, form=process_form, timeout=200) == [5]


# ---- the rest ----
def test_imported_when_asked_for_alone() -> None:
    code = "import sys, deep_moe; assert 'deep_moe.nn' not in sys.modules; deep_moe.nn.dispatch"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_buffer_that_is_gone() -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm)
        x = torch.ones(2, 32, requires_grad=True)
        sent = moe.dispatch(buffer, x, torch.zeros(2, 1, dtype=torch.int64), num_experts=2)
        key = buffer.key
        del buffer
        return key, attempt(lambda: sent.x.sum().backward())

    ((key, tried),) = run_ranks(rank_main, 1)
    tried.must_be(ReferenceError, key, "keep the Buffer")


def test_a_refusal_reaches_the_peers() -> None:
    def rank_main(comm: Any, rank: int) -> Any:
        buffer = deep_moe.Buffer(None, comm=comm, timeout=20)
        x, idx = torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int64)
        worst = {"num_worst_tokens": 4, "async_finish": True} if rank == 1 else {}
        tried = attempt(lambda: moe.dispatch(buffer, x, idx, num_experts=2, **worst))  # type: ignore[arg-type]
        moe.dispatch(buffer, x, idx, num_experts=2)
        return tried

    heard, refused = run_ranks(rank_main, 2)
    refused.must_be(ValueError, "async_finish", "num_worst_tokens")
    heard.must_be(deep_moe.PeerRefusedError, "rank 1", "num_worst_tokens")
