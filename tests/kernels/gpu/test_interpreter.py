"""The interpreter's casts and dots are the chips': torch says what a cast gives, integers a dot."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.gpu.patterns import FP8, NARROW, assert_same, every


@triton.jit
def cast(x, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


def cast_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    block = math.gcd(values.numel(), 1 << 14)
    cast[(values.numel() // block,)](values.contiguous(), out, BLOCK=block)
    return out


def around_every_bfloat16() -> Tensor:
    """float32 at, below, at and above the middle between each bfloat16 and the next one."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As the chips cast to fp8: beyond the largest number, infinity too, is the largest."""
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)


# ---- casts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("source", NARROW, ids=str)
def test_every_value_of_a_narrow_type(source: torch.dtype, target: torch.dtype) -> None:
    values = every(source)
    assert_same(cast_to(values, target), values.float().to(target))


@pytest.mark.parametrize("target", FP8, ids=str)
@pytest.mark.parametrize("source", NARROW, ids=str)
def test_every_value_of_a_narrow_type_as_fp8(source: torch.dtype, target: torch.dtype) -> None:
    values = every(source)
    expected = values if source == target else saturated(values, target)
    assert_same(cast_to(values, target), expected)


def test_float32_as_bfloat16_goes_to_the_nearest() -> None:
    """Halfway cases to even, carries into the exponent, subnormals, up to infinity."""
    values = around_every_bfloat16()
    assert_same(cast_to(values, torch.bfloat16), values.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, *FP8], ids=str)
def test_float32_goes_to_the_nearest(dtype: torch.dtype) -> None:
    """Every middle between neighbours, and the float32 on both sides of it."""
    finite = every(dtype).float()
    finite = finite[finite.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    values = torch.cat([middles.nextafter(down), middles, middles.nextafter(up), finite])
    values = torch.cat([values, torch.zeros(-values.numel() % 256)])
    assert_same(cast_to(values, dtype), saturated(values, dtype))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([math.inf, -math.inf, 1e30, -1e30, largest, 1.1 * largest, 0.0, -0.0])
    expected = torch.tensor([largest, -largest, largest, -largest, largest, largest, 0.0, -0.0])
    assert_same(cast_to(values, dtype).float(), expected)
    assert cast_to(torch.tensor([math.nan]), dtype).float().isnan().all()


def test_float64_is_rounded_once() -> None:
    """Just above the middle of two bfloat16, by less than a float32 can say."""
    values = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40], dtype=torch.float64)
    assert cast_to(values, torch.bfloat16).tolist() == [1 + 2.0**-7, 1.0]
    values = torch.tensor([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11], dtype=torch.float64)
    assert cast_to(values, torch.float16).tolist() == [1 + 2.0**-10, 1.0]


def test_integers_as_bfloat16() -> None:
    values = torch.arange(-600, 600, dtype=torch.int32)
    assert_same(cast_to(values, torch.bfloat16), values.float().to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [torch.int32, torch.int64], ids=str)
def test_floats_as_integers(dtype: torch.dtype, target: torch.dtype) -> None:
    """Towards zero; what no integer holds is the limit, and NaN is 0."""
    values = torch.tensor([1.5, -1.5, -0.5, 2.5, math.inf, -math.inf, math.nan, 1e30], dtype=dtype)
    limits = torch.iinfo(target)
    expected = [1, -1, 0, 2, limits.max, limits.min, 0, limits.max]
    assert cast_to(values, target).tolist() == expected


@triton.jit
def truncate(x, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place).to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_rounding_towards_zero_where_it_is_asked_for() -> None:
    values = around_every_bfloat16()
    values = torch.where(values.isfinite(), values, 0.0)
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    truncate[(6 * 64,)](values, out, BLOCK=1 << 10)
    assert_same(out, (values.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16())


# ---- dots ---------------------------------------------------------------------------------------


@triton.jit
def matmul(a, b, out, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    rows = tl.program_id(0) * M + m
    left = tl.load(a + rows[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    product = tl.dot(left, right, input_precision=PRECISION)
    tl.store(out + rows[:, None] * N + n[None, :], product)


def multiplied(a: Tensor, b: Tensor, precision: str = "ieee", rows: int = 16) -> Tensor:
    """a [R, K] @ b [K, N], R a multiple of ``rows``."""
    dtype = torch.float32 if a.is_floating_point() else torch.int32
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    grid = (a.shape[0] // rows,)
    matmul[grid](a, b, out, K=a.shape[1], N=b.shape[1], M=rows, PRECISION=precision)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, *NARROW], ids=str)
def test_a_dot_of_small_integers_is_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (16, 16), generator=generator).float() for _ in range(2))
    assert torch.equal(multiplied(a.to(dtype), b.to(dtype)).float(), a @ b)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_dot_with_the_identity_is_the_operand(dtype: torch.dtype) -> None:
    """Every finite value, on either side."""
    values = every(dtype)
    values = torch.where(values.float().isfinite(), values.float(), 0.0).to(dtype).reshape(-1, 16)
    eye = torch.eye(16).to(dtype)
    assert torch.equal(multiplied(values, eye), values.float())
    few = values[:16]
    assert torch.equal(multiplied(eye, few), few.float())


def test_a_dot_of_bfloat16_keeps_whole_products() -> None:
    """Products of 8-bit fractions have 16 bits, and sums of them float32's 24."""
    a = torch.full((16, 16), 1 + 2.0**-7).bfloat16()
    assert torch.equal(multiplied(a, a), torch.full((16, 16), 16 * (1 + 2.0**-7) ** 2))


def test_tf32_reads_ten_bits() -> None:
    """Operands are cut, not rounded; three dots have float32's precision again."""
    a = torch.full((16, 16), 1 + 2.0**-10 + 2.0**-11 + 2.0**-20)
    one = torch.eye(16)
    assert torch.equal(multiplied(a, one, "ieee"), a)
    assert torch.equal(multiplied(a, one, "tf32"), torch.full((16, 16), 1 + 2.0**-10))
    assert torch.equal(multiplied(-a, one, "tf32"), torch.full((16, 16), -1 - 2.0**-10))
    assert torch.equal(multiplied(one, a, "tf32"), torch.full((16, 16), 1 + 2.0**-10))
    assert torch.equal(multiplied(a, one, "tf32x3"), a)
    half = a.bfloat16()  # not for other types
    assert torch.equal(multiplied(half, one.bfloat16(), "tf32"), half.float())


@triton.jit
def rows_by_columns(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + n[:, None] * K + k[None, :])
    product = tl.dot(left, tl.trans(right), input_precision="ieee")
    tl.store(out + m[:, None] * N + n[None, :], product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_element_of_a_dot_has_the_same_bits_in_any_block(dtype: torch.dtype) -> None:
    """Of any shape, and transposed."""
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = torch.empty(64, 64)
    rows_by_columns[(1,)](a, b, whole, M=64, N=64, K=64)
    assert (whole.double() - a.double() @ b.double().T).abs().max() < 2e-5
    for m, n in ((16, 64), (64, 16), (16, 16), (32, 64)):
        out = torch.empty(m, n)
        rows_by_columns[(1,)](a, b, out, M=m, N=n, K=64)
        assert torch.equal(out, whole[:m, :n])
        turned = torch.empty(n, m)
        rows_by_columns[(1,)](b, a, turned, M=n, N=m, K=64)
        assert torch.equal(turned.T, whole[:m, :n])
