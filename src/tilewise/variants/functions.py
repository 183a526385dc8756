"""The functions of one float that masks and scores may call: one row for each.

The C++ core has a row for each too (``csrc/expressions/program.h``). CONTRIBUTING.md says what a
new one needs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.variants import float_intervals as ranges
from tilewise.variants.float_intervals import Interval
from tilewise.variants.rows import Form, Op, Share

_LN2 = math.log(2.0)


def _function(
    torch: Callable[[Tensor], Tensor],
    slope: Callable[[Share, int, int], Share] | None,
    interval: Callable[[Interval], Interval | None],
    triton: str,
    ulps: int = 1,
) -> Op:
    """Return the row of a function: its slope is given the places of its argument and value."""
    return Op(
        torch,
        {"float": Form(triton, interval, ulps)},
        arity=1,
        slope=slope and (lambda share, x, y: (slope(share, x, y),)),
    )


def _one_minus_square(share: Share, _x: int, y: int) -> Share:
    square = share.graph.apply("mul", y, y)
    return share.times(share.graph.apply("sub", share.graph.constant(1.0), square))


def _sigmoid_slope(share: Share, _x: int, y: int) -> Share:
    rest = share.graph.apply("sub", share.graph.constant(1.0), y)
    return share.times(share.graph.apply("mul", y, rest))


def _rsqrt_slope(share: Share, _x: int, y: int) -> Share:
    cube = share.graph.apply("mul", share.graph.apply("mul", y, y), y)
    return share.times(cube).scaled(-0.5)


FUNCTIONS: dict[str, Op] = {
    "exp": _function(
        torch.exp,
        lambda share, x, y: share.times(y),
        ranges.rising(ranges.exponential),
        "words.exponential({0})",
        ulps=2,
    ),
    "exp2": _function(
        torch.exp2,
        lambda share, x, y: share.times(y).scaled(_LN2),
        ranges.rising(lambda x: ranges.exponential(x, 2.0)),
        "tl.exp2({0})",
    ),
    "log": _function(
        torch.log,
        lambda share, x, y: share.over(x),
        ranges.logarithm(math.log),
        "tl.log({0})",
        ulps=2,
    ),
    "log2": _function(
        torch.log2,
        lambda share, x, y: share.over(x).scaled(1.0 / _LN2),
        ranges.logarithm(math.log2),
        "tl.log2({0})",
        ulps=2,
    ),
    "tanh": _function(
        torch.tanh, _one_minus_square, ranges.rising(math.tanh), "words.tangent({0})", ulps=2
    ),
    "sigmoid": _function(
        torch.sigmoid,
        _sigmoid_slope,
        ranges.rising(lambda x: 1.0 / (1.0 + ranges.exponential(-x))),
        "words.logistic({0})",
        ulps=3,
    ),
    "sqrt": _function(
        torch.sqrt,
        lambda share, x, y: share.over(y).scaled(0.5),
        ranges.square_root,
        "tl.sqrt_rn({0})",
    ),
    "rsqrt": _function(torch.rsqrt, _rsqrt_slope, ranges.inverse_root, "tl.rsqrt({0})", ulps=2),
    "sin": _function(
        torch.sin,
        lambda share, x, y: share.times(share.graph.apply("cos", x)),
        ranges.wave,
        "tl.sin({0})",
    ),
    "cos": _function(
        torch.cos,
        lambda share, x, y: share.times(share.graph.apply("sin", x)).scaled(-1.0),
        ranges.wave,
        "tl.cos({0})",
    ),
    "floor": _function(torch.floor, None, ranges.stepped(math.floor), "tl.floor({0})"),
    "ceil": _function(torch.ceil, None, ranges.stepped(math.ceil), "tl.ceil({0})"),
    "round": _function(torch.round, None, ranges.stepped(round), "words.round_even({0})"),
    "trunc": _function(torch.trunc, None, ranges.stepped(math.trunc), "words.truncated({0})"),
}
