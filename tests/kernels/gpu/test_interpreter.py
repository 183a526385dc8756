"""The interpreter's numbers are the chips': casts, dots, arithmetic, arguments, loops.

torch says what a cast gives, and exact integers or fractions what a sum does.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.bfloat16, torch.float16, *FP8)


@triton.jit
def cast(x, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


def cast_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    block = math.gcd(values.numel(), 1 << 14)
    cast[(values.numel() // block,)](values.contiguous(), out, BLOCK=block)
    return out


def every(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a type of one or two bytes."""
    if dtype.itemsize == 1:
        return torch.arange(-128, 128).to(torch.int8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def around_every_bfloat16() -> Tensor:
    """float32 at, below, at and above the middle between each bfloat16 and the next one."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """The same values, NaN for NaN, and the same sign of zero."""
    assert got.dtype == expected.dtype
    got, expected = got.double(), expected.double()
    missing = expected.isnan()
    assert torch.equal(got.isnan(), missing)
    assert torch.equal(got[~missing], expected[~missing])
    assert torch.equal(got[~missing].signbit(), expected[~missing].signbit())


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


# ---- arithmetic ---------------------------------------------------------------------------------


@triton.jit
def arithmetic(x, y, out, flags, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(out + place, a + b)
    tl.store(out + SIZE + place, a - b)
    tl.store(out + 2 * SIZE + place, a * b)
    tl.store(out + 3 * SIZE + place, tl.where(a > b, a, b))
    tl.store(flags + place, a < b)
    tl.store(flags + SIZE + place, a >= b)
    tl.store(flags + 2 * SIZE + place, a == b)
    tl.store(flags + 3 * SIZE + place, a != b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_arithmetic_and_comparisons(dtype: torch.dtype) -> None:
    """Every value with one of a few, NaN, infinities and both zeros among them."""
    x = every(dtype)
    few = [0.0, -0.0, 1.0, -3.14, 1e-3, 1e3, math.inf, math.nan]
    y = torch.tensor(few, dtype=dtype)[torch.arange(x.numel()) * 5 % 8]
    size = x.numel()
    out, flags = torch.empty(4, size, dtype=dtype), torch.empty(4, size, dtype=torch.bool)
    arithmetic[(4,)](x, y, out, flags, BLOCK=size // 4, SIZE=size)
    for got, expected in zip(out, (x + y, x - y, x * y, torch.where(x > y, x, y)), strict=True):
        assert_same(got, expected)
    for flag, expected in zip(flags, (x < y, x >= y, x == y, x != y), strict=True):
        assert torch.equal(flag, expected)


@triton.jit
def extremes(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(out + place, tl.maximum(a, b))
    tl.store(out + BLOCK + place, tl.minimum(a, b))
    tl.store(out + 2 * BLOCK + place, tl.clamp(a, -1.0, 1.0))
    kept = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + 3 * BLOCK + place, kept)


def test_a_maximum_does_not_hand_nan_on() -> None:
    x = torch.tensor([1.0, math.nan, math.nan, 2.0])
    y = torch.tensor([math.nan, 1.0, math.nan, 3.0])
    out = torch.empty(4, 4)
    extremes[(1,)](x, y, out, BLOCK=4)
    assert_same(out[0], torch.tensor([1.0, 1.0, math.nan, 3.0]))
    assert_same(out[1], torch.tensor([1.0, 1.0, math.nan, 2.0]))
    assert_same(out[2], torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert out[3, :3].isnan().all()


@triton.jit
def reductions(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    block = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out + m, tl.max(block, 1))
    tl.store(out + M + m, tl.min(block, 1))
    tl.store(out + 2 * M + m, tl.sum(block, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    """A row of NaN gives NaN without a warning; one NaN in a row does not reach its maximum."""
    x = torch.randint(-99, 99, (4, 8), generator=torch.Generator().manual_seed(1)).float()
    x[1] = math.nan
    x[2, 3] = math.nan
    out = torch.empty(3, 4)
    reductions[(1,)](x.to(dtype), out, M=4, N=8)
    held = x[2][~x[2].isnan()]
    assert_same(out[0], torch.stack([x[0].max(), x[1, 0], held.max(), x[3].max()]))
    assert_same(out[1], torch.stack([x[0].min(), x[1, 0], held.min(), x[3].min()]))
    assert_same(out[2], x.sum(1))


@triton.jit
def sum_all(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    block = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(out, tl.sum(block))
    tl.store(out + 1 + n[None, :], tl.sum(block, 0, keep_dims=True))


def test_sums_of_bfloat16_have_bfloat16_parts() -> None:
    """256 and 1 are 256 again; nothing is lost where the parts are small."""
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    out = torch.empty(9, dtype=torch.bfloat16)
    sum_all[(1,)](x, out, M=2, N=8)
    assert out.tolist() == [16.0] + 8 * [2.0]
    x[0] = 256
    sum_all[(1,)](x, out, M=2, N=8)
    assert out.tolist() == [2048.0] + 8 * [256.0]


@triton.jit
def fuse(x, y, z, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.fma(tl.load(x + place), tl.load(y + place), tl.load(z + place)))


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """The number of a type nearest to a fraction, ties to the even one."""
    rough = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    near = [rough.nextafter(torch.tensor(side, dtype=dtype)) for side in (-math.inf, math.inf)]
    bits = {torch.float32: torch.int32, torch.float16: torch.int16}[dtype]

    def badness(each: Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(each.item()) - exact), int(each.view(bits).item()) & 1

    return float(min([rough, *near], key=badness).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fma_is_rounded_once(dtype: torch.dtype) -> None:
    """Drawn numbers; and products beside a middle between two floats, by less than float64 says."""
    bits = 11 if dtype == torch.float16 else 24
    x, y, z = torch.randn(3, 1024, generator=torch.Generator().manual_seed(2)).to(dtype)
    z[:512] = -(x * y)[:512]  # what rounding the product lost is all that is left
    x[512], y[512], z[512] = 2.0**-bits, 1 + 2.0 ** (1 - bits), 1.0
    x[513], y[513], z[513] = -(2.0**-bits), 1 - 2.0 ** (1 - bits), 1 + 2.0 ** (1 - bits)
    out = torch.empty(1024, dtype=dtype)
    fuse[(1,)](x, y, z, out, BLOCK=1024)
    for row in range(1024):
        a, b, c = (Fraction(each[row].item()) for each in (x, y, z))
        assert out[row].item() == nearest(a * b + c, dtype), row


@triton.jit
def high_halves(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.umulhi(tl.load(x + place), tl.load(y + place)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_umulhi_reads_its_operands_as_unsigned(dtype: torch.dtype) -> None:
    limits, bits = torch.iinfo(dtype), torch.iinfo(dtype).bits
    x = torch.tensor([3, -1, limits.min, limits.max], dtype=dtype)
    y = torch.tensor([limits.min, -1, -2, limits.max], dtype=dtype)
    out = torch.empty(4, dtype=dtype)
    high_halves[(1,)](x, y, out, BLOCK=4)
    unsigned = 1 << bits
    highs = [
        (a % unsigned) * (b % unsigned) >> bits for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    assert [each % unsigned for each in out.tolist()] == highs


@triton.jit
def undefined(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    a = tl.load(x + place)
    tl.store(out + place, tl.exp2(a - a) + a / 0.0 + tl.log(a) + tl.exp(a * 1e30))


def test_what_has_no_value_is_nan_without_a_warning() -> None:
    out = torch.empty(4)
    undefined[(1,)](torch.tensor([-math.inf, math.inf, 0.0, -1.0]), out, BLOCK=4)
    assert out.isnan().all()


# ---- arguments and loops ------------------------------------------------------------------------


@triton.jit
def keep_number(number, out):
    tl.store(out, number.to(tl.float64))


@triton.jit(do_not_specialize=["number"])
def keep_unspecialized(number, out):
    tl.store(out, number.to(tl.float64))


@triton.jit
def multiply_number(number, out):
    tl.store(out + tl.arange(0, 1), number * tl.full((1,), 7, tl.int32))


def test_an_argument_of_one_is_a_constant() -> None:
    """As in a compiled kernel: it has no ``.to``, unless it asks not to be specialized."""
    out = torch.empty(1, dtype=torch.float64)
    keep_number[(1,)](2, out)
    assert out.item() == 2
    with pytest.raises(InterpreterError, match="no attribute 'to'"):
        keep_number[(1,)](1, out)
    keep_unspecialized[(1,)](number=1, out=out)
    assert out.item() == 1
    multiply_number[(1,)](1, out)
    assert out.item() == 7


def test_float_and_bool_arguments_are_the_chips() -> None:
    out = torch.empty(1, dtype=torch.float64)
    keep_number[(1,)](0.1, out)
    assert out.item() == torch.tensor(0.1, dtype=torch.float32).item()
    keep_number[(1,)](True, out)
    assert out.item() == 1


@triton.jit
def pass_through(tensors, out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(tensors[0] + tl.arange(0, BLOCK)) * tensors[1])


def test_tuples_are_specialized_within() -> None:
    x, out = torch.arange(4.0), torch.empty(4)
    for number in (1, 3):
        pass_through[(1,)]((x, number), out, BLOCK=4)
        assert torch.equal(out, number * x)


@triton.jit
def halve(out, low, high, TRITONS: tl.constexpr):
    if TRITONS:
        for i in tl.range(low, high, num_stages=2):
            tl.store(out + i - low, i // 2)
    else:
        for i in range(low, high):
            tl.store(out + i - low, i // 2)


@pytest.mark.parametrize("tritons", [False, True])
def test_loop_variables_divide_as_the_chip_does(tritons: bool) -> None:
    """Towards zero, where Python's own would go down."""
    out = torch.empty(6, dtype=torch.int32)
    halve[(1,)](out, -3, 3, TRITONS=tritons)
    assert out.tolist() == [-1, -1, 0, 0, 0, 1]


@triton.jit
def wide_loop(out, low):
    for i in range(low, low + 1):
        tl.store(out, i * (1 << 20))


def test_loop_variables_are_as_wide_as_their_bounds() -> None:
    out = torch.empty(1, dtype=torch.int64)
    wide_loop[(1,)](out, 1 << 33)
    assert out.item() == 1 << 53
