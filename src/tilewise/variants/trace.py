"""Python callables turned into expressions, by calling them once with stand-ins.

``trace_mask`` calls ``f(b, h, m, n)``, ``trace_score`` calls ``f(s, b, h, m, n)``, with values that
write down what they would compute (``traced.py``): ``bias[h, m - n + 511]`` works on the plain
tensor that a closure, a global or an attribute holds.

Nothing of a trace is kept: a function is called again at every attention, so that what it closes
over may change.
"""

import builtins
import inspect
import numbers
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from tilewise.errors import InvalidType
from tilewise.variants.expr import Expr, slots_of, with_slots
from tilewise.variants.guidance import uncalled
from tilewise.variants.rows import Kind
from tilewise.variants.traced import Indexing, Recording, Row, Traced, named
from tilewise.variants.vocabulary import maximum, minimum


def trace_mask(function: Callable[..., Any]) -> tuple[Expr, tuple[Tensor, ...]]:
    """Return the expression of ``f(b, h, m, n) -> bool`` and the tensors that its slots name.

    Raises:
        InvalidArgument, InvalidType: what the function does or returns is not in the language.
    """
    return _trace("mask", function, "bhmn", "bool")


def trace_score(function: Callable[..., Any]) -> tuple[Expr, tuple[Tensor, ...]]:
    """Return the expression of ``f(s, b, h, m, n) -> s`` and the tensors that its slots name.

    Raises:
        InvalidArgument, InvalidType: what the function does or returns is not in the language.
    """
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
    if isinstance(found, numbers.Number | Tensor | Row):
        found = recording.lift(found)
    if not isinstance(found, Traced) or found.recording is not recording:
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
