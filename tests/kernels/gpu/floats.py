"""The narrow floats of GPUs in numpy: exact decoding, and rounding to nearest even.

numpy has no bfloat16 and no fp8; Triton's interpreter keeps their bits in unsigned integers. Here
a value is a float32 or float64 array and a code is what the interpreter keeps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

Array = npt.NDArray[Any]

FP8 = (tl.float8e4nv, tl.float8e5)
NARROW = (tl.bfloat16, *FP8)
_WIDE: dict[Any, Any] = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}


def to_odd(values: Array) -> Array:
    """float64 as float32, rounded to odd: rounding that again, to less, rounds only once."""
    nearest = values.astype(np.float32)
    outward = np.abs(nearest) > np.abs(values)
    inward = np.where(outward, np.nextafter(nearest, np.float32(0)), nearest)
    inexact = (inward != values) & np.isfinite(inward)
    return (inward.view(np.uint32) | inexact).view(np.float32)


def to_tf32(values: Array) -> Array:
    """float32 without the last 13 bits, which tensor cores do not read."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def fused(x: Array, y: Array, z: Array) -> Array:
    """x * y + z of float32 or narrower in float64, rounded to odd: ``encoded`` rounds it once."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    # What the sum lost (Knuth's two-sum); where it lost something, its last bit becomes 1.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    inexact = np.isfinite(total) & (lost != 0)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    return np.where(inexact & even, np.nextafter(total, towards), total)


@cache
def _values_of(dtype: Any) -> Array:
    """The value of each of the 256 codes of an fp8 type."""
    codes = np.arange(256)
    width, bias = dtype.fp_mantissa_width, dtype.exponent_bias
    fraction, exponent = codes & ((1 << width) - 1), (codes & 0x7F) >> width
    small = fraction * 2.0 ** (1 - bias - width)
    large = (fraction + (1 << width)) * 2.0 ** (exponent.astype(float) - bias - width)
    values = np.where(exponent == 0, small, large)
    if dtype == tl.float8e4nv:
        values[(codes & 0x7F) == 0x7F] = np.nan
    if dtype == tl.float8e5:
        values[(codes & 0x7F) == 0x7C] = np.inf
        values[(codes & 0x7F) > 0x7C] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def _to_fp8(values: Array, dtype: Any) -> Array:
    """Codes of the nearest values, ties to even; what is too large becomes the largest finite."""
    positive = _values_of(dtype)[:128]
    finite = positive[np.isfinite(positive)].astype(np.float64)
    between = (finite[1:] + finite[:-1]) / 2
    size = np.abs(values.astype(np.float64))
    codes = np.searchsorted(between, size, side="left")
    tie = size == between[np.minimum(codes, between.size - 1)]
    codes = codes + (tie & (codes % 2 == 1))
    signed = codes | (np.signbit(values) * 0x80)
    return np.where(np.isnan(values), 0x7F, signed).astype(np.uint8)


def _to_bfloat16(values: Array) -> Array:
    bits = (to_odd(values) if values.dtype == np.float64 else values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def decoded(codes: Array, dtype: Any) -> Array:
    """The values of codes of a type, as float32 (float64 stays itself)."""
    codes = np.ascontiguousarray(codes)
    if dtype == tl.bfloat16:
        return (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in FP8:
        return _values_of(dtype)[codes.view(np.uint8)]
    values = codes.view(_WIDE[dtype])
    return values if dtype == tl.float64 else values.astype(np.float32)


def encoded(values: Array, dtype: Any) -> Array:
    """Codes of the nearest values of a type, ties to even; fp8 saturates, as the chips do it."""
    values = np.ascontiguousarray(values)
    if dtype == tl.bfloat16:
        return _to_bfloat16(values)
    if dtype in FP8:
        return _to_fp8(values, dtype)
    return values.astype(_WIDE[dtype])
