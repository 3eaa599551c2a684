"""DeepEP V1's place of events."""

from __future__ import annotations

from .event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
