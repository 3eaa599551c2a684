"""The plug-in for exchanges between nodes on GPUs, and NVSHMEM's host library, which it needs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from . import _C

__all__ = ["host_library", "status"]


def host_library() -> Path | None:
    """Where the Python package of NVSHMEM has its host library."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / "lib" / "libnvshmem_host.so.3"
        if file.is_file():
            return file
    return None


def status() -> dict[str, str]:
    """Loads the plug-in, once a process.

    Returns:
        path, problem (empty where it serves; else why not and what to install), built_against, library.
    """
    # An editable install has no package folder beside the plug-in, so its run path does not find the library.
    if (file := host_library()) is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return _C.network_status()
