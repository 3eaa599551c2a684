"""DeepEP's names as a program written for it imports them, without leaving the shim installed."""

from __future__ import annotations

from deep_moe import deep_ep_shim

deep_ep_shim.install()
try:
    import deep_ep
    import deep_ep.buffer
    import deep_ep.buffers.legacy
    import deep_ep.utils
    import deep_ep_cpp
finally:
    deep_ep_shim.uninstall()

__all__ = ["deep_ep", "deep_ep_cpp"]
