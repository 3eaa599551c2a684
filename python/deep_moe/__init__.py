"""Dispatch and combine of Mixture-of-Experts tokens among ranks.

``Buffer`` is the entry. Imported on demand: ``deep_moe.nn`` has the calls with gradients,
``deep_moe.planning`` computes sizes and times, ``deep_moe.reference`` says in plain torch what each operation
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
from .handles import (
    DeviceLowLatencyHandle,
    DispatchHandle,
    ExpertMajorHandle,
    InternodeDispatchHandle,
    InternodeExpertMajorHandle,
    LowLatencyHandle,
)

__all__ = [
    "Buffer",
    "BufferTooSmallError",
    "CallMismatchError",
    "Config",
    "DeepMoeTimeoutError",
    "DestroyedError",
    "DeviceLowLatencyHandle",
    "DispatchHandle",
    "Error",
    "EventHandle",
    "EventOverlap",
    "ExpertMajorHandle",
    "ForkedProcessError",
    "InternodeDispatchHandle",
    "InternodeExpertMajorHandle",
    "LowLatencyHandle",
    "PeerLostError",
    "PeerRefusedError",
    "UnavailableError",
    "__version__",
    "thread_comms",
    "topk_idx_t",
]


def __getattr__(name: str) -> Any:
    if name in ("nn", "planning", "reference"):
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
