"""DeepEP V2's place of V1's Buffer."""

from __future__ import annotations

from deep_moe import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
