"""DeepEP V2's place of events."""

from __future__ import annotations

from deep_moe import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
