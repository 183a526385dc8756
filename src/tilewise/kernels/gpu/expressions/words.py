"""Define in Triton the operations of expressions that it has no operation of its own for.

The arguments are blocks and scalars, in any mixture that broadcasts: int32 or int64 of one width,
or float32. No vendor's library is used: the interpreter and every chip run the same formulas. Sums
and products that must be exact are fused (``tl.fma``); nothing depends on whether a compiler fuses
others.
"""

import triton
import triton.language as tl

_INF: tl.constexpr = tl.constexpr(float("inf"))
_NAN: tl.constexpr = tl.constexpr(float("nan"))
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# log2(e) and twice that, each as the float32 next to it and what is missing.
_LOG2E: tl.constexpr = tl.constexpr(1.4426950216293335)
_LOG2E_REST: tl.constexpr = tl.constexpr(1.9259629891e-08)
_LOG2E_TWICE: tl.constexpr = tl.constexpr(2.885390043258667)
_LOG2E_TWICE_REST: tl.constexpr = tl.constexpr(3.8519259782e-08)
_ALL_EVEN: tl.constexpr = tl.constexpr(8388608.0)  # 2**23: from here on floats have no fraction
_LEAST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
_LARGEST_INT: tl.constexpr = tl.constexpr(9223372036854775808.0)
_LEAST_INT: tl.constexpr = tl.constexpr(-9223372036854775808)


@triton.jit
def truth(comparison):
    """A comparison of two numbers that is to be joined with blocks.

    Triton's interpreter keeps the type of what was compared, and makes numbers of it when it
    repeats it for every element; joined to a truth value, it is one.
    """
    return tl.cast(True, tl.int1) & comparison


# ---- integers: as Python's, and as the reference has them where Python raises


@triton.jit
def floordiv_positive(a, b):
    """``a // b`` for b > 0."""
    q = a // b
    return q - (a - q * b < 0).to(q.dtype)


@triton.jit
def mod_positive(a, b):
    """``a % b`` for b > 0."""
    r = a % b
    return tl.where(r < 0, r + b, r)


@triton.jit
def floordiv_any(a, b):
    """``a // b``; ``a`` for b = 0."""
    # Processors may trap for a divisor of 0, and for the least number by -1.
    safe = tl.where((b == 0) | (b == -1), 1, b)
    q = a // safe
    r = a - q * safe
    q = q - ((r != 0) & ((r < 0) != (safe < 0))).to(q.dtype)
    return tl.where(b == -1, 0 - a, q)


@triton.jit
def mod_any(a, b):
    """``a % b``; 0 for b = 0."""
    safe = tl.where((b == 0) | (b == -1), 1, b)
    r = a % safe
    return tl.where((r != 0) & ((r < 0) != (safe < 0)), r + safe, r)


@triton.jit
def sign_int(a):
    """-1, 0 or 1."""
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@triton.jit
def to_int(a):
    """Round a float towards zero; the least integer for what does not fit, NaN included."""
    fits = tl.abs(a) < _LARGEST_INT
    return tl.where(fits, tl.where(fits, a, 0.0).to(tl.int64), tl.cast(_LEAST_INT, tl.int64))


# ---- floats


@triton.jit
def sign_float(a):
    """-1, 0 or 1; 0 for NaN."""
    return (a > 0).to(tl.float32) - (a < 0).to(tl.float32)


@triton.jit
def least(a, b):
    """Return the lesser one; NaN if one of them is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(a, b):
    """Return the larger one; NaN if one of them is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_even(a):
    """To the nearest whole number, of two the even one."""
    size = tl.abs(a)
    whole = (size + _ALL_EVEN) - _ALL_EVEN
    return tl.where(size < _ALL_EVEN, tl.where(a < 0, -whole, whole), a)


@triton.jit
def truncated(a):
    """Towards zero."""
    return tl.where(a < 0, tl.ceil(a), tl.floor(a))


@triton.jit
def floordiv_float(a, b):
    """``floor(a / b)`` of the exact quotient; ``a / b`` for b = 0."""
    quotient = tl.div_rn(a, b)
    q = tl.floor(quotient)
    # Rounding may have lifted the quotient to the next whole number.
    r = tl.fma(-q, b, a)
    q = tl.where((r != 0) & ((r < 0) != (b < 0)) & (tl.abs(q) < _ALL_EVEN), q - 1.0, q)
    endless = truth(tl.abs(b) == _INF) & truth(quotient == 0)
    q = tl.where(endless, tl.where(a * b < 0, -1.0, 0.0), q)
    q = tl.where(tl.abs(a) == _INF, _NAN, q)
    return tl.where(b == 0, quotient, q)


@triton.jit
def mod_float(a, b):
    """``a % b`` with the sign of b: exact for ``|a / b| < 2**46``, then with an error below |a|."""
    many = b * _ALL_EVEN
    q = truncated(tl.div_rn(a, many))
    rest = tl.where(q == 0, a, tl.fma(-q, many, a))
    q = tl.floor(tl.div_rn(rest, b))
    r = tl.where(q == 0, rest, tl.fma(-q, b, rest))
    r = tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
    finite = truth(tl.abs(a) < _INF)
    r = tl.where(truth(tl.abs(b) == _INF) & finite, tl.where(a * b < 0, b, a), r)
    return tl.where(truth(b != 0) & finite, r, _NAN)


@triton.jit
def exponential(a):
    """``e**a`` to 3 units in the last place; results below the least normal number may be 0."""
    # Beyond these it is 0 or infinite; inside, what the rounded exponent misses is finite.
    a = tl.where(a > 120.0, 120.0, tl.where(a < -120.0, -120.0, a))
    exponent = a * _LOG2E
    missing = tl.fma(a, _LOG2E, -exponent) + a * _LOG2E_REST
    return tl.exp2(exponent) * (1.0 + missing * _LN2)


@triton.jit
def logistic(a):
    """``1 / (1 + e**-a)``."""
    return 1.0 / (1.0 + exponential(-a))


@triton.jit
def tangent(a):
    """``tanh(a)`` to 2 units in the last place."""
    size = tl.abs(a)
    # 1 - 2 / (e**(2x) + 1) loses no digits above 0.6; below, an odd polynomial (fitted for the
    # relative error at Chebyshev's points).
    t = a * a
    p = -0.006276390515267849
    p = p * t + 0.021116215735673904
    p = p * t - 0.053875137120485306
    p = p * t + 0.13332924246788025
    p = p * t - 0.3333333134651184
    near = a + a * (t * p)
    far = 1.0 - 2.0 / (tl.exp2(size * _LOG2E_TWICE) + 1.0)
    return tl.where(size < 0.6, near, tl.where(a < 0, -far, far))


@triton.jit
def _log2_pair(x):
    """log2 of a finite x > 0, as a float32 and what is missing; together to about 32 bits."""
    small = x < _LEAST_NORMAL
    bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (power << 23)).to(tl.float32, bitcast=True)  # in [sqrt(1/2), sqrt(2))
    power = (power - tl.where(small, 24, 0)).to(tl.float32)
    # log2(mantissa) = 2 / ln(2) * artanh(s), with s the following quotient.
    above = mantissa - 1.0
    below = mantissa + 1.0
    below_rest = mantissa - (below - 1.0)
    s = tl.div_rn(above, below)
    s_rest = (tl.fma(-s, below, above) - s * below_rest) / below
    t = s * s
    p = 0.11665931344032288
    p = p * t + 0.14275380969047546
    p = p * t + 0.2000006139278412
    p = p * t + 0.3333333432674408
    small_part = s_rest + s * (t * p)
    high = s * _LOG2E_TWICE
    rest = tl.fma(s, _LOG2E_TWICE, -high) + (s * _LOG2E_TWICE_REST + small_part * _LOG2E_TWICE)
    total = power + high
    rest = ((power - total) + high) + rest
    value = total + rest
    return value, rest - (value - total)


@triton.jit
def power(a, b):
    """``a ** b`` as C has it, to 4 units in the last place."""
    size = tl.abs(a)
    regular = (size > 0) & (size < _INF)
    value, rest = _log2_pair(tl.where(regular, size, 1.0))
    value = tl.where(regular, value, tl.where(size == 0, -_INF, size))
    exponent = value * b
    near = tl.abs(exponent) < 200.0
    missing = tl.where(near, tl.fma(value, b, -exponent) + rest * b, 0.0)
    found = tl.exp2(tl.where(near, exponent, tl.where(exponent > 0, 200.0, -200.0)))
    found = tl.where(exponent != exponent, _NAN, found * (1.0 + missing * _LN2))
    whole = truth(tl.floor(b) == b)
    odd = whole & truth(tl.floor(b * 0.5) != b * 0.5)
    signed = truth(a.to(tl.int32, bitcast=True) < 0)  # -0 too
    found = tl.where(signed & odd, -found, found)
    found = tl.where(truth(a < 0) & truth(a > -_INF) & (whole == 0), _NAN, found)
    one = truth(b == 0) | truth(a == 1.0) | (truth(a == -1.0) & truth(tl.abs(b) == _INF))
    return tl.where(one, 1.0, found)


# ---- captured tensors


@triton.jit
def clamped(index, size):
    """Return the index moved into its dimension, the nearest one."""
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def nearest(offset, index, size, stride):
    """``offset``, moved along a dimension to an index, or the nearest one that it has."""
    found = offset
    if not isinstance(size, int):  # no 1 known to the compiler
        found = offset + clamped(index, size).to(tl.int64) * tl.cast(stride, tl.int64)
    return found


@triton.jit
def moved(offset, index, size, stride):
    """Do as ``nearest`` for an index that is inside, or whose lane is masked out.

    A dimension of size 1 has a stride of 0. This avoids clamping: after it, the compiler no longer
    sees which elements lie side by side.
    """
    found = offset
    if not isinstance(size, int):
        found = offset + index.to(tl.int64) * tl.cast(stride, tl.int64)
    return found


@triton.jit
def inside(before, index, size):
    """Return the lanes of ``before`` whose index is in a dimension; all if it has size 1."""
    found = before
    if not isinstance(size, int):
        found = before & ((index < size) | (size == 1))
    return found


@triton.jit
def element(before, index, size):
    """The place in a contiguous tensor from that of the dimensions before, and the next index."""
    found = before
    if not isinstance(size, int):
        found = before * tl.cast(size, tl.int64) + clamped(index, size).to(tl.int64)
    return found


# ---- ranges: (low, full_low, full_high, high), see ``text.py``


@triton.jit
def range_and(one, other):
    """Return the range of the pairs that both masks show."""
    return (
        tl.maximum(one[0], other[0]),
        tl.maximum(one[1], other[1]),
        tl.minimum(one[2], other[2]),
        tl.minimum(one[3], other[3]),
    )


@triton.jit
def range_or(one, other):
    """Return the range of the pairs that either mask shows."""
    # An empty range is no bound to the other.
    some = one[0] < one[3]
    other_some = other[0] < other[3]
    low = tl.where(some, tl.where(other_some, tl.minimum(one[0], other[0]), one[0]), other[0])
    high = tl.where(some, tl.where(other_some, tl.maximum(one[3], other[3]), one[3]), other[3])
    # Full ranges that meet are one; of others the longer one is kept.
    full = one[2] - one[1]
    other_full = other[2] - other[1]
    meet = tl.maximum(one[1], other[1]) <= tl.minimum(one[2], other[2])
    meet = meet & (full > 0) & (other_full > 0)
    full_low = tl.where(full >= other_full, one[1], other[1])
    full_high = tl.where(full >= other_full, one[2], other[2])
    full_low = tl.where(meet, tl.minimum(one[1], other[1]), full_low)
    full_high = tl.where(meet, tl.maximum(one[2], other[2]), full_high)
    return low, full_low, full_high, high


@triton.jit
def range_within(found, size):
    """Return a range in order, and in [0, size]."""
    low = tl.minimum(tl.maximum(found[0], 0), size)
    high = tl.maximum(tl.minimum(found[3], size), low)
    full_low = tl.minimum(tl.maximum(found[1], low), high)
    full_high = tl.maximum(tl.minimum(found[2], high), full_low)
    return (
        low.to(tl.int32),
        full_low.to(tl.int32),
        full_high.to(tl.int32),
        high.to(tl.int32),
    )
