"""The functions of one float that masks and scores may call: one row for each.

A row is all that Python knows of a function: torch's function, which is its meaning, its
derivative, its interval, and its Triton code. The C++ core has a row for each too, in
``csrc/expressions/program.h``. A new function needs these two rows, its vector code in
``csrc/expressions/functions.h``, and a test.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.variants import float_intervals as ranges
from tilewise.variants.float_intervals import Interval

_LN2 = math.log(2.0)


class Builder(Protocol):
    """The part of ``expr.Graph`` that derivatives use."""

    def apply(self, op: str, *args: int) -> int:
        """Return the place of an operation on the values at these places."""

    def constant(self, value: float) -> int:
        """Return the place of a constant."""


class Slope(NamedTuple):
    """A derivative: ``factor`` times the value at ``place``, or over it if ``divides``."""

    factor: float
    place: int
    divides: bool = False


class Function(NamedTuple):
    """A function of one float.

    Args:
        torch: what it means.
        slope: its derivative, from the graph and the places of argument and value; None for
            steps, which have none.
        interval: what it makes of an interval; None where it may be NaN or anything.
        triton: its code, of an argument ``{0}``.
    """

    torch: Callable[[Tensor], Tensor]
    slope: Callable[[Builder, int, int], Slope] | None
    interval: Callable[[Interval], Interval | None]
    triton: str


def _one_minus_square(graph: Builder, _x: int, value: int) -> Slope:
    square = graph.apply("mul", value, value)
    return Slope(1.0, graph.apply("sub", graph.constant(1.0), square))


def _sigmoid_slope(graph: Builder, _x: int, value: int) -> Slope:
    rest = graph.apply("sub", graph.constant(1.0), value)
    return Slope(1.0, graph.apply("mul", value, rest))


def _rsqrt_slope(graph: Builder, _x: int, value: int) -> Slope:
    return Slope(-0.5, graph.apply("mul", graph.apply("mul", value, value), value))


FUNCTIONS: dict[str, Function] = {
    "exp": Function(
        torch.exp,
        lambda _graph, _x, value: Slope(1.0, value),
        ranges.rising(ranges.exponential),
        "words.exponential({0})",
    ),
    "exp2": Function(
        torch.exp2,
        lambda _graph, _x, value: Slope(_LN2, value),
        ranges.rising(lambda x: ranges.exponential(x, 2.0)),
        "tl.exp2({0})",
    ),
    "log": Function(
        torch.log,
        lambda _graph, x, _value: Slope(1.0, x, divides=True),
        ranges.logarithm(math.log),
        "tl.log({0})",
    ),
    "log2": Function(
        torch.log2,
        lambda _graph, x, _value: Slope(1.0 / _LN2, x, divides=True),
        ranges.logarithm(math.log2),
        "tl.log2({0})",
    ),
    "tanh": Function(torch.tanh, _one_minus_square, ranges.rising(math.tanh), "words.tangent({0})"),
    "sigmoid": Function(
        torch.sigmoid,
        _sigmoid_slope,
        ranges.rising(lambda x: 1.0 / (1.0 + ranges.exponential(-x))),
        "words.logistic({0})",
    ),
    "sqrt": Function(
        torch.sqrt,
        lambda _graph, _x, value: Slope(0.5, value, divides=True),
        ranges.square_root,
        "tl.sqrt_rn({0})",
    ),
    "rsqrt": Function(torch.rsqrt, _rsqrt_slope, ranges.inverse_root, "tl.rsqrt({0})"),
    "sin": Function(
        torch.sin,
        lambda graph, x, _value: Slope(1.0, graph.apply("cos", x)),
        ranges.wave,
        "tl.sin({0})",
    ),
    "cos": Function(
        torch.cos,
        lambda graph, x, _value: Slope(-1.0, graph.apply("sin", x)),
        ranges.wave,
        "tl.cos({0})",
    ),
    "floor": Function(torch.floor, None, ranges.stepped(math.floor), "tl.floor({0})"),
    "ceil": Function(torch.ceil, None, ranges.stepped(math.ceil), "tl.ceil({0})"),
    "round": Function(torch.round, None, ranges.stepped(round), "words.round_even({0})"),
    "trunc": Function(torch.trunc, None, ranges.stepped(math.trunc), "words.truncated({0})"),
}
