"""Ranks on GPUs: which is whose, their streams, and tensors that go there and back.

Ranks go round the GPUs that CUDA_VISIBLE_DEVICES leaves: rank r is on number r % device_count(). Each has a
current stream of its own: on one that ranks share, each would wait for the other's call. And a copy to or
from ordinary host memory holds the driver until the work in front of it is done, which may be a kernel that
waits for another rank: so a stream is waited for before anything is copied on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import deep_moe

WARM_BYTES = 64 << 20
SHARED_SMS = 96  # of a GPU, for all ranks on it together: their grids wait for each other

streams: dict[int, torch.cuda.Stream] = {}  # by rank: the current ones of this process's ranks
side_streams: dict[int, torch.cuda.Stream] = {}  # their second ones
_preparing = threading.Lock()


def gpu_of(rank: int) -> torch.device:
    """The rank's GPU."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def prepare(form: str, ranks: range) -> None:
    """Before the ranks of this process, or more of them, use their GPUs: settings and streams."""
    with _preparing:
        if form == "thread":
            # Code that is loaded when first used may wait for a kernel that waits for a rank that is loading
            # it; and streams that share a hardware queue wait for each other.
            os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.set_num_threads(1)
        for rank in ranks:
            if rank not in streams:
                with torch.cuda.device(gpu_of(rank)):
                    streams[rank], side_streams[rank] = _warm_stream(), _warm_stream()
                    torch.cuda.synchronize()


def _warm_stream() -> torch.cuda.Stream:
    """A stream with memory of torch's to hand out: asking the driver for more may wait for other ranks.

    What a test does between calls has been done once: a first copy to or from ordinary memory, or a first
    launch of a kernel, may wait for the kernels of all streams.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        held = [
            torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (WARM_BYTES, 1 << 20, 1 << 10)
        ]
        held[1].copy_(torch.zeros(1 << 20, dtype=torch.uint8))
        held[1].cpu()
        rows = held[2].view(16, 64)
        for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32):
            assert int((rows.to(dtype).cpu().cuda() >= 0).any(1).sum()) == len(rows)
        del held, rows
        torch.cuda._sleep(1000)
        stream.synchronize()
    return stream


def side_stream() -> torch.cuda.Stream:
    """A second stream of this rank. (torch gives the same few new ones to everybody, again and again.)"""
    current = torch.cuda.current_stream()
    return next(side_streams[rank] for rank, stream in streams.items() if stream == current)


@contextmanager
def at_home(rank: int, ranks: int) -> Iterator[None]:
    """The rank's GPU and stream are this thread's current ones; ranks use no more SMs than their GPU has."""
    of_a_gpu = -(-ranks // torch.cuda.device_count())
    deep_moe.Buffer.set_num_sms(max(1, min(20, SHARED_SMS // of_a_gpu)))
    torch.cuda.set_device(gpu_of(rank))
    with torch.cuda.stream(streams[rank]):
        yield


def as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for another thread of this rank: with the GPU and stream that are current here."""
    if not torch.cuda.is_initialized():
        return function
    stream = torch.cuda.current_stream()

    def there(*arguments: Any) -> Any:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            return function(*arguments)

    return there


def on_its_stream(function: Callable[[Any, int], Any], form: str) -> Callable[[Any, int], Any]:
    """The same function for a rank on a GPU; its tensors come back on the CPU."""

    def rank_main(comm: Any, rank: int) -> Any:
        size = comm.Get_size()
        prepare(form, range(size) if form == "thread" else range(rank, rank + 1))
        comm.allgather(None)
        with at_home(rank, size):
            result = on_cpu(function(comm, rank))
            torch.cuda.current_stream().synchronize()
        return result

    return rank_main


LOOKED_AT = ("get_dispatch_layout", "dispatch", "combine")  # waited for: the program may look at the results
LOW_LATENCY = ("low_latency_dispatch", "low_latency_combine")


class OnDevice:
    """A Buffer on a GPU whose calls take CPU tensors: copies of them travel."""

    def __init__(self, buffer: deep_moe.Buffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._buffer, name)
        if name not in LOOKED_AT + LOW_LATENCY:
            return member

        def call(*arguments: Any, **named: Any) -> Any:
            given = [on_gpu(argument) for argument in arguments]
            result = member(*given, **{key: on_gpu(argument) for key, argument in named.items()})
            if name in LOOKED_AT:
                torch.cuda.current_stream().synchronize()
                self._buffer.check()  # what went wrong comes up in the same call on all ranks
            return result

        return call


def on_gpu(argument: Any) -> Any:
    """Tensors and plain pairs of them on the current device, strides kept; all else (handles) as it is."""
    if isinstance(argument, torch.Tensor):
        if argument.is_cuda:
            return argument
        torch.cuda.current_stream().synchronize()
        moved = torch.empty_strided(
            argument.shape, argument.stride(), dtype=argument.dtype, device=torch.cuda.current_device()
        )
        return moved.copy_(argument)
    if type(argument) is tuple and len(argument) == 2:
        return tuple(on_gpu(part) for part in argument)
    return argument


def captured(comm: Any, rank: int, layer: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of `layer`, which runs once before, and its outputs; ranks capture in turn. Collective."""
    layer()
    torch.cuda.current_stream().synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), None
    for turn in range(comm.Get_size()):
        comm.allgather(None)
        if turn == rank:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = layer()
    comm.allgather(None)
    return graph, outputs


def where(buffer: Any, argument: Any) -> Any:
    """The argument on the Buffer's device."""
    return on_gpu(argument) if buffer.device.type == "cuda" else argument


def settle(buffer: Any) -> None:
    """Waits for this rank's stream, so that what lies on a GPU may be looked at."""
    if buffer.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def on_cpu(result: Any) -> Any:
    """The same with all tensors in it on the CPU."""
    if isinstance(result, torch.Tensor):
        if not result.is_cuda:
            return result.detach()
        torch.cuda.current_stream().synchronize()
        return result.detach().cpu()
    if isinstance(result, dict):
        return {key: on_cpu(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        parts = [on_cpu(part) for part in result]
        return result._make(parts) if hasattr(result, "_make") else type(result)(parts)
    return result
