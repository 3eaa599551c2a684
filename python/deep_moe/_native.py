"""Introduces torch and the exception classes to the extension module, which links neither."""

from __future__ import annotations

import torch

from . import _C, _variants, errors


def _current_stream(device: int) -> int:
    """The current stream of a CUDA device, for torch versions without a quicker way."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def connect(exchange: object | None = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) -> None:
    """Hands torch's objects to the module. ``exchange``: DLPack's table of functions; without it every tensor
    is asked one thing after another, and goes out in a capsule."""
    dtypes = {name: getattr(torch, name) for name in _C.dtype_names() if hasattr(torch, name)}
    current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
    _C.register_torch(torch.Tensor, torch._C._from_dlpack, current_stream, dtypes, exchange)
    _C.register_errors({name: getattr(errors, name) for name in errors.__all__})


connect()
_variants.warn_of_conflict(_C.build_info()["variant"])

__version__: str = _C.build_info()["version"]
"""The version of the package, as the compiled module knows it."""
