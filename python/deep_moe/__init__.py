"""Dispatch and combine of Mixture-of-Experts tokens among ranks.

``Buffer`` is the entry; ``deep_moe.reference`` (imported on demand) says in plain torch what each operation
means.
"""

from __future__ import annotations

from typing import Any

from ._native import __version__
from .buffer import Buffer
from .comm import thread_comms
from .config import Config, topk_idx_t
from .errors import (
    BufferTooSmallError,
    CallMismatchError,
    DeepMoeTimeoutError,
    DestroyedError,
    Error,
    ForkedProcessError,
    PeerLostError,
    PeerRefusedError,
    UnavailableError,
)
from .events import EventHandle, EventOverlap
from .handles import DispatchHandle, InternodeDispatchHandle, LowLatencyHandle

__all__ = [
    "Buffer",
    "BufferTooSmallError",
    "CallMismatchError",
    "Config",
    "DeepMoeTimeoutError",
    "DestroyedError",
    "DispatchHandle",
    "Error",
    "EventHandle",
    "EventOverlap",
    "ForkedProcessError",
    "InternodeDispatchHandle",
    "LowLatencyHandle",
    "PeerLostError",
    "PeerRefusedError",
    "UnavailableError",
    "__version__",
    "thread_comms",
    "topk_idx_t",
]


def __getattr__(name: str) -> Any:
    if name == "reference":
        import importlib

        return importlib.import_module(".reference", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
