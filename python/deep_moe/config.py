"""Tuning numbers, size hints, and the checks of plain arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._C import Config, build_info, combine_config, dispatch_config, low_latency_size_hint
from .errors import UnavailableError
from .events import EventHandle, EventOverlap, cuda

__all__ = [
    "NUM_SMS",
    "Config",
    "check_config",
    "check_streams",
    "combine_config",
    "device_of",
    "dispatch_config",
    "low_latency_size_hint",
    "seconds",
    "topk_idx_t",
    "whole_number",
]

NUM_SMS = 20
"""SMs that a call may use unless something else is set or tuned."""

topk_idx_t = torch.int64
"""The usual dtype of ``topk_idx``; int32 is taken as well."""


def whole_number(value: Any, name: str, lowest: int = 0) -> int:
    """``value`` as an int: ints, and floats without a fraction such as ``1e9``."""
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        number = int(value)
    else:
        try:
            number = value.__index__()
        except (AttributeError, TypeError):
            raise TypeError(f"{name} must be a whole number, got {type(value).__name__}") from None
    if not lowest <= number < 1 << 63:
        raise ValueError(f"{name} must be at least {lowest} and below 2**63, got {number}")
    return number


def seconds(value: Any, name: str) -> float:
    """``value`` as a positive, finite number of seconds."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__}") from None
    if not 0.0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Where a Buffer works: the CPU, or one CUDA device, given with its index."""
    has_transport: bool = build_info()["cuda_transport"]
    if device is None:
        device = "cuda" if has_transport and torch.cuda.is_available() else "cpu"
    wrong = f'device must be None, "cpu", "cuda" or the index of a CUDA device, got {device!r}'
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            found = torch.device("cuda", device)
        else:
            found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(wrong) from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ValueError(wrong)
    if not has_transport:
        raise UnavailableError(
            f"device={str(found)!r}: this build of deep_moe has no CUDA part; use "
            'device="cpu", or install a build for CUDA (deep-moe-cu12 or deep-moe-cu13)'
        )
    if not torch.cuda.is_available():
        raise UnavailableError(
            f"device={str(found)!r}: torch sees no CUDA device here (torch.cuda.is_available()); use "
            'device="cpu", or install a CUDA build of torch and a driver for the GPU; a process forked from '
            "one that has used CUDA sees none either"
        )
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise ValueError(
            f"device must be one of the {torch.cuda.device_count()} CUDA devices here, got {str(found)!r}"
        )
    try:
        cuda.init()
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    except RuntimeError as error:  # a process forked from one that used CUDA, say
        raise UnavailableError(f"device={str(found)!r}: CUDA cannot be used here: {error}") from error


def check_config(config: Any, num_sms: int) -> int:
    """``config`` of a call: a Config, or None. Gives its SMs, without one ``num_sms``."""
    if config is None:
        return num_sms
    if not isinstance(config, Config):
        raise TypeError(f"config must be a deep_moe.Config or None, got {type(config).__name__}")
    return config.num_sms


def check_streams(previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any) -> int:
    """The stream arguments that the calls of the high-throughput mode share; gives the cudaEvent_t, or 0."""
    event = None
    if previous_event is not None:
        if not isinstance(previous_event, EventOverlap):
            raise TypeError(
                f"previous_event must be a deep_moe.EventOverlap or None, got {type(previous_event).__name__}"
            )
        event = previous_event.event
        if event is not None and not isinstance(event, EventHandle):
            raise TypeError(
                f"previous_event.event must be a deep_moe.EventHandle, got {type(event).__name__}"
            )
    if allocate_on_comm_stream and (event is None or not async_finish):
        raise ValueError(
            "allocate_on_comm_stream=True needs previous_event=EventOverlap(EventHandle()) and "
            "async_finish=True: the tensors would otherwise be used on a stream that knows nothing of them"
        )
    return 0 if event is None else event.cuda_event


def check_low_latency(async_finish: Any, return_recv_hook: Any) -> None:
    """The finish arguments that the calls of the low-latency mode share."""
    if async_finish and return_recv_hook:
        raise ValueError(
            "async_finish=True together with return_recv_hook=True: a call finishes either by itself or by "
            "its hook; pass one of the two"
        )
