"""DeepEP V1's place of the Buffer."""

from __future__ import annotations

from deep_moe import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
