"""deep_moe under DeepEP's names; ``deep_moe.deep_ep_shim`` tells how this comes to be found."""

from __future__ import annotations

from deep_moe import deep_ep_shim

deep_ep_shim.check()

from deep_moe import Buffer, Config, EventHandle, EventOverlap, topk_idx_t  # noqa: E402

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "topk_idx_t"]

__version__ = "1.2.1"
"""The version of DeepEP whose interface this is, for programs that compare it."""
