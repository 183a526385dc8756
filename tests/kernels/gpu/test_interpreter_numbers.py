"""The interpreter's arithmetic, arguments and loops are the chips'."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.kernels.gpu.patterns import assert_same, every

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
def multiply_numbers(left, right, out):
    tl.store(out, left * right)


def test_wide_integers_are_wide() -> None:
    out = torch.empty(1, dtype=torch.int64)
    multiply_numbers[(1,)](1 << 31, 3 << 30, out)
    assert out.item() == 3 << 61
    multiply_numbers[(1,)](-5, 7, out)
    assert out.item() == -35


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
