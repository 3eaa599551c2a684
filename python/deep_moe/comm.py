"""How the ranks of a group find each other while a Buffer is made.

A communicator is anything with mpi4py's ``Get_rank()``, ``Get_size()`` and ``allgather(obj)``. A torch
ProcessGroup is turned into one; :func:`thread_comms` makes them for ranks that are threads of one process.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from .errors import DeepMoeTimeoutError, UnavailableError

__all__ = ["Comm", "ThreadComm", "thread_comms"]


class Comm(Protocol):
    """The part of mpi4py's communicator that is used."""

    def Get_rank(self) -> int:
        """This rank, from 0."""

    def Get_size(self) -> int:
        """The number of ranks."""

    def allgather(self, obj: Any, /) -> list[Any]:
        """Collective: each rank gives its ``obj``; all get the objects of all ranks, in rank order."""


class _Exchange:
    """What the threads of one group share: the objects of each round that is not yet over."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}
        self._num_left: dict[int, int] = {}

    def gather(self, turn: int, rank: int, obj: Any) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        with self._changed:
            given = self._rounds.setdefault(turn, {})
            given[rank] = obj
            self._changed.notify_all()
            while len(given) < self.num_ranks:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [peer for peer in range(self.num_ranks) if peer not in given]
                    raise DeepMoeTimeoutError(
                        f"allgather: rank {rank} waited {self.timeout:g} s for the threads of ranks {missing}"
                    )
                self._changed.wait(left)
            gathered = [given[peer] for peer in range(self.num_ranks)]
            self._num_left[turn] = self._num_left.get(turn, 0) + 1
            if self._num_left[turn] == self.num_ranks:
                del self._rounds[turn], self._num_left[turn]
            return gathered


class ThreadComm:
    """One rank of :func:`thread_comms`, which makes them. Used by one thread at a time.

    Args:
        exchange: what the ranks of one group share.
        rank: this rank, from 0.
    """

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._turn = 0

    def Get_rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    def Get_size(self) -> int:
        """The number of ranks."""
        return self._exchange.num_ranks

    def allgather(self, obj: Any, /) -> list[Any]:
        """Collective: each rank gives its ``obj``; all get the objects of all ranks, in rank order.

        The objects are shared, not copied.

        Raises:
            DeepMoeTimeoutError: some ranks did not come; the text names them.
        """
        turn, self._turn = self._turn, self._turn + 1
        return self._exchange.gather(turn, self._rank, obj)

    def __repr__(self) -> str:
        return f"ThreadComm(rank={self._rank}, size={self._exchange.num_ranks})"


def thread_comms(num_ranks: int, *, timeout: float = 100.0) -> list[ThreadComm]:
    """Communicators for ranks that are threads of this process.

    Thread r makes its ``Buffer(None, comm=comms[r])``; memory is then shared by plain pointers.

    Args:
        num_ranks: R, at least 1.
        timeout: seconds that an ``allgather`` waits for the other threads.

    Returns:
        R communicators; entry r belongs to the thread of rank r. They may be used for any number of Buffers.

    Raises:
        ValueError: ``num_ranks`` is below 1. TypeError: it is no int.
    """
    if not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks must be an int, got {type(num_ranks).__name__}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    exchange = _Exchange(num_ranks, timeout)
    return [ThreadComm(exchange, rank) for rank in range(num_ranks)]


class _GroupComm:
    """A torch ProcessGroup.

    Only object collectives are used, which also work before the backend has connected.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return int(self._group.rank())

    def Get_size(self) -> int:
        return int(self._group.size())

    def allgather(self, obj: Any, /) -> list[Any]:
        import torch.distributed as dist  # not at import: it costs time, and mpi4py or threads do not need it

        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, obj, group=self._group)
        return gathered


def comm_of(group: Any, comm: Comm | None) -> Comm:
    """The communicator that a Buffer's ``group`` and ``comm`` mean; with both given, ``group``."""
    if group is not None:
        if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        import torch.distributed as dist

        if not dist.is_available():
            raise UnavailableError(
                "group: this torch was built without torch.distributed; pass comm= instead"
            )
        return _GroupComm(group)
    if comm is None:
        raise ValueError(
            "group and comm are both None: pass a torch ProcessGroup, or comm= with an mpi4py communicator"
        )
    for name in ("Get_rank", "Get_size", "allgather"):
        if not callable(getattr(comm, name, None)):
            raise TypeError(f"comm must have mpi4py's {name}(), and {type(comm).__name__} has not")
    return comm
