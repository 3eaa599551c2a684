"""Tensors of all kinds on their way in and out, by DLPack's table of functions and without it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import _native

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
WIDTH = 32
TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(
        getattr(torch, f"float{name}")
        for name in ("8_e4m3fn", "8_e5m2", "8_e8m0fnu", "4_e2m1fn_x2")
        if hasattr(torch, f"float{name}")
    ),
]


@pytest.fixture(
    params=[
        pytest.param(
            EXCHANGE, id="table", marks=pytest.mark.skipif(EXCHANGE is None, reason="an older torch")
        ),
        pytest.param(None, id="capsules"),
    ]
)
def buffer(request: pytest.FixtureRequest) -> Iterator[deep_moe.Buffer]:
    _native.connect(request.param)
    made = deep_moe.Buffer(None, comm=deep_moe.thread_comms(1)[0], device="cpu")
    yield made
    made.destroy()
    _native.connect()


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bytes as elements of the type; those of bool are 0 and 1."""
    size = torch.empty(0, dtype=dtype).element_size()
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(most, (*shape[:-1], shape[-1] * size), generator=torch.Generator().manual_seed(5))
    return raw.to(torch.uint8).view(dtype)


def sent(buffer: deep_moe.Buffer, x: Any) -> Any:
    """What comes back of rows that all go to the one rank's one expert."""
    rows = x[0].shape[0] if isinstance(x, tuple) else x.shape[0]
    return buffer.dispatch(x, topk_idx=torch.zeros(rows, 1, dtype=torch.int64), num_experts=1)[0]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(buffer: deep_moe.Buffer, dtype: torch.dtype) -> None:
    x = bits((5, WIDTH), dtype)
    same(sent(buffer, x), x)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x[3:], id="behind an offset"),
        pytest.param(lambda x: x[::2], id="every other row"),
        pytest.param(lambda x: x[:, WIDTH:], id="half of each row"),
        pytest.param(lambda x: x[:0], id="no rows"),
        pytest.param(lambda x: x[:1].expand(4, -1), id="one row again and again"),
        pytest.param(lambda x: x.clone().requires_grad_(), id="with a gradient"),
        pytest.param(lambda x: torch.nn.Parameter(x.clone()), id="a parameter"),
    ],
)
def test_views(buffer: deep_moe.Buffer, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(bits((9, 2 * WIDTH), torch.float32).nan_to_num())
    same(sent(buffer, x), x.detach())


def test_scales_of_any_strides(buffer: deep_moe.Buffer) -> None:
    x, scales = bits((6, WIDTH), torch.uint8), torch.rand(4, 6).t()
    rows, received = sent(buffer, (x, scales))
    same(rows, x)
    same(received, scales)
    assert received.stride() == (1, 6)


def negated() -> torch.Tensor:
    return torch.zeros(4, WIDTH, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        pytest.param(negated, ValueError, r"x is a lazily negated view", id="negated"),
        pytest.param(
            lambda: torch.zeros(4, WIDTH).to_sparse(), TypeError, r"x: its memory cannot be read", id="sparse"
        ),
        pytest.param(lambda: torch.zeros(4, WIDTH, device="meta"), ValueError, r"x is on meta", id="meta"),
        pytest.param(
            lambda: torch.zeros(4, WIDTH, dtype=torch.complex64), TypeError, r"complex64", id="complex"
        ),
        pytest.param(
            lambda: torch.zeros(1, 1, 1, 4, WIDTH), ValueError, r"x has 5 dimensions", id="5 dimensions"
        ),
        pytest.param(lambda: [1.0], TypeError, r"x must be a torch.Tensor or", id="a list"),
    ],
)
def test_what_is_no_ordinary_tensor_is_refused(
    buffer: deep_moe.Buffer, x: Callable[[], Any], error: type[Exception], says: str
) -> None:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(error, match=says):
        buffer.dispatch(x(), topk_idx=ids, num_experts=1)
    good = bits((4, WIDTH), torch.bfloat16)
    same(sent(buffer, good), good)


def test_memory_goes_back_with_the_last_tensor(buffer: deep_moe.Buffer) -> None:
    rows = [sent(buffer, bits((7, WIDTH), torch.bfloat16)) for _ in range(3)]
    live = buffer.memory_stats()["live_blocks"]
    part = rows[1][2:4].view(torch.int16)
    kept = part.clone()
    del rows
    gc.collect()
    assert 0 < buffer.memory_stats()["live_blocks"] < live
    assert torch.equal(part, kept)
    del part
    assert buffer.memory_stats()["live_blocks"] == 0


def test_tensors_outlive_their_buffer(buffer: deep_moe.Buffer) -> None:
    x = bits((7, WIDTH), torch.bfloat16)
    rows = sent(buffer, x)
    buffer.destroy()
    same(rows, x)


def test_another_table_is_not_used() -> None:
    """What is no capsule of the right name is as none."""
    try:
        for strange in (None, object(), 17):
            _native.connect(strange)
            x = bits((3, WIDTH), torch.bfloat16)
            buffer = deep_moe.Buffer(None, comm=deep_moe.thread_comms(1)[0], device="cpu")
            same(sent(buffer, x), x)
            buffer.destroy()
    finally:
        _native.connect()
