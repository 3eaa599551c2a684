"""DeepEP V2's place of Buffers; V1's is ``legacy`` there."""

from __future__ import annotations

from .legacy import Buffer

__all__ = ["Buffer"]
