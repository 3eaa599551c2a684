"""The part of DeepEP's extension module that programs import, deep_moe's.

Its ``Buffer`` is missing on purpose: that is the object behind DeepEP's Python class, with other arguments.
"""

from __future__ import annotations

from deep_moe import deep_ep_shim

deep_ep_shim.check()

from deep_moe import Buffer, Config, EventHandle, topk_idx_t  # noqa: E402

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]

get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = Buffer.is_sm90_compiled
del Buffer
