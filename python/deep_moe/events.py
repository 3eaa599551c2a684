"""Events: when a call's results may be used.

On a GPU they are CUDA events. On the CPU every call is complete when it returns, so all of this is trivial
there; code written for a GPU's streams runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

cuda: Any = torch.cuda  # whose functions torch gives no types

__all__ = ["CommStream", "EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the current stream of the current CUDA device, taken when the object is made.

    Where this process uses no CUDA, it is complete at once.
    """

    __slots__ = ("_event",)

    _event: torch.cuda.Event | None

    def __init__(self) -> None:
        self._event = None
        if cuda.is_initialized():
            self._event = cuda.Event()
            self._event.record()

    @classmethod
    def on(cls, stream: torch.cuda.Stream | None) -> EventHandle:
        """A point in this stream; None for one that is complete at once."""
        handle = cls.__new__(cls)
        handle._event = None
        if stream is not None:
            handle._event = cuda.Event()
            handle._event.record(stream)
        return handle

    @property
    def cuda_event(self) -> int:
        """The cudaEvent_t, or 0."""
        return 0 if self._event is None else int(self._event.cuda_event)

    def current_stream_wait(self) -> None:
        """Makes the current stream (of the device that the point is on) wait for the point.

        The caller itself does not wait. On the CPU: returns.
        """
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._event.device))

    def __repr__(self) -> str:
        return "EventHandle()" if self._event is None else f"EventHandle({self._event!r})"


class EventOverlap:
    """An event together with what is to live and to happen until it has been waited for.

    As a context manager it lets work overlap with the call::

        with event:
            do_something_on_the_current_stream()
        # from here on the results of the call may be used

    Args:
        event: the event, or None for "nothing to wait for". May be assigned later.
        extra_tensors: tensors of any shape, dtype and device, kept alive until the event is released.
    """

    event: EventHandle | None
    extra_tensors: tuple[torch.Tensor, ...] | None

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None
        self._release_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event; without an event there is nothing to wait for.

        Args:
            release_handle: lets go of the event and of the extra tensors afterwards.

        Returns:
            What the hook of :meth:`register_hook_after_wait` returned, or None without one.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        result = hook() if hook is not None else None
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return result

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Sets what the next :meth:`current_stream_wait` calls, once, after the wait.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: a hook is registered already.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__name__}")
        if self._hook is not None:
            raise ValueError("hook: one is registered already, and it runs at the next current_stream_wait()")
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """``with event(release_handle=True):`` releases the handle after the wait at the end of the block."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        release, self._release_at_exit = self._release_at_exit, False
        self.current_stream_wait(release)

    def __repr__(self) -> str:
        return f"EventOverlap(event={self.event!r})"


class CommStream(torch.cpu.Stream):
    """The stream of a Buffer's calls. On the CPU calls run in the caller's thread, so there is nothing to
    order.

    Taken by ``torch.cpu.stream(...)``; also a context manager of its own.
    """

    def query(self) -> bool:
        """Whether all work is complete: always."""
        return True

    def synchronize(self) -> None:
        """Waits for all work: returns."""

    def __enter__(self) -> CommStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None
