"""Introduces torch and the exception classes to the extension module, which links neither."""

from __future__ import annotations

import torch

from . import _C, errors


def _connect() -> None:
    dtypes = {name: getattr(torch, name) for name in _C.dtype_names() if hasattr(torch, name)}
    _C.register_torch(torch.Tensor, torch._C._from_dlpack, dtypes)
    _C.register_errors({name: getattr(errors, name) for name in errors.__all__})


_connect()

__version__: str = _C.build_info()["version"]
