"""Intervals of floats through operations, for float32 and float64 at once.

The ends are rounded as both types round them. That is sound for correctly rounded operations, since
rounding keeps order; other functions are widened by more than they err. None stands for anything,
NaN included.
"""

import math
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Interval(NamedTuple):
    """A closed interval. For floats, the ends may be infinite, and no value is NaN."""

    low: float
    high: float


# What is known of a value: of integers and floats an interval, of booleans which one it is; None
# where nothing is known (a float may then be NaN).
Bounds: TypeAlias = Interval | bool | None

_WIDER = 2.0**-18  # relative: more than vectorised functions err by in float32
_SMALLEST = 2.0**-126  # what is smaller may be flushed to zero


def _single(x: float) -> float:
    """Rounded to float32."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def rounded(low: float, high: float) -> Interval:
    """Return what exact values between these ends are rounded to."""
    ends = [low, high, _single(low), _single(high)]
    if any(0.0 < abs(x) < _SMALLEST for x in ends):
        ends.append(0.0)
    return Interval(min(ends), max(ends))


def _widened(low: float, high: float) -> Interval:
    """Return what functions give that are not rounded correctly."""
    if math.isfinite(low):
        low -= abs(low) * _WIDER
    if math.isfinite(high):
        high += abs(high) * _WIDER
    return rounded(low, high)


def _infinite(*values: Interval) -> bool:
    return any(math.inf in (-x.low, x.high) for x in values)


def _may_vanish(a: Interval) -> bool:
    return a.low < _SMALLEST and a.high > -_SMALLEST


def sign(a: Interval) -> Interval:
    """-1, 0 or 1, of integers too."""
    low, high = [(x > 0) - (x < 0) for x in a]
    return Interval(low, high)


def opposite(a: Interval) -> Interval:
    """``-a``, of integers too."""
    return Interval(-a.high, -a.low)


def absolute(a: Interval) -> Interval:
    """``abs(a)``, of integers too."""
    low = 0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
    return Interval(low, max(abs(a.low), abs(a.high)))


def lesser(a: Interval, b: Interval) -> Interval:
    """``min(a, b)``, of integers too."""
    return Interval(min(a.low, b.low), min(a.high, b.high))


def larger(a: Interval, b: Interval) -> Interval:
    """``max(a, b)``, of integers too."""
    return Interval(max(a.low, b.low), max(a.high, b.high))


def add(a: Interval, b: Interval) -> Interval | None:
    """``a + b``."""
    # Infinities of opposite signs could meet.
    if (a.high == math.inf and b.low == -math.inf) or (a.low == -math.inf and b.high == math.inf):
        return None
    return rounded(a.low + b.low, a.high + b.high)


def sub(a: Interval, b: Interval) -> Interval | None:
    """``a - b``."""
    return add(a, opposite(b))


def mul(a: Interval, b: Interval) -> Interval | None:
    """``a * b``."""
    if _infinite(a, b):
        return None
    ends = [x * y for x in a for y in b]
    low, high = min(ends), max(ends)
    # A compiler may leave out the rounding of a product that something is added to.
    if not low.is_integer():
        low = math.nextafter(low, -math.inf)
    if not high.is_integer():
        high = math.nextafter(high, math.inf)
    return rounded(low, high)


def div(a: Interval, b: Interval) -> Interval | None:
    """``a / b``."""
    if _may_vanish(b) or (_infinite(a) and _infinite(b)):
        return None
    ends = [x / y for x in a for y in b]
    return rounded(min(ends), max(ends))


def floordiv(a: Interval, b: Interval) -> Interval | None:
    """``a // b``."""
    if _may_vanish(b) or _infinite(a, b):
        return None
    ends = [x // y for x in a for y in b] + [_step(math.floor)(x / y) for x in a for y in b]
    return rounded(min(ends), max(ends))


def mod(a: Interval, b: Interval) -> Interval | None:
    """``a % b``."""
    if _may_vanish(b) or _infinite(a, b):
        return None
    if b.high < 0:
        mirrored = mod(opposite(a), opposite(b))
        return None if mirrored is None else opposite(mirrored)
    if a.low >= 0 and b.low == b.high and a.low // b.low == a.high // b.low:
        return rounded(a.low % b.low, a.high % b.low)
    return Interval(0.0, b.high)  # a small negative and the divisor is rounded to the divisor


def power(a: Interval, b: Interval) -> Interval | None:
    """``a ** b``."""
    if _infinite(a, b):
        return None
    whole = b.low == b.high and float(b.low).is_integer()
    if a.low < _SMALLEST and not (whole and (b.low >= 0 or a.high <= -_SMALLEST)):
        return None
    even = whole and b.low % 2 == 0
    base = absolute(a) if even else a
    ends = [_power(x, y) for x in base for y in b]
    return _widened(min(ends), max(ends))


def _power(x: float, y: float) -> float:
    try:
        return float(x**y)
    except OverflowError:
        return math.copysign(math.inf, x) if y % 2 == 1 else math.inf


def _step(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: float(function(x)) if math.isfinite(x) else x


def stepped(function: Callable[[float], int]) -> Callable[[Interval], Interval]:
    """Return the interval function of a step, whose values are whole numbers and so exact."""
    step = _step(function)
    return lambda a: Interval(step(a.low), step(a.high))


def rising(function: Callable[[float], float]) -> Callable[[Interval], Interval]:
    """Return the interval function of one that never falls."""
    return lambda a: _widened(function(a.low), function(a.high))


def exponential(x: float, base: float = math.e) -> float:
    """``base ** x``, infinite where Python's overflows."""
    try:
        return math.exp(x) if base == math.e else base**x
    except OverflowError:
        return math.inf


def logarithm(log: Callable[[float], float]) -> Callable[[Interval], Interval | None]:
    """Return the interval function of a logarithm, -infinity at 0."""

    def of(a: Interval) -> Interval | None:
        if a.low < 0:
            return None
        ends = [log(x) if x >= _SMALLEST else -math.inf for x in a]
        if a.low < _SMALLEST <= a.high or a.low >= _SMALLEST:
            return _widened(*ends)
        return _widened(-math.inf, log(_SMALLEST))

    return of


def square_root(a: Interval) -> Interval | None:
    """``sqrt(a)``."""
    return None if a.low < 0 else _widened(math.sqrt(a.low), math.sqrt(a.high))


def inverse_root(a: Interval) -> Interval | None:
    """``1 / sqrt(a)``."""
    if a.low < _SMALLEST:
        return None
    return _widened(1.0 / math.sqrt(a.high), 1.0 / math.sqrt(a.low))


def wave(a: Interval) -> Interval | None:
    """``sin(a)`` or ``cos(a)``: from -1 to 1."""
    return None if _infinite(a) else Interval(-1.0 - _WIDER, 1.0 + _WIDER)
