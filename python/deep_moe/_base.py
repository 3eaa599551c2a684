"""Making a Buffer, its memory and its failures: what both modes share."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from . import _C, _network
from .comm import Comm, comm_of
from .config import device_of, seconds, whole_number
from .errors import PeerRefusedError, UnavailableError
from .events import CommStream, EventHandle, EventOverlap, cuda

__all__ = ["BufferBase", "Payload", "Refusals", "find_buffer"]

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_numbers = itertools.count()
_buffers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def find_buffer(key: str) -> Any:
    """The Buffer of this process with this ``key``."""
    try:
        return _buffers[key]
    except KeyError:
        raise ReferenceError(
            f"{key} is gone: keep the Buffer for as long as its operators are used"
        ) from None


class Refusals:
    """A ``with`` block for checks of a collective call's arguments, before the runtime has seen the call.

    A ValueError or TypeError that leaves the block is told to the peers, which then raise PeerRefusedError
    instead of waiting for this rank.
    """

    __slots__ = ("_call", "_runtime")

    def __init__(self, runtime: _C.Buffer, call: str) -> None:
        self._runtime = runtime
        self._call = call

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(value, (TypeError, ValueError)):
            self._runtime.refuse(self._call, str(value))


def tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, also those in tuples and lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (tuple, list)):
            yield from tensors_in(argument)


class BufferBase:
    """The constructor, the heap and the state of a Buffer. Used through :class:`deep_moe.Buffer`."""

    group: Any  # None once destroyed
    rank: int
    group_size: int
    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    explicitly_destroy: bool
    enable_shrink: bool
    device: torch.device
    runtime: _C.Buffer
    num_nodes: int
    key: str  # names the Buffer in this process, for operators that take no objects

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: float = 0,
        num_rdma_bytes: float = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: float = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Comm | None = None,
        *,
        device: torch.device | str | int | None = None,
        timeout: float = 100.0,
    ) -> None:
        """Collective over the group. See :class:`deep_moe.Buffer`."""
        ranks = comm_of(group, comm)
        self.group = group if group is not None else comm
        self.rank = ranks.Get_rank()
        self.group_size = ranks.Get_size()
        problem: Exception | None = None
        try:
            self.num_nvl_bytes = whole_number(num_nvl_bytes, "num_nvl_bytes")
            self.num_rdma_bytes = whole_number(num_rdma_bytes, "num_rdma_bytes")
            whole_number(num_qps_per_rank, "num_qps_per_rank")
            deadline = seconds(timeout, "timeout")
            self.device = device_of(device)
        except (TypeError, ValueError, UnavailableError) as error:
            problem = error
        # Every rank learns whether all agree to go on, so that none waits for one that has raised.
        reports = ranks.allgather((str(problem), None) if problem is not None else (None, self.device.type))
        if problem is not None:
            raise problem
        for peer, (reason, _) in enumerate(reports):
            if reason is not None:
                raise PeerRefusedError(f"Buffer: rank {peer} refused its arguments: {reason}")
        kinds = [kind for _, kind in reports]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"device: the ranks of a Buffer are all on the CPU or all on CUDA devices, got {kinds} by "
                "rank; pass the same kind of device= on every rank"
            )
        if self.device.type == "cuda" and self.group_size > 1 and _network.host_library() is not None:
            _network.status()  # where ranks turn out to be on several nodes, what they need is there
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        self.runtime = _C.Buffer(
            self.rank,
            self.group_size,
            ranks.allgather,
            self.num_nvl_bytes,
            self.num_rdma_bytes,
            self.low_latency_mode,
            self.enable_shrink,
            deadline,
            self.device.index if self.device.type == "cuda" else -1,
            bool(use_fabric or allow_mnnvl),
        )
        self.num_nodes = self.runtime.get_num_rdma_ranks()
        self._comm_stream: torch.cuda.ExternalStream | None = None
        if self.device.type == "cuda":
            self._comm_stream = cuda.ExternalStream(self.runtime.comm_stream, self.device)
        self.key = f"deep_moe.Buffer {next(_numbers)}"
        _buffers[self.key] = self
        self._dispatch_checks = Refusals(self.runtime, "dispatch")
        self._combine_checks = Refusals(self.runtime, "combine")
        self._low_latency_dispatch_checks = Refusals(self.runtime, "low_latency_dispatch")
        self._low_latency_combine_checks = Refusals(self.runtime, "low_latency_combine")

    def _event(self, async_finish: bool, *arguments: Any) -> EventOverlap:
        """The event of a call that has been made with these arguments; a synchronous call has none.

        Until it is over, the memory of torch's tensors among them is not given to others.
        """
        if not async_finish:
            return EventOverlap()
        stream = self._comm_stream
        event = EventHandle.on(stream)
        if stream is None:  # calls on the CPU are complete when they return
            return EventOverlap(event)
        inputs = tuple(tensor for tensor in tensors_in(arguments) if tensor.is_cuda)
        for tensor in inputs:
            # Memory that is not torch's (the heap's looks after itself) is passed over, or refused.
            with contextlib.suppress(RuntimeError):
                tensor.record_stream(stream)
        return EventOverlap(event, inputs)

    # ---- memory ----
    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in this rank's heap. Local.

        As ``x`` of :meth:`combine` it is read in place by the peers, which saves a copy.

        Args:
            shape: up to 4 extents.
            dtype: any real element type.

        Returns:
            ``[*shape]`` of ``dtype`` on the Buffer's device, row-major. Its memory goes back to the heap when
            the last tensor that shares it dies; it stays valid after :meth:`destroy`.

        Raises:
            BufferTooSmallError: the heap has no room for it and cannot grow.
            ValueError, TypeError: a wrong shape or dtype.
            DestroyedError, ForkedProcessError: the Buffer cannot be used any more, or not in this process.
        """
        return self.runtime.empty(shape, dtype)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Scratch memory of this rank, which no call and no other tensor uses. Local.

        Args:
            dtype: the element type of the view.
            size: its shape; None takes all of num_nvl_bytes (num_rdma_bytes with ``use_rdma_buffer``) after
                ``offset``.
            offset: bytes from the start of the scratch memory, a multiple of the element size.
            use_rdma_buffer: the memory of the low-latency kind instead of the heap's.

        Returns:
            ``[size]``, or one-dimensional, of ``dtype`` on the Buffer's device. Calls with overlapping ranges
            give views of the same memory. Valid for as long as a tensor of it lives.

        Raises:
            ValueError: ``offset`` does not fit ``dtype``, or the range is larger than the memory there is.
            TypeError: ``size`` is no sequence of ints.
        """
        itemsize = torch.empty((), dtype=dtype).element_size()
        start = whole_number(offset, "offset")
        if start % itemsize != 0:
            raise ValueError(f"offset must be a multiple of {itemsize} bytes for {dtype}, got {start}")
        total = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if start > total:
            raise ValueError(f"offset must be at most the {total} bytes there are, got {start}")
        if size is None:
            shape = torch.Size([(total - start) // itemsize])
        else:
            try:
                shape = torch.Size(size)
            except TypeError:
                raise TypeError(f"size must be a sequence of ints, got {type(size).__name__}") from None
        num_bytes = math.prod(shape) * itemsize
        if min(shape, default=0) < 0 or num_bytes > total - start:
            raise ValueError(
                f"size must be at most the {total - start} bytes there are behind offset {start}, "
                f"got {list(shape)} of {dtype}"
            )
        scratch = self.runtime.local_buffer(start, num_bytes, bool(use_rdma_buffer))
        return scratch.view(dtype).view(shape)

    def memory_stats(self) -> dict[str, int]:
        """Bytes and blocks of this rank's memory. Local.

        Returns:
            Of the heap: heap_bytes, in ``segments`` pieces; live_bytes, in live_blocks, of received tensors
            and whatever else is in use, and peak_bytes, the most of them so far; free_bytes, of which
            largest_free_bytes lie in one piece; quarantined_bytes, which stay live until :meth:`reset`, for
            a peer that was given up may still write there. Beside the heap: ll_staging_bytes.
        """
        return self.runtime.memory_stats()

    # ---- streams ----
    def get_comm_stream(self) -> CommStream | torch.cuda.ExternalStream:
        """The stream of this Buffer's asynchronous calls, of high priority and its own.

        Work that you put there is waited for by asynchronous calls; others run on the current stream.
        On the CPU an object with a stream's methods that orders nothing.
        """
        return CommStream() if self._comm_stream is None else self._comm_stream

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Says that ``stream`` uses a received tensor, so that its memory is reused only behind that use.

        The stream that the tensor was received on, the stream of the Buffer's calls and the one that is
        current where the tensor dies need no such call. On the CPU memory is free once its last tensor has
        died, and this only checks its argument.

        Args:
            tensor: received from a call, or of :meth:`empty`.
            stream: a torch.cuda.Stream of the Buffer's device.

        Raises:
            TypeError: ``tensor`` is none, or ``stream`` is none (on a GPU).
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
        if self._comm_stream is None:
            return
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream must be a torch.cuda.Stream, got {type(stream).__name__}")
        self.runtime.record_stream(tensor, stream.cuda_stream)

    # ---- failures and the end ----
    def check(self) -> None:
        """Raises what has failed the Buffer, if anything. Local."""
        self.runtime.check()

    def reset(self) -> None:
        """Collective, after a time-out or a lost peer: makes the Buffer usable again.

        Tensors from before stay as they are; handles from before may be used.

        Raises:
            DeepMoeTimeoutError, PeerLostError: some rank did not come.
        """
        self.runtime.reset()

    def destroy(self) -> None:
        """Ends the use of the Buffer. Local, may be called twice, and need not be called at all.

        Received tensors stay valid. Every other call then raises DestroyedError; peers that still need this
        rank raise PeerLostError. ``group`` becomes None: a process group that something holds survives
        ``torch.distributed.destroy_process_group()``, and gloo's threads then run into the end of Python.
        """
        self.runtime.destroy()
        self.group = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank={self.rank}, group_size={self.group_size}, "
            f"num_nvl_bytes={self.num_nvl_bytes}, num_rdma_bytes={self.num_rdma_bytes}, "
            f"low_latency_mode={self.low_latency_mode}, device={self.device})"
        )
