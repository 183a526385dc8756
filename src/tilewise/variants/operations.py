"""The operations of expressions: one row says all that Python knows of one.

The C++ core has a row for each too (``csrc/expressions/program.h``). CONTRIBUTING.md says what a
new one needs.
"""

import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.variants import float_intervals as reals
from tilewise.variants import int_intervals as wholes
from tilewise.variants.float_intervals import Interval
from tilewise.variants.rows import Form, Op, Share

_LARGEST_SHIFT = 63
_LN2 = math.log(2.0)

# ---- meanings that torch has no function for


def _by_safe(divide: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Divide integers safely: torch raises for b = 0, the processor may trap for least a by -1."""
    return divide(a, torch.where((b == 0) | (b == -1), 1, b))


def _floordiv(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.floor_divide(a.detach(), b.detach())  # a step: torch refuses its derivative
    return torch.where(b == -1, -a, _by_safe(torch.floor_divide, a, b))


def _mod(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.remainder(a, b)
    return _by_safe(torch.remainder, a, b)


# ---- derivatives: where a function has none, torch's convention holds


def _mod_slope(share: Share, a: int, b: int, _value: int) -> tuple[Share, Share]:
    return share, share.times(share.graph.apply("floordiv", a, b)).scaled(-1.0)


def _extreme_slope(share: Share, a_loses: int, b_loses: int, a: int, b: int) -> tuple[Share, Share]:
    """Half to each side of a tie."""
    apply = share.graph.apply
    half = apply("mul", share.graph.constant(0.5), share.place)
    either = share.at(apply("where", apply("eq", a, b), half, share.place))
    return either.where(a_loses, holds=False), either.where(b_loses, holds=False)


def _min_slope(share: Share, a: int, b: int, _value: int) -> tuple[Share, Share]:
    lt = share.graph.apply("lt", b, a), share.graph.apply("lt", a, b)
    return _extreme_slope(share, *lt, a, b)


def _max_slope(share: Share, a: int, b: int, _value: int) -> tuple[Share, Share]:
    lt = share.graph.apply("lt", a, b), share.graph.apply("lt", b, a)
    return _extreme_slope(share, *lt, a, b)


def _pow_slope(share: Share, base: int, exponent: int, value: int) -> tuple[Share, Share | None]:
    graph, apply = share.graph, share.graph.apply
    number = share.number(exponent)
    if number is not None:
        if number == 1.0:
            return share, None
        lower = base if number == 2.0 else apply("pow", base, graph.constant(number - 1.0))
        return share.times(lower).scaled(number), None
    zero = graph.constant(0.0)
    lower = apply("pow", base, apply("sub", exponent, graph.constant(1.0)))
    by_base = share.times(apply("mul", exponent, lower))
    by_exponent = share.times(apply("mul", value, apply("log", base)))
    flat = apply("and", apply("eq", base, zero), apply("le", zero, exponent))
    return (
        by_base.where(apply("eq", exponent, zero), holds=False),
        by_exponent.where(flat, holds=False),
    )


# ---- functions of one float


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
        reals.rising(reals.exponential),
        "words.exponential({0})",
        ulps=2,
    ),
    "exp2": _function(
        torch.exp2,
        lambda share, x, y: share.times(y).scaled(_LN2),
        reals.rising(lambda x: reals.exponential(x, 2.0)),
        "tl.exp2({0})",
    ),
    "log": _function(
        torch.log,
        lambda share, x, y: share.over(x),
        reals.logarithm(math.log),
        "tl.log({0})",
        ulps=2,
    ),
    "log2": _function(
        torch.log2,
        lambda share, x, y: share.over(x).scaled(1.0 / _LN2),
        reals.logarithm(math.log2),
        "tl.log2({0})",
        ulps=2,
    ),
    "tanh": _function(
        torch.tanh, _one_minus_square, reals.rising(math.tanh), "words.tangent({0})", ulps=2
    ),
    "sigmoid": _function(
        torch.sigmoid,
        _sigmoid_slope,
        reals.rising(lambda x: 1.0 / (1.0 + reals.exponential(-x))),
        "words.logistic({0})",
        ulps=3,
    ),
    "sqrt": _function(
        torch.sqrt,
        lambda share, x, y: share.over(y).scaled(0.5),
        reals.square_root,
        "tl.sqrt_rn({0})",
    ),
    "rsqrt": _function(torch.rsqrt, _rsqrt_slope, reals.inverse_root, "tl.rsqrt({0})", ulps=2),
    "sin": _function(
        torch.sin,
        lambda share, x, y: share.times(share.graph.apply("cos", x)),
        reals.wave,
        "tl.sin({0})",
    ),
    "cos": _function(
        torch.cos,
        lambda share, x, y: share.times(share.graph.apply("sin", x)).scaled(-1.0),
        reals.wave,
        "tl.cos({0})",
    ),
    "floor": _function(torch.floor, None, reals.stepped(math.floor), "tl.floor({0})"),
    "ceil": _function(torch.ceil, None, reals.stepped(math.ceil), "tl.ceil({0})"),
    "round": _function(torch.round, None, reals.stepped(round), "words.round_even({0})"),
    "trunc": _function(torch.trunc, None, reals.stepped(math.trunc), "words.truncated({0})"),
}


# ---- the table


def _sign(a: float) -> float:
    return type(a)((a > 0) - (a < 0))


# Transcendental functions of constants are left to the kernel: Python's are rounded otherwise than
# torch's. ``where``, the casts and the powers are spelled by hand where Python's function is traced
# (``trace.py``).
OPS: dict[str, Op] = {
    "add": Op(
        torch.add,
        {"int": Form("{0} + {1}", wholes.add), "float": Form("{0} + {1}", reals.add)},
        fold=operator.add,
        slope=lambda share, a, b, value: (share, share),
    ),
    "sub": Op(
        torch.sub,
        {"int": Form("{0} - {1}", wholes.sub), "float": Form("{0} - {1}", reals.sub)},
        fold=operator.sub,
        slope=lambda share, a, b, value: (share, share.scaled(-1.0)),
        names=("sub", "subtract"),
    ),
    "mul": Op(
        torch.mul,
        {"int": Form("{0} * {1}", wholes.mul), "float": Form("{0} * {1}", reals.mul)},
        fold=operator.mul,
        slope=lambda share, a, b, value: (share.times(b), share.times(a)),
        names=("mul", "multiply"),
    ),
    "floordiv": Op(
        _floordiv,
        {
            "int": Form("words.floordiv_any({0}, {1})", wholes.floordiv),
            "float": Form("words.floordiv_float({0}, {1})", reals.floordiv),
        },
        fold=operator.floordiv,
        names=("floor_divide", "floordiv"),
    ),
    "mod": Op(
        _mod,
        {
            "int": Form("words.mod_any({0}, {1})", wholes.mod),
            "float": Form("words.mod_float({0}, {1})", reals.mod),
        },
        fold=operator.mod,
        slope=_mod_slope,
        names=("remainder", "mod"),
    ),
    "min": Op(
        torch.minimum,
        {
            "int": Form("tl.minimum({0}, {1})", reals.lesser),
            "float": Form("words.least({0}, {1})", reals.lesser),
        },
        fold=min,
        slope=_min_slope,
        names=("minimum",),
    ),
    "max": Op(
        torch.maximum,
        {
            "int": Form("tl.maximum({0}, {1})", reals.larger),
            "float": Form("words.largest({0}, {1})", reals.larger),
        },
        fold=max,
        slope=_max_slope,
        names=("maximum",),
    ),
    "neg": Op(
        torch.neg,
        {
            "int": Form("0 - {0}", reals.opposite),
            # Triton's minus is a difference from +0.
            "float": Form("{0} * -1.0", reals.opposite),
        },
        arity=1,
        fold=operator.neg,
        slope=lambda share, a, value: (share.scaled(-1.0),),
        names=("neg", "negative"),
    ),
    "abs": Op(
        torch.abs,
        {
            "int": Form("tl.abs({0})", reals.absolute),
            "float": Form("tl.abs({0})", reals.absolute),
        },
        arity=1,
        fold=abs,
        slope=lambda share, a, value: (share.times(share.graph.apply("sign", a)),),
        names=("abs", "absolute"),
    ),
    "sign": Op(
        torch.sign,
        {
            "int": Form("words.sign_int({0})", reals.sign),
            "float": Form("words.sign_float({0})", reals.sign),
        },
        arity=1,
        fold=_sign,
    ),
    "div": Op(
        torch.div,
        {"float": Form("tl.div_rn({0}, {1})", reals.div)},
        slope=lambda share, a, b, value: (
            share.over(b),
            share.times(value).over(b).scaled(-1.0),
        ),
        names=("div", "divide", "true_divide", "truediv"),
    ),
    "pow": Op(
        torch.pow,
        {"float": Form("words.power({0}, {1})", reals.power, ulps=4)},
        slope=_pow_slope,
    ),
    **FUNCTIONS,
    "shl": Op(
        lambda a, b: torch.bitwise_left_shift(a, b.clamp(0, _LARGEST_SHIFT)),
        {"int": Form("{0} << words.clamped({1}, {bits})", wholes.shift(operator.lshift))},
        names=("lshift", "bitwise_left_shift"),
    ),
    "shr": Op(
        lambda a, b: torch.bitwise_right_shift(a, b.clamp(0, _LARGEST_SHIFT)),
        {"int": Form("{0} >> words.clamped({1}, {bits})", wholes.shift(operator.rshift))},
        names=("rshift", "bitwise_right_shift"),
    ),
    "and": Op(
        torch.bitwise_and,
        {"bool": Form("{0} & {1}", wholes.both), "int": Form("{0} & {1}", wholes.bits_and)},
        fold=operator.and_,
        names=("and", "bitwise_and"),
    ),
    "or": Op(
        torch.bitwise_or,
        {
            "bool": Form("{0} | {1}", wholes.either),
            "int": Form("{0} | {1}", wholes.bits_either(operator.or_)),
        },
        fold=operator.or_,
        names=("or", "bitwise_or"),
    ),
    "xor": Op(
        torch.bitwise_xor,
        {
            "bool": Form("{0} ^ {1}", wholes.differ),
            "int": Form("{0} ^ {1}", wholes.bits_either(operator.xor)),
        },
        fold=operator.xor,
        names=("xor", "bitwise_xor"),
    ),
    "not": Op(
        torch.bitwise_not,
        {"bool": Form("{0} == 0", wholes.negated), "int": Form("-1 - {0}", wholes.bits_not)},
        arity=1,
        fold=lambda a: not a if isinstance(a, bool) else ~a,
        names=("invert", "bitwise_not"),
    ),
    "lt": Op(
        torch.lt,
        {"int": Form("{0} < {1}", wholes.less), "float": Form("{0} < {1}", wholes.less)},
        gives="bool",
        fold=operator.lt,
        names=("lt", "less"),
    ),
    "le": Op(
        torch.le,
        {"int": Form("{0} <= {1}", wholes.not_more), "float": Form("{0} <= {1}", wholes.not_more)},
        gives="bool",
        fold=operator.le,
        names=("le", "less_equal"),
    ),
    "eq": Op(
        torch.eq,
        {
            "bool": Form("({0} ^ {1}) == 0", wholes.same),
            "int": Form("{0} == {1}", wholes.equal),
            "float": Form("{0} == {1}", wholes.equal),
        },
        gives="bool",
        fold=operator.eq,
    ),
    "ne": Op(
        torch.ne,
        {
            "bool": Form("{0} ^ {1}", wholes.differ),
            "int": Form("{0} != {1}", wholes.unequal),
            "float": Form("{0} != {1}", wholes.unequal),
        },
        gives="bool",
        fold=operator.ne,
        names=("ne", "not_equal"),
    ),
    "where": Op(
        torch.where,
        {
            "bool": Form("({0} & {1}) | (({0} == 0) & {2})", wholes.chosen),
            "int": Form("tl.where({0}, {1}, {2})", wholes.chosen),
            "float": Form("tl.where({0}, {1}, {2})", wholes.chosen),
        },
        arity=3,
        fold=lambda c, a, b: a if c else b,
        slope=lambda share, c, a, b, value: (None, share.where(c), share.where(c, holds=False)),
        names=(),
    ),
    "to_float": Op(
        Tensor.double,  # or another type of floats: the reference converts
        {
            "bool": Form("{0}.to(tl.float32)", wholes.as_float),
            "int": Form("{0}.to(tl.float32)", wholes.as_float),
            "float": Form("{0}", wholes.as_float),
        },
        arity=1,
        gives="float",
        fold=float,
        names=(),
    ),
    "to_int": Op(
        Tensor.long,
        {
            "bool": Form("{0}.to({type})", wholes.as_int),
            "int": Form("{0}", wholes.as_int),
            "float": Form("words.to_int({0})", wholes.as_int),
        },
        arity=1,
        gives="int",
        names=(),
    ),
}
