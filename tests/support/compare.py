"""Comparisons that say where two tensors differ."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deep_moe.reference import Payload


def same_bits(got: Payload | None, want: Payload | None, what: str) -> None:
    """Equal in type, shape and every bit; pairs part by part."""
    if got is None or want is None:
        assert got is want, f"{what}: got {got}, expected {want}"
    elif isinstance(want, Tensor):
        assert isinstance(got, Tensor), f"{what}: got {type(got).__name__}, expected a tensor"
        _same_form(got, want, what)
        if not torch.equal(_bits(got), _bits(want)):
            raise AssertionError(f"{what}: {_first_difference(_bits(got), _bits(want), got, want)}")
    else:
        assert isinstance(got, tuple) and len(got) == 2, f"{what}: got {type(got).__name__}, expected a pair"
        same_bits(got[0], want[0], f"{what}, data")
        same_bits(got[1], want[1], f"{what}, scales")


def same_values(got: Tensor | None, want: Tensor | None, what: str) -> None:
    """Equal in type, shape and value (zeros of either sign are equal; NaN never is)."""
    if got is None or want is None:
        assert got is want, f"{what}: got {got}, expected {want}"
        return
    _same_form(got, want, what)
    if not torch.equal(got, want):
        raise AssertionError(f"{what}: {_first_difference(got, want, got, want)}")


def within(got: Tensor, want: Tensor, allowed: Tensor, what: str) -> None:
    """Each element differs by no more than its allowed error."""
    _same_form(got, want, what)
    error = (got.float() - want.float()).abs()
    bad = ~(error <= allowed)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements are too far off; at {at} "
            f"got {got[at].item()}, expected {want[at].item()} within {allowed.expand_as(bad)[at].item():.3g}"
        )


def one_rounding(dtype: torch.dtype, magnitude: Tensor) -> Tensor:
    """How far a value of this magnitude may be from its fp32 original after one rounding to `dtype`."""
    return magnitude.abs() * (torch.finfo(dtype).eps / 2 + 1e-6) + torch.finfo(dtype).smallest_normal


def _same_form(got: Tensor, want: Tensor, what: str) -> None:
    assert got.dtype == want.dtype, f"{what}: got {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: got shape {tuple(got.shape)}, expected {tuple(want.shape)}"


def _bits(t: Tensor) -> Tensor:
    rows = t.reshape(t.shape[0], math.prod(t.shape[1:]))
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _first_difference(a: Tensor, b: Tensor, got: Tensor, want: Tensor) -> str:
    rows = (a != b).reshape(len(a), -1).any(1).nonzero().flatten()
    row = int(rows[0])
    return (
        f"{len(rows)} of {len(a)} rows differ, first row {row}:\n"
        f"  got      {got[row].flatten()[:8].float().tolist()} ...\n"
        f"  expected {want[row].flatten()[:8].float().tolist()} ..."
    )
