"""Every bit pattern of the narrow floats, and what it means to be the same value."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.bfloat16, torch.float16, *FP8)


def every(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a type of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(-128, 128).to(torch.int8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """The same values, NaN for NaN, and the same sign of zero."""
    assert got.dtype == expected.dtype
    got, expected = got.double(), expected.double()
    missing = expected.isnan()
    assert torch.equal(got.isnan(), missing)
    assert torch.equal(got[~missing], expected[~missing])
    assert torch.equal(got[~missing].signbit(), expected[~missing].signbit())
