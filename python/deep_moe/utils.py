"""The names that programs written for DeepEP import from its ``utils``."""

from __future__ import annotations

from .events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
