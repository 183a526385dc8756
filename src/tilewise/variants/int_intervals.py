"""What is known of integers and booleans through operations; and of comparisons, of floats too.

Integers are Python's, without bounds: ``intervals`` sees to what leaves 64 bits. Of booleans what
is known is which one it is: Kleene's logic.
"""

import math
from collections.abc import Callable
from operator import floordiv as floor_divided
from operator import mul as product
from operator import or_

from tilewise.variants.float_intervals import Bounds, Interval, opposite, rounded

_MOST_SHIFT = 63


def both(a: Bounds, b: Bounds) -> Bounds:
    """``a & b`` of booleans."""
    if a is False or b is False:
        return False
    return True if a is True and b is True else None


def negated(a: Bounds) -> Bounds:
    """``~a`` of a boolean."""
    return None if a is None else not a


def either(a: Bounds, b: Bounds) -> Bounds:
    """``a | b`` of booleans."""
    return negated(both(negated(a), negated(b)))


def differ(a: Bounds, b: Bounds) -> Bounds:
    """``a ^ b`` of booleans."""
    return None if a is None or b is None else a is not b


def same(a: Bounds, b: Bounds) -> Bounds:
    """``a == b`` of booleans."""
    return negated(differ(a, b))


def chosen(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    """``where(condition, a, b)``, of any kind."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, Interval) and isinstance(b, Interval):
        return Interval(min(a.low, b.low), max(a.high, b.high))
    return a if isinstance(a, bool) and a is b else None


def less(a: Interval, b: Interval) -> Bounds:
    """``a < b``."""
    if a.high < b.low:
        return True
    return False if a.low >= b.high else None


def not_more(a: Interval, b: Interval) -> Bounds:
    """``a <= b``."""
    return negated(less(b, a))


def equal(a: Interval, b: Interval) -> Bounds:
    """``a == b``."""
    if a.high < b.low or b.high < a.low:
        return False
    return True if a.low == a.high == b.low == b.high else None


def unequal(a: Interval, b: Interval) -> Bounds:
    """``a != b``."""
    return negated(equal(a, b))


def as_float(value: Bounds) -> Bounds:
    """Return what is known of a value of any kind as a float."""
    if isinstance(value, Interval):
        return rounded(float(value.low), float(value.high))
    return Interval(0.0, 1.0) if value is None else Interval(float(value), float(value))


def as_int(value: Bounds) -> Bounds:
    """Return what is known of a value of any kind as an integer, rounded towards zero."""
    if not isinstance(value, Interval) or math.inf in (-value.low, value.high):
        return None
    return Interval(math.trunc(value.low), math.trunc(value.high))


def _corners(op: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    """What rises or falls in each argument has its extremes at the corners of the box."""
    found = [op(int(x), int(y)) for x in a for y in b]
    return Interval(min(found), max(found))


def add(a: Interval, b: Interval) -> Bounds:
    """``a + b``."""
    return Interval(a.low + b.low, a.high + b.high)


def sub(a: Interval, b: Interval) -> Bounds:
    """``a - b``."""
    return Interval(a.low - b.high, a.high - b.low)


def mul(a: Interval, b: Interval) -> Bounds:
    """``a * b``."""
    return _corners(product, a, b)


def floordiv(a: Interval, b: Interval) -> Bounds:
    """``a // b``."""
    return None if b.low <= 0 <= b.high else _corners(floor_divided, a, b)


def mod(a: Interval, b: Interval) -> Bounds:
    """``a % b``."""
    if b.low <= 0 <= b.high:
        return None
    if b.high < 0:
        mirrored = mod(opposite(a), opposite(b))
        return opposite(mirrored) if isinstance(mirrored, Interval) else None
    if a.low >= 0 and a.high < b.low:
        return a
    if b.low == b.high and a.low // b.low == a.high // b.low:
        return Interval(a.low % b.low, a.high % b.low)
    return Interval(0, b.high - 1)


def shift(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Bounds]:
    """``<<`` or ``>>``."""

    def shifted(a: Interval, b: Interval) -> Bounds:
        return _corners(op, a, b) if b.low >= 0 and b.high <= _MOST_SHIFT else None

    return shifted


def _bits(a: Interval) -> int:
    """Return the least 2**k - 1 that is not below the interval, which has no negative."""
    return int((1 << int(a.high).bit_length()) - 1)


def bits_and(a: Interval, b: Interval) -> Bounds:
    """``a & b``."""
    if b.low != b.high:
        a, b = b, a
    mask = int(b.low)
    if b.low == b.high and mask >= 0 and mask & (mask + 1) == 0:
        return mod(a, Interval(mask + 1, mask + 1))
    if a.low == a.high and b.low == b.high:
        return _corners(lambda x, y: x & y, a, b)
    tops = [x.high for x in (a, b) if x.low >= 0]
    return Interval(0, min(tops)) if tops else None


def bits_either(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Bounds]:
    """``|`` or ``^``; the first is not below its arguments."""

    def of(a: Interval, b: Interval) -> Bounds:
        if a.low == a.high and b.low == b.high:
            return _corners(op, a, b)
        if a.low < 0 or b.low < 0:
            return None
        return Interval(max(a.low, b.low) if op is or_ else 0, _bits(a) | _bits(b))

    return of


def bits_not(a: Interval) -> Bounds:
    """``~a``."""
    return Interval(-1 - a.high, -1 - a.low)
