"""Buffers on a GPU: which device, what is refused and in which words, and how they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe

from ..cpu.test_cases_life import python
from ..support.attempts import attempt
from ..support.gpu import ONE, WORLDS, World, on_gpu
from ..support.high_throughput import Combine, Dispatch
from ..support.inputs import Case
from ..support.program import Program, check, execute
from ..support.system import gpu_name

pytestmark = pytest.mark.gpus(1)

CASE = Case("refused", (12, 12, 12, 12))


def job_devices(comm: Any, rank: int, _: Any) -> Any:
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        buffer = deep_moe.Buffer(None, comm=comm, device=device)
        assert buffer.device == torch.device("cuda", 0), device
        assert buffer.empty((3, 4), torch.float8_e4m3fn).device == buffer.device
        assert buffer.empty(5, torch.int64).is_cuda
        buffer.destroy()
    scratch = deep_moe.Buffer(None, 1 << 20, comm=comm).get_local_buffer_tensor(torch.int8)
    assert scratch.is_cuda and scratch.shape == (1 << 20,)
    cpu = deep_moe.Buffer(None, comm=comm, device="cpu")
    rows = cpu.dispatch(torch.ones(2, 16), topk_idx=torch.tensor([[0], [1]]), num_experts=2)[0]
    assert cpu.device == torch.device("cpu") and not rows.is_cuda
    event = deep_moe.Buffer.capture().event
    assert event is not None and event.cuda_event != 0
    return [
        attempt(lambda: deep_moe.Buffer(None, comm=comm, device=99)),
        attempt(lambda: deep_moe.Buffer(None, comm=comm, device=-1)),
        attempt(lambda: buffer_of(comm).record_stream(torch.ones(3, device="cuda"), "the side")),
        attempt(lambda: buffer_of(comm).record_stream(torch.ones(3), torch.cuda.current_stream())),
    ]


def buffer_of(comm: Any) -> deep_moe.Buffer:
    return deep_moe.Buffer(None, comm=comm)


def test_which_device() -> None:
    (tried,) = ONE.run(job_devices)
    too_far, negative, no_stream, elsewhere = tried
    too_far.must_be(ValueError, "device", "cuda:99")
    negative.must_be(ValueError, "device", "-1")
    no_stream.must_be(TypeError, "stream", "torch.cuda.Stream", "str")
    elsewhere.must_be(ValueError, "tensor", "cpu", "cuda:0")


def job_mixed(comm: Any, rank: int, _: Any) -> Any:
    return attempt(lambda: deep_moe.Buffer(None, comm=comm, device="cpu" if rank else "cuda"))


@pytest.mark.parametrize("world", WORLDS[1:], ids=str)
def test_ranks_on_cpu_and_gpu_do_not_mix(world: World) -> None:
    for tried in world.run(job_mixed):
        tried.must_be(ValueError, "device", "cuda", "cpu")


def good(ranks: int) -> Program:
    given = Case("good", tuple(range(9, 9 + ranks)), hidden=256, experts=8).inputs()
    return Program([Dispatch(given, path="fused"), Combine(0, biases=1)])


def job_refused(comm: Any, rank: int, which: str) -> Any:
    """The last rank passes one tensor of its dispatch that lies elsewhere."""
    size = comm.Get_size()
    given = CASE.but(tokens=CASE.tokens[:size]).inputs()
    buffer = deep_moe.Buffer(None, comm=comm)
    layout = buffer.get_dispatch_layout(on_gpu(given.topk_idx[rank]), given.experts)
    call = {
        "x": on_gpu(given.x[rank]),
        "topk_idx": on_gpu(given.topk_idx[rank]),
        "topk_weights": on_gpu(given.topk_weights[rank]),
        "num_tokens_per_rank": layout[0],
        "num_tokens_per_expert": layout[2],
        "is_token_in_rank": layout[3],
    }
    if rank == size - 1:
        call[which] = call[which].cpu()
    tried = attempt(lambda: buffer.dispatch(**call))
    program = good(size).only(rank)
    return tried, execute(program, rank, [buffer])


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("which", ["x", "topk_idx", "topk_weights", "is_token_in_rank"])
def test_a_tensor_elsewhere_is_refused(world: World, which: str) -> None:
    """An error that names it and both devices; PeerRefusedError with the reason; and the next calls work."""
    *peers, (refused, _) = results = world.run(job_refused, which)
    last = world.ranks - 1
    refused.must_be(ValueError, which, "is on cpu", gpu_name(last))
    for tried, _ in peers:
        tried.must_be(deep_moe.PeerRefusedError, f"rank {last}", which, "is on cpu", gpu_name(last))
    check(good(world.ranks), [program for _, program in results])


def job_other_gpu(comm: Any, rank: int, _: Any) -> Any:
    """Each rank's Buffer is on a GPU that is not the current one, and so is its current stream."""
    size = comm.Get_size()
    current = torch.cuda.current_device()
    other = (current + 1) % torch.cuda.device_count()
    buffer = deep_moe.Buffer(None, comm=comm, device=other)
    x, idx = torch.ones(4, 64, device=f"cuda:{other}"), torch.zeros(4, 1, dtype=torch.int64, device="cuda")
    refused = attempt(lambda: buffer.get_dispatch_layout(idx, 1))
    idx = idx.to(x.device) + rank
    with torch.cuda.device(other):
        torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    rows, _, _, _, handle, _ = buffer.dispatch(x * (rank + 1), topk_idx=idx, num_experts=size)
    total = buffer.combine(rows * 2, handle)[0]
    where = {tensor.device.index for tensor in (rows, total, handle[0], buffer.empty((2,), torch.int8))}
    assert where == {other} and torch.cuda.current_device() == current, (where, other, current)
    with torch.cuda.device(other):
        torch.cuda.current_stream().synchronize()
    comm.allgather(None)
    return refused, other, total


@pytest.mark.gpus(2)
@pytest.mark.parametrize("world", [World("thread", 2), World("process", 2)], ids=str)
def test_device_names_another_gpu_than_the_current_one(world: World) -> None:
    """Calls follow that GPU's current stream; a tensor of the current GPU is refused, and both are named."""
    for rank, (refused, other, total) in enumerate(world.run(job_other_gpu)):
        refused.must_be(ValueError, "topk_idx", f"is on {gpu_name(rank)}", f"cuda:{other}")
        assert torch.equal(total, torch.full((4, 64), 2.0 * (rank + 1)))


def job_handles(comm: Any, rank: int, _: Any) -> Any:
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx = torch.ones(4, 64, device="cuda"), torch.zeros(4, 1, dtype=torch.int64, device="cuda")
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=1)
    assert [tensor.is_cuda for tensor in handle] == [True] * 4 + [False]
    tried = [
        attempt(lambda: buffer.combine(rows, (*handle[:4], handle[4].cuda()))),
        attempt(lambda: buffer.combine(rows, (*handle[:3], handle[3].cpu(), handle[4]))),
        attempt(lambda: buffer.combine(rows.cpu(), handle)),
        attempt(lambda: buffer.combine(rows, handle, bias=torch.ones(4, 64))),
        attempt(lambda: buffer.combine(rows, handle, out=torch.ones(4, 64))),
        attempt(lambda: buffer.get_dispatch_layout(idx.cpu(), 1)),
        attempt(lambda: buffer.get_dispatch_layout(torch.empty(4, 1, dtype=torch.int64, device="meta"), 1)),
        attempt(lambda: buffer.dispatch(x[:, ::2], topk_idx=idx, num_experts=1)),
        attempt(lambda: buffer.dispatch(x[:, :6], topk_idx=idx, num_experts=1)),
    ]
    return tried, buffer.combine(rows, handle)[0]


def test_what_is_refused_says_why() -> None:
    ((tried, total),) = ONE.run(job_handles)
    tried[0].must_be(ValueError, r"handle\.meta", "is on cuda:0", "CPU")
    tried[1].must_be(ValueError, r"handle\.send_index", "is on cpu", "cuda:0")
    tried[2].must_be(ValueError, "x is on cpu", "cuda:0")
    tried[3].must_be(ValueError, "bias is on cpu", "cuda:0")
    tried[4].must_be(ValueError, "out is on cpu", "cuda:0")
    tried[5].must_be(ValueError, "topk_idx is on cpu", "cuda:0")
    tried[6].must_be(ValueError, "topk_idx is on meta", "cuda:0")
    tried[7].must_be(ValueError, "x", r"contiguous\(\)")
    tried[8].must_be(ValueError, "x", "24", "16")
    assert torch.equal(total, torch.ones(4, 64))


def test_ends_with_live_tensors_and_buffers() -> None:
    """A process may end while Buffers, received tensors and events live, in whatever order they go."""
    code = """
import torch, deep_moe
(comm,) = deep_moe.thread_comms(1)
buffer = deep_moe.Buffer(None, comm=comm)
x, idx = torch.ones(64, 1024, device="cuda"), torch.zeros(64, 1, dtype=torch.int64, device="cuda")
kept = [buffer.dispatch(x, topk_idx=idx, num_experts=1, async_finish=True) for _ in range(3)]
class Cycle: pass
cycle = Cycle(); cycle.self, cycle.kept = cycle, buffer.empty((4, 4), torch.float32)
import builtins; builtins.kept = kept[0]
kept[1][5].current_stream_wait()
print(torch.equal(kept[1][0], x))
"""
    done = python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_forked_child_is_told() -> None:
    """Where the parent has used CUDA, a child cannot: an error, and no hang or crash."""
    code = """
import os, torch, deep_moe
torch.ones(1, device="cuda")
(comm,) = deep_moe.thread_comms(1)
child = os.fork()
if child == 0:
    try:
        deep_moe.Buffer(None, comm=comm, device="cuda:0")
    except deep_moe.UnavailableError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = python(code)
    assert done.stdout.strip() == "7", done.stderr
