"""Rank counts, kinds of shared memory, ways of moving rows: the same results whatever the world."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import deep_moe

from ..support.attempts import attempt
from ..support.compare import same_bits
from ..support.gpu import CONNECTIONS_1, VECTOR, World, on_gpu
from ..support.high_throughput import CachedDispatch, Combine, Dispatch
from ..support.inputs import Case
from ..support.program import BufferOptions, Program

pytestmark = pytest.mark.gpus(1)

bf16, fp32 = torch.bfloat16, torch.float32
COUNTS = [World("thread", ranks) for ranks in (1, 2, 3, 4, 8)] + [World("process", ranks) for ranks in (2, 4)]


def program_of(ranks: int, heap: int = 64 << 20, memory: str = "") -> Program:
    """Every kind of high-throughput call, on ranks with few tokens, many, or none."""
    tokens = tuple((37 * rank + 61) % 120 for rank in range(ranks))
    case = Case("worlds", tokens, hidden=1536, experts=25, topk=6)
    given, most = case.inputs(), sum(case.tokens) + 3
    return Program(
        [
            Dispatch(given, path="fused"),
            Combine(0, biases=2),
            CachedDispatch(0, case.rows(2)),
            Dispatch(given, path="v1", alignment=8),
            Combine(3, seed=1, in_heap=True),
            Dispatch(case.but(payload="fp8", seed=3).inputs(), path="fused", worst=most),
            Combine(5, seed=2, dtype=fp32, weights=False),
        ],
        (BufferOptions(num_bytes=heap, memory=memory),),
    )


@pytest.mark.parametrize("world", COUNTS, ids=str)
def test_rank_counts(world: World) -> None:
    world.run_program(program_of(world.ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_repeat_and_are_those_of_older_gpus(ranks: int) -> None:
    """Bit for bit: again, with threads and with processes, with the copy engine and without."""
    program = program_of(ranks)
    first, *others = (
        world.run_program(program)
        for world in (
            World("thread", ranks),
            World("thread", ranks),
            World("thread", ranks, VECTOR),
            *([World("process", 2)] if ranks == 2 else []),
        )
    )
    for other in others:
        for rank, (calls, again) in enumerate(zip(first, other, strict=True)):
            for call, (one, two) in enumerate(zip(calls, again, strict=True)):
                for name in ("x", "idx", "weights"):
                    if name in one:
                        same_part(one[name], two[name], one.get("idx"), f"rank {rank}, call {call}, {name}")


def same_part(one: Any, two: Any, idx: torch.Tensor | None, what: str) -> None:
    """Rows that only num_worst_tokens has added hold anything."""
    if isinstance(one, tuple):
        for part, other in zip(one, two, strict=True):
            same_part(part, other, idx, what)
        return
    rows = None if idx is None or one is None else int((idx >= 0).any(1).sum())
    same_bits(one[:rows] if rows is not None else one, two[:rows] if rows is not None else two, what)


def legacy_ipc_capable(tensor: torch.Tensor) -> bool:
    """What the driver says of the memory: is it of cudaMalloc's kind, which CUDA IPC shares."""
    value, attribute = ctypes.c_int(-1), 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(tensor.data_ptr()))
    assert status == 0 and value.value in (0, 1), (status, value.value)
    return value.value == 1


def job_memory_kind(comm: Any, rank: int, kind: str) -> Any:
    buffer = BufferOptions(1 << 20, memory=kind).make(comm)
    x = torch.full((8, 64), float(rank + 1), device="cuda")
    idx = torch.arange(8, device="cuda").reshape(8, 1) % comm.Get_size()
    received = buffer.dispatch(x, topk_idx=idx, num_experts=comm.Get_size())[0]
    return buffer.runtime.memory_kind, legacy_ipc_capable(received), received


@pytest.mark.parametrize("kind", ["fd", "ipc"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_kinds_of_shared_memory(kind: str, ranks: int) -> None:
    """Between processes: memory passed as a descriptor and by CUDA IPC, each as asked for."""
    world = World("process", ranks)
    for told, legacy, received in world.run(job_memory_kind, kind):
        assert told == kind and legacy == (kind == "ipc")
        rows = torch.arange(1.0, ranks + 1).repeat_interleave(8 // ranks)
        assert torch.equal(received, rows.unsqueeze(1).expand(8, 64))
    world.run_program(program_of(ranks, memory=kind))
    if ranks == 2:
        world.run_program(program_of(ranks, heap=1 << 20, memory=kind))  # and when the heap grows


def job_unknown_kind(comm: Any, rank: int, _: Any) -> Any:
    return attempt(lambda: BufferOptions(memory="glue").make(comm))


def test_unknown_kind_of_memory_is_named() -> None:
    for tried in World("thread", 2).run(job_unknown_kind):
        tried.must_be(ValueError, "glue", "auto, fd, fabric or ipc")


def test_one_hardware_queue_between_processes() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1, as some programs for training set it."""
    World("process", 2, CONNECTIONS_1).run_program(program_of(2))


def job_sms(comm: Any, rank: int, num_sms: int) -> Any:
    deep_moe.Buffer.set_num_sms(num_sms)
    given = Case("sms", (40, 30)).inputs()
    buffer = deep_moe.Buffer(None, comm=comm)
    x, idx = on_gpu(given.x[rank]), on_gpu(given.topk_idx[rank])
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=given.experts)
    return rows, buffer.combine(rows, handle)[0]


def test_any_number_of_sms() -> None:
    """1 SM, an odd number, half of the GPU, more than there are: the same bits."""
    usual, *others = (World("thread", 2).run(job_sms, num_sms) for num_sms in (20, 1, 7, 60, 1000))
    for other in others:
        for rank, (one, two) in enumerate(zip(usual, other, strict=True)):
            same_bits(two[0], one[0], f"rank {rank}, rows")
            same_bits(two[1], one[1], f"rank {rank}, sums")
