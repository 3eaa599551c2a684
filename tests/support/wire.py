"""Pickle for tensors of every type (torch refuses fp8) that keeps their strides."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return NotImplemented
        raw = item.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return _rebuild, (raw, item.dtype, tuple(item.shape), item.stride())


def _rebuild(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if not raw:
        return torch.empty_strided(shape, stride, dtype=dtype)
    rows = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return rows if rows.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype).copy_(rows)


def dumps(item: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(item)
    return file.getvalue()


loads = pickle.loads
