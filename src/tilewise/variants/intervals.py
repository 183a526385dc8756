"""Bound an expression on a whole box of pairs: intervals, and three-valued truth.

An interval holds every value that the expression takes on the box, whether floats are computed as
float32 or float64. It may be wider than that: ``m`` in two places counts as two unknowns. Integers
are followed exactly, to where they leave 64 bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import lshift, or_, rshift, xor
from typing import TypeAlias

from tilewise.variants.expr import LEAVES, Expr, Kind, Node, kinds
from tilewise.variants.float_intervals import OF_BOTH, OF_FLOATS, Interval, opposite, rounded
from tilewise.variants.functions import FUNCTIONS

__all__ = ["EVERY_INT", "Bounds", "Extremes", "Interval", "bounds", "every_bound"]

# What is known of a value: of integers and floats an interval, of booleans which one it is; None
# where nothing is known (a float may then be NaN).
Bounds: TypeAlias = Interval | bool | None
# From a slot and what is known of each index: what is known of the element, clamping included.
Extremes: TypeAlias = Callable[[int, Sequence[Interval]], Bounds]

EVERY_INT = Interval(-(2**63), 2**63 - 1)
_MOST_SHIFT = 63


def bounds(expr: Expr, ranges: Mapping[str, Interval], extremes: Extremes | None = None) -> Bounds:
    """Return what the first result of an expression can be on a box.

    Args:
        expr: a mask or score.
        ranges: intervals of the leaves by name; of those that are missing nothing is known.
        extremes: of the captured tensors; None if nothing is known of them.

    Returns:
        an ``Interval`` of all its values, or the boolean that it always is; None if not known.
    """
    return every_bound(expr, ranges, extremes)[expr.outputs[0]]


def every_bound(
    expr: Expr, ranges: Mapping[str, Interval], extremes: Extremes | None = None
) -> list[Bounds]:
    """Return what each node can be (arguments as of ``bounds``)."""
    known: list[Bounds] = []
    for node, kind in zip(expr.nodes, kinds(expr), strict=True):
        found = _node_bounds(node, kind, known, ranges, extremes)
        if kind == "int" and not _fits(found):
            found = EVERY_INT
        elif kind == "float" and isinstance(found, Interval):
            found = Interval(float(found.low), float(found.high))
            if math.isnan(found.low) or math.isnan(found.high):
                found = None
        known.append(found)
    return known


def _fits(found: Bounds) -> bool:
    """Return whether integers wrap nowhere."""
    return (
        isinstance(found, Interval) and found.low >= EVERY_INT.low and found.high <= EVERY_INT.high
    )


def _node_bounds(
    node: Node,
    kind: Kind,
    known: list[Bounds],
    ranges: Mapping[str, Interval],
    extremes: Extremes | None,
) -> Bounds:
    op, args = node.op, [known[arg] for arg in node.args]
    if op in LEAVES:
        return ranges.get(op)
    if op.startswith("const_"):
        assert node.value is not None
        if kind == "bool":
            return bool(node.value)
        return (
            Interval(node.value, node.value) if kind == "int" else rounded(node.value, node.value)
        )
    if op.startswith("load_"):
        assert isinstance(node.value, int)
        indices = [arg for arg in args if isinstance(arg, Interval)]
        return None if extremes is None else extremes(node.value, indices)
    if op == "where":
        return _chosen(*args)
    if op in ("to_float", "to_int"):
        return _converted(op, args[0])
    if op in _LOGIC and not any(isinstance(arg, Interval) for arg in args):
        return _LOGIC[op](*args)
    intervals = [arg for arg in args if isinstance(arg, Interval)]
    if len(intervals) < len(args):
        return None
    if kind == "bool":
        return _COMPARISONS[op](*intervals)
    if op in FUNCTIONS:
        return FUNCTIONS[op].interval(*intervals)
    return _OF_INTS[op](*intervals) if kind == "int" else OF_FLOATS[op](*intervals)


# Booleans: Kleene's logic.


def _both(a: Bounds, b: Bounds) -> Bounds:
    if a is False or b is False:
        return False
    return True if a is True and b is True else None


def _negated(a: Bounds) -> Bounds:
    return None if a is None else not a


def _either(a: Bounds, b: Bounds) -> Bounds:
    return _negated(_both(_negated(a), _negated(b)))


def _differ(a: Bounds, b: Bounds) -> Bounds:
    return None if a is None or b is None else a is not b


_LOGIC: dict[str, Callable[..., Bounds]] = {
    "and": _both,
    "or": _either,
    "not": _negated,
    "xor": _differ,
    "ne": _differ,
    "eq": lambda a, b: _negated(_differ(a, b)),
}


def _chosen(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, Interval) and isinstance(b, Interval):
        return Interval(min(a.low, b.low), max(a.high, b.high))
    return a if isinstance(a, bool) and a is b else None


def _less(a: Interval, b: Interval) -> Bounds:
    if a.high < b.low:
        return True
    return False if a.low >= b.high else None


def _equal(a: Interval, b: Interval) -> Bounds:
    if a.high < b.low or b.high < a.low:
        return False
    return True if a.low == a.high == b.low == b.high else None


_COMPARISONS: dict[str, Callable[[Interval, Interval], Bounds]] = {
    "lt": _less,
    "le": lambda a, b: _negated(_less(b, a)),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
}


def _converted(op: str, value: Bounds) -> Bounds:
    if op == "to_float":
        if isinstance(value, Interval):
            return rounded(float(value.low), float(value.high))
        return Interval(0.0, 1.0) if value is None else Interval(float(value), float(value))
    if not isinstance(value, Interval) or math.inf in (-value.low, value.high):
        return None
    return Interval(math.trunc(value.low), math.trunc(value.high))


# Integers: Python's, without bounds; what leaves 64 bits is caught above. Operations that rise or
# fall in each argument have their extremes at the corners of the box.


def _corners(op: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    found = [op(int(x), int(y)) for x in a for y in b]
    return Interval(min(found), max(found))


def _floordiv(a: Interval, b: Interval) -> Bounds:
    if b.low <= 0 <= b.high:
        return None
    return _corners(lambda x, y: x // y, a, b)


def _mod(a: Interval, b: Interval) -> Bounds:
    if b.low <= 0 <= b.high:
        return None
    if b.high < 0:
        mirrored = _mod(opposite(a), opposite(b))
        return opposite(mirrored) if isinstance(mirrored, Interval) else None
    if a.low >= 0 and a.high < b.low:
        return a
    if b.low == b.high and a.low // b.low == a.high // b.low:
        return Interval(a.low % b.low, a.high % b.low)
    return Interval(0, b.high - 1)


def _shift(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Bounds]:
    def shifted(a: Interval, b: Interval) -> Bounds:
        return _corners(op, a, b) if b.low >= 0 and b.high <= _MOST_SHIFT else None

    return shifted


def _bits(a: Interval) -> int:
    """Return the least 2**k - 1 that is not below the interval, which has no negative."""
    return int((1 << int(a.high).bit_length()) - 1)


def _and(a: Interval, b: Interval) -> Bounds:
    if b.low != b.high:
        a, b = b, a
    mask = int(b.low)
    if b.low == b.high and mask >= 0 and mask & (mask + 1) == 0:
        return _mod(a, Interval(mask + 1, mask + 1))
    if a.low == a.high and b.low == b.high:
        return _corners(lambda x, y: x & y, a, b)
    tops = [x.high for x in (a, b) if x.low >= 0]
    return Interval(0, min(tops)) if tops else None


def _either_bits(op: Callable[[int, int], int]) -> Callable[[Interval, Interval], Bounds]:
    """``|`` or ``^``; the first is not below its arguments."""

    def of(a: Interval, b: Interval) -> Bounds:
        if a.low == a.high and b.low == b.high:
            return _corners(op, a, b)
        if a.low < 0 or b.low < 0:
            return None
        return Interval(max(a.low, b.low) if op is or_ else 0, _bits(a) | _bits(b))

    return of


_OF_INTS: dict[str, Callable[..., Bounds]] = {
    **OF_BOTH,
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": lambda a, b: _corners(lambda x, y: x * y, a, b),
    "floordiv": _floordiv,
    "mod": _mod,
    "shl": _shift(lshift),
    "shr": _shift(rshift),
    "and": _and,
    "or": _either_bits(or_),
    "xor": _either_bits(xor),
    "not": lambda a: Interval(-1 - a.high, -1 - a.low),
}
