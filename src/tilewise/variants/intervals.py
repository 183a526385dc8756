"""Bound an expression on a whole box of pairs: intervals, and three-valued truth.

An interval holds every value that the expression takes on the box, whether floats are computed as
float32 or float64. It may be wider than that: ``m`` in two places counts as two unknowns. Integers
are followed exactly, to where they leave 64 bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tilewise.variants.expr import LEAVES, Expr, Node, kinds
from tilewise.variants.float_intervals import Bounds, Interval, rounded
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind

__all__ = ["EVERY_INT", "Bounds", "Extremes", "Interval", "bounds", "every_bound"]

# From a slot and what is known of each index: what is known of the element, clamping included.
Extremes: TypeAlias = Callable[[int, Sequence[Interval]], Bounds]

EVERY_INT = Interval(-(2**63), 2**63 - 1)
_TAKE_UNKNOWN = ("where", "to_float", "to_int")


def bounds(expr: Expr, ranges: Mapping[str, Interval], extremes: Extremes | None = None) -> Bounds:
    """Return what the first result of a mask or score can be on a box; None if that is not known.

    It is an ``Interval`` of all its values, or the boolean that it always is. ``ranges`` are
    intervals of the leaves by name; of those that are missing nothing is known. ``extremes`` are
    those of the captured tensors; None if nothing is known of them.
    """
    return every_bound(expr, ranges, extremes)[expr.outputs[0]]


def every_bound(
    expr: Expr, ranges: Mapping[str, Interval], extremes: Extremes | None = None
) -> list[Bounds]:
    """Return what each node can be (arguments as of ``bounds``)."""
    known: list[Bounds] = []
    every_kind = kinds(expr)
    for node, kind in zip(expr.nodes, every_kind, strict=True):
        if node.op in OPS:
            taken = every_kind[node.args[-1]]
            found = _of_operation(node.op, taken, [known[arg] for arg in node.args])
        else:
            found = _of_leaf(node, kind, [known[arg] for arg in node.args], ranges, extremes)
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


def _of_operation(op: str, taken: Kind, args: Sequence[Bounds]) -> Bounds:
    """Return what is known of the value of an operation that takes arguments of a kind."""
    numbers = taken != "bool" and op not in _TAKE_UNKNOWN
    if numbers and not all(isinstance(arg, Interval) for arg in args):
        return None
    return OPS[op].forms[taken].interval(*args)


def _of_leaf(
    node: Node,
    kind: Kind,
    indices: Sequence[Bounds],
    ranges: Mapping[str, Interval],
    extremes: Extremes | None,
) -> Bounds:
    value = node.value
    if node.op in LEAVES:
        return ranges.get(node.op)
    assert value is not None
    if node.op.startswith("load_"):
        known = [index for index in indices if isinstance(index, Interval)]
        return None if extremes is None else extremes(int(value), known)
    if kind == "bool":
        return bool(value)
    return Interval(value, value) if kind == "int" else rounded(value, value)
