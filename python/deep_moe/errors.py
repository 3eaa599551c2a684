"""The exceptions of deep_moe. Wrong arguments are plain ``ValueError`` and ``TypeError``."""

from __future__ import annotations

__all__ = [
    "BufferTooSmallError",
    "CallMismatchError",
    "DeepMoeTimeoutError",
    "DestroyedError",
    "Error",
    "ForkedProcessError",
    "PeerLostError",
    "PeerRefusedError",
    "UnavailableError",
]


class Error(RuntimeError):
    """Root of everything that is not simply a wrong argument."""


class DeepMoeTimeoutError(Error, TimeoutError):
    """A wait passed its deadline. The text names who waited for whom, in which phase, expected and seen
    values.

    The Buffer has failed: every call raises the same until ``reset()`` or ``destroy()``.
    """


class PeerLostError(Error):
    """A peer's process ended, or it destroyed its Buffer, while this rank still needed it. The text names it.

    The Buffer has failed: every call raises the same until ``reset()`` or ``destroy()``.
    """


class PeerRefusedError(Error):
    """A peer refused its arguments of this call; the text has its rank and its reason.

    The next call works.
    """


class CallMismatchError(Error):
    """The ranks did not make the same call. The text names both calls. The next call works."""


class BufferTooSmallError(Error, ValueError):
    """The memory that a call needs cannot be had. The text names the bytes needed and what to raise."""


class DestroyedError(Error):
    """Use after ``destroy()``."""


class ForkedProcessError(Error):
    """Use of a Buffer in a child process that was forked after the Buffer was made."""


class UnavailableError(Error):
    """A part that this build or this machine does not have. The text says what to install."""


# Where users find, name and unpickle them.
for _name in __all__:
    globals()[_name].__module__ = "deep_moe"
del _name
