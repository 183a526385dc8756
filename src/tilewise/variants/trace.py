"""Python callables turned into expressions, by calling them once with stand-ins.

``trace_mask`` calls ``f(b, h, m, n)``, ``trace_score`` calls ``f(s, b, h, m, n)``, with values that
write down what they would compute (``traced.py``): ``bias[h, m - n + 511]`` works on the plain
tensor that a closure, a global or an attribute holds. Nothing of a trace is kept: a function is
called again at every attention, so that what it closes over may change.

The first part is the vocabulary: torch's functions and tensor methods on traced values, by name
(``torch.exp(s)`` and ``s.exp()`` are one row). ``where``, ``minimum`` and ``maximum`` are public,
as functions that take traced values and tensors alike.
"""

import builtins
import inspect
import math
import numbers
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.expr import Expr, slots_of, with_slots
from tilewise.variants.guidance import uncalled
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind
from tilewise.variants.traced import (
    DISPATCHED,
    METHODS,
    Indexing,
    Recording,
    Row,
    Traced,
    apply,
    cast,
    common,
    is_numpy_boolean,
    named,
    whereabouts,
)

_FEW = 32  # the largest exponent that is written out as products


def _power(base: Traced, exponent: object) -> Traced:
    """Whole small powers as products, as torch takes them; the others by ``pow``."""
    if not isinstance(exponent, int) and isinstance(exponent, numbers.Integral):
        exponent = int(exponent)  # one of numpy's
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        finite = abs(exponent) < math.inf
        whole = int(exponent) if finite and exponent == int(exponent) else None
        if base.kind == "float":
            if whole in (1, 2, 3):
                return base if whole == 1 else base * base if whole == 2 else base * base * base
            if exponent in _ROOTS:
                return _ROOTS[exponent](base)
            return base._apply("pow", float(exponent))
        if isinstance(exponent, int) and 0 <= exponent <= _FEW:
            found = base.recording.lift(1)
            for _ in range(exponent):
                found = found * base
            return found
    raised = base.recording.lift(exponent)
    if base.kind != "float" and raised.kind != "float":
        raise InvalidArgument(
            base.recording.argument,
            "an integer to the power of an integer",
            f"an exponent that is a number from 0 to {_FEW}",
            "x.float() ** y, or 1 << y for powers of two." + " " + whereabouts(),
        )
    return base._apply("pow", raised)


_ROOTS: dict[float, Callable[[Traced], Traced]] = {
    0.5: lambda x: x._apply("sqrt"),
    -0.5: lambda x: x._apply("rsqrt"),
    -1.0: lambda x: 1.0 / x,
    -2.0: lambda x: (1.0 / x) ** 2,  # and not by x ** 4, which ends far from 1
}


def _select(recording: Recording, condition: object, x: object, y: object) -> Traced:
    chosen = recording.lift(condition).bool()
    first, second = recording.lift(x), recording.lift(y)
    graph = recording.graph
    kind = common([first.kind, second.kind])
    places = [cast(graph, value.place, kind) for value in (first, second)]
    return Traced(recording, graph.apply("where", chosen.place, *places))


def _where_method(recording: Recording, x: object, condition: object, other: object) -> Traced:
    """``x.where(condition, other)``: as a method the condition comes second."""
    return _select(recording, condition, x, other)


def _clamp(recording: Recording, x: object, min: object = None, max: object = None) -> Traced:
    """Clamp; floats select, as in torch: at a bound the gradient is all of x's, not half of it.

    Below two equal bounds the gradient is all of the lower one's, and torch gives it to none. The
    language has no operation that keeps a value without its gradient.
    """
    found = recording.lift(x)
    for bound, op in ((min, "max"), (max, "min")):
        if bound is None:
            continue
        limit = recording.lift(bound)
        if found.kind != "float" and limit.kind != "float":
            found = apply(recording, op, (found, limit))
            continue
        beyond = found < limit if op == "max" else found > limit
        # A limit is not equal to itself where it is NaN, as the result then is.
        within = _select(recording, limit._apply("eq", limit), found, limit)
        found = _select(recording, beyond, limit, within)
    return found


def _divide(recording: Recording, x: object, y: object, rounding_mode: str | None = None) -> Traced:
    if rounding_mode is None:
        return apply(recording, "div", (x, y))
    if rounding_mode == "floor":
        return apply(recording, "floordiv", (x, y))
    came = f"torch.div(rounding_mode={rounding_mode!r})"
    raise InvalidArgument(recording.argument, came, "None or 'floor'", whereabouts())


def _logical(op: str) -> Callable[..., Traced]:
    def handler(recording: Recording, *operands: object) -> Traced:
        return apply(recording, op, tuple([recording.lift(x).bool() for x in operands]))

    return handler


def _plain(op: str) -> Callable[..., Traced]:
    def handler(recording: Recording, *operands: object) -> Traced:
        return apply(recording, op, operands)

    return handler


def _reflected(handler: Callable[..., Traced]) -> Callable[..., Traced]:
    return lambda recording, x, y: handler(recording, y, x)


def _softplus(recording: Recording, x: object) -> Traced:
    """max(x, 0) + log(1 + z) with z = exp(-|x|), to the last digits where z is small too."""
    value = recording.lift(x).float()
    small = (-abs(value))._apply("exp")
    more = 1.0 + small
    lost = (small - (more - 1.0)) / more  # by the sum: all of z where it is below an ulp of 1
    return value._apply("max", 0.0) + (apply(recording, "log", (more,)) + lost)


def _filled(number: int | None, sized: bool) -> Callable[..., Traced]:
    """``torch.zeros_like(x)``, ``x.new_full((), 2)`` and the like: one value, as a pair has anyway.

    Without a ``number`` the last argument is the value. A ``sized`` function takes a size first,
    which must be that of one value.
    """

    def handler(
        recording: Recording,
        like: object,
        *given: Any,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> Traced:
        given += tuple([more[name] for name in ("size", "fill_value") if name in more])
        *size, value = given if number is None else (*given, number)
        if sized and size not in ([], [()]):
            came = f"a new tensor of size {size[0] if len(size) == 1 else tuple(size)}"
            raise InvalidArgument(recording.argument, came, "size ()", whereabouts())
        made = recording.lift(value)
        if dtype is not None:
            return made.to(dtype)
        return made.as_kind(recording.lift(like).kind)

    return handler


# What torch's functions and methods mean here, by their names.
_TORCH: dict[str, Callable[..., Traced]] = {
    **{
        name: _plain(op)
        for op, row in OPS.items()
        for name in ((op,) if row.names is None else row.names)
    },
    **dict.fromkeys(OPS["div"].names or (), _divide),
    "pow": lambda recording, x, y: _power(recording.lift(x), y),
    **dict.fromkeys(("gt", "greater"), _reflected(_plain("lt"))),
    **dict.fromkeys(("ge", "greater_equal"), _reflected(_plain("le"))),
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    "where": _select,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "square": lambda recording, x: recording.lift(x) * x,
    "reciprocal": lambda recording, x: 1.0 / recording.lift(x),
    "relu": lambda recording, x, inplace=False: _select(recording, recording.lift(x) <= 0, 0, x),
    "silu": lambda recording, x, inplace=False: recording.lift(x) * recording.lift(x).sigmoid(),
    "softplus": _softplus,
    **dict.fromkeys(
        ("zeros_like", "empty_like"), _filled(0, False)
    ),  # what is empty may hold anything
    "ones_like": _filled(1, False),
    "full_like": _filled(None, False),
    **dict.fromkeys(("new_zeros", "new_empty"), _filled(0, True)),
    "new_ones": _filled(1, True),
    "new_full": _filled(None, True),
}


def _functions() -> dict[Any, Callable[..., Traced]]:
    """Return the table above by the functions and methods themselves, reflected operators too."""
    found: dict[Any, Callable[..., Traced]] = {}
    for name, handler in _TORCH.items():
        for owner in (torch, Tensor, torch.nn.functional):
            if hasattr(owner, name):
                found[getattr(owner, name)] = handler
        if hasattr(Tensor, f"__{name}__"):
            found[getattr(Tensor, f"__{name}__")] = handler
        if hasattr(Tensor, f"__r{name}__"):
            found[getattr(Tensor, f"__r{name}__")] = _reflected(handler)
    found[Tensor.where] = _where_method
    return found


METHODS.update({**_TORCH, "where": _where_method})
DISPATCHED.update(_functions())


def where(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where the condition holds, else ``y``, in a mask or score; of tensors, torch's."""
    return _dispatched("where", torch.where, condition, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two values of a mask or score; of tensors, torch's. NaN if one is NaN."""
    return _dispatched("minimum", torch.minimum, x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of two values of a mask or score; of tensors, torch's. NaN if one is NaN."""
    return _dispatched("maximum", torch.maximum, x, y)


def _dispatched(name: str, otherwise: Callable[..., Any], *operands: Any) -> Any:
    for operand in operands:
        if isinstance(operand, Traced):
            return _TORCH[name](operand.recording, *operands)
    return otherwise(*operands)


def trace_mask(function: Callable[..., Any]) -> tuple[Expr, tuple[Tensor, ...]]:
    """Return the expression of ``f(b, h, m, n) -> bool`` and the tensors that its slots name."""
    return _trace("mask", function, "bhmn", "bool")


def trace_score(function: Callable[..., Any]) -> tuple[Expr, tuple[Tensor, ...]]:
    """Return the expression of ``f(s, b, h, m, n) -> s`` and the tensors that its slots name."""
    return _trace("score", function, "sbhmn", "float")


def _trace(
    argument: str, function: Callable[..., Any], leaves: str, kind: Kind
) -> tuple[Expr, tuple[Tensor, ...]]:
    recording = Recording(argument)
    values = [recording.leaf(name) for name in leaves]
    with Indexing():
        try:
            found = _own_builtins(function)(*values)
        except TypeError:
            _check_signature(argument, function, leaves)
            raise
    if isinstance(found, numbers.Number | Tensor | Row | Traced) or is_numpy_boolean(found):
        found = recording.lift(found)
    if not isinstance(found, Traced):
        raise InvalidType(argument, f"a function that returns {named(found)}", _RETURNS[kind])
    if kind == "float":
        if found.kind == "bool":
            came, fix = "a function that returns a boolean", "Pass a condition as mask=."
            raise InvalidType(argument, came, _RETURNS[kind], fix)
        found = found.float()
    elif found.kind != "bool":
        number = "an integer" if found.kind == "int" else "a float"
        came = f"a function that returns {number}"
        raise InvalidType(argument, came, _RETURNS[kind], "Compare: x != 0.")
    expr = recording.graph.expr(found.place)
    used = slots_of(expr) if recording.captured else []
    if used != list(range(len(recording.captured))):
        expr = with_slots(expr, {slot: at for at, slot in enumerate(used)})
    return expr, tuple([recording.captured[slot] for slot in used])


def _check_signature(argument: str, function: Callable[..., Any], leaves: str) -> None:
    """Refuse a function that cannot be called with one value for each leaf."""
    try:
        inspect.signature(function).bind(*leaves)
    except TypeError:
        came = f"a function of {inspect.signature(function)}"
        required = f"a function of ({', '.join(leaves)})"
        raise InvalidType(argument, came, required, uncalled(argument, function)) from None
    except ValueError:  # a function of C, which says nothing of its arguments
        return


_RETURNS = {"bool": "one boolean for a pair", "float": "one number for a pair"}


def _smallest(*values: Any, **options: Any) -> Any:
    return _reduced(builtins.min, minimum, values, options)


def _largest(*values: Any, **options: Any) -> Any:
    return _reduced(builtins.max, maximum, values, options)


def _reduced(
    otherwise: Callable[..., Any],
    pairwise: Callable[[Any, Any], Any],
    values: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Python's min or max, which asks its operands for truth values, of traced ones too."""
    operands = tuple(values[0]) if len(values) == 1 else values
    if options or not any(isinstance(value, Traced) for value in operands):
        return otherwise(*values, **options)
    found = operands[0]
    for value in operands[1:]:
        found = pairwise(found, value)
    return found


_OWN_BUILTINS = {**vars(builtins), "min": _smallest, "max": _largest}


def _own_builtins(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a ``min`` and ``max`` that know traced values, if it uses Python's."""
    inner = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(inner, FunctionType):
        return function
    names = _names(inner.__code__)
    if not ("min" in names or "max" in names):
        return function
    scope = {**inner.__globals__, "__builtins__": _OWN_BUILTINS}
    own = FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    own.__kwdefaults__ = inner.__kwdefaults__
    return MethodType(own, function.__self__) if isinstance(function, MethodType) else own


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found
