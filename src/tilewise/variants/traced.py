"""What a function under trace computes with: values that write down what is done with them.

Operators are Python's; torch's functions and the methods of its tensors are known by their names.
While a function is traced, indexing any tensor with a traced value writes down a load.
"""

import linecache
import numbers
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.expr import Graph, Kind

__all__ = ["Indexing", "Recording", "Row", "Traced", "maximum", "minimum", "named", "where"]

_LENGTHS = {"m": "M", "n": "N"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_HERE = os.path.dirname(__file__)
_FEW = 32  # the largest exponent that is written out as products


def named(value: object) -> str:
    """What a value is, for an error."""
    return "nothing" if value is None else f"a {type(value).__name__}"


class Recording:
    """One call of a function: the graph that it writes, and the tensors that it reads."""

    def __init__(self, argument: str) -> None:
        self.argument, self.graph = argument, Graph()
        self.captured: list[Tensor] = []

    def leaf(self, name: str) -> "Traced":
        """A position or the score."""
        return Traced(self, self.graph.leaf(name))

    def lift(self, value: object) -> "Traced":
        """A value of the language from an operand."""
        if isinstance(value, Traced):
            if value.recording is not self:
                came = "a value of another function, or of an earlier call"
                raise InvalidArgument(self.argument, came, "values of this call", _where_am_i())
            return value
        if isinstance(value, bool):
            return Traced(self, self.graph.constant(value))
        # A number that torch.compile lets vary becomes the one that it is now, and another graph is
        # made for another one: of the ways to say so, dynamo knows these methods.
        if isinstance(value, int | torch.SymInt):
            return Traced(self, self.graph.constant(value.__int__()))
        if isinstance(value, float | torch.SymFloat):
            return Traced(self, self.graph.constant(value.__float__()))
        if isinstance(value, Tensor):
            return self.load(value, ())
        if isinstance(value, Row):
            return self.load(value.tensor, value.indices)
        if isinstance(value, numbers.Integral):
            return Traced(self, self.graph.constant(int(value)))
        if isinstance(value, numbers.Real):
            return Traced(self, self.graph.constant(float(value)))
        required = "numbers, tensors that are indexed, and what is computed from them"
        raise InvalidType(self.argument, named(value), required, _where_am_i())

    def load(self, tensor: Tensor, indices: tuple[object, ...]) -> "Traced":
        """An element of a captured tensor."""
        if len(indices) != tensor.dim():
            raise InvalidArgument(
                self.argument,
                f"a tensor of shape {list(tensor.shape)} with "
                f"{len(indices)} ind{'ex' if len(indices) == 1 else 'ices'}",
                "an index for each of its dimensions",
                _where_am_i(),
            )
        places = [self._index(index) for index in indices]
        kind: Kind | None = (
            "bool"
            if tensor.dtype is torch.bool
            else "int"
            if tensor.dtype in _INTEGERS
            else "float"
            if tensor.dtype in _FLOATS
            else None
        )
        if kind is None:
            required = "a tensor of booleans, integers or floats"
            raise InvalidArgument(self.argument, f"a tensor of {tensor.dtype}", required)
        return Traced(self, self.graph.load(kind, self._slot(tensor), places))

    def _index(self, index: object) -> int:
        if isinstance(index, int) and not isinstance(index, bool) and index < 0:
            required = "an index of 0 or more: negative ones do not wrap here"
            raise InvalidArgument(self.argument, f"the index {index}", required, _where_am_i())
        lifted = None if isinstance(index, bool | float) else self.lift(index)
        if lifted is None or lifted.kind != "int":
            came = f"an index that is a {'bool' if isinstance(index, bool) else 'float'}"
            if lifted is not None:
                came = f"an index that is a {lifted.kind}"
            raise InvalidType(self.argument, came, "an integer for each dimension", _where_am_i())
        return lifted.place

    def _slot(self, tensor: Tensor) -> int:
        for slot, known in enumerate(self.captured):
            if known is tensor:
                return slot
        self.captured.append(tensor)
        return len(self.captured) - 1


class Row:
    """A tensor with fewer indices than dimensions: the rest may follow, as in ``bias[h][m]``."""

    def __init__(self, tensor: Tensor, indices: tuple[object, ...]) -> None:
        self.tensor, self.indices = tensor, indices

    def __getitem__(self, index: object) -> "Traced | Row":
        return _indexed(self.tensor, (*self.indices, *_as_tuple(index)))


class Indexing(TorchFunctionMode):
    """Sees a plain tensor indexed by a traced value, which torch would refuse."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Everything but that indexing is torch's."""
        if func is Tensor.__getitem__:
            indices = _as_tuple(args[1])
            if any(isinstance(index, Traced | Row) for index in indices):
                return _indexed(args[0], indices)
        return func(*args, **(kwargs or {}))


def _as_tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def _indexed(tensor: Tensor, indices: tuple[object, ...]) -> "Traced | Row":
    recording = next(index.recording for index in indices if isinstance(index, Traced))
    for index in indices:
        if index is None or index is Ellipsis or isinstance(index, slice):
            required = "an integer for each dimension"
            raise InvalidType(recording.argument, f"the index {index}", required, _where_am_i())
    if len(indices) < tensor.dim():
        return Row(tensor, indices)
    return recording.load(tensor, indices)


class Traced:
    """A value of a pair that a function under trace computes with.

    Operators are Python's, with torch's rules of kinds: an integer meets a float as a float, ``/``
    gives floats, ``//`` and ``%`` round down. ``m.length`` and ``n.length`` are the numbers of
    query rows and keys of the sequence.
    """

    __slots__ = ("place", "recording")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, recording: Recording, place: int) -> None:
        self.recording, self.place = recording, place

    @property
    def kind(self) -> Kind:
        """``"bool"``, ``"int"`` or ``"float"``."""
        return self.recording.graph.kinds[self.place]

    @property
    def length(self) -> "Traced":
        """Of ``m`` and ``n``: how many there are in the sequence."""
        name = _LENGTHS.get(self.recording.graph.nodes[self.place].op)
        if name is None:
            required = "m.length or n.length of the function's own m and n"
            raise InvalidArgument(
                self.recording.argument, ".length of another value", required, _where_am_i()
            )
        return self.recording.leaf(name)

    def __repr__(self) -> str:
        return f"<traced {self.kind} of a {self.recording.argument}>"

    def _apply(self, op: str, *others: object) -> "Traced":
        """An operation on this value and others, which are brought to one kind."""
        return _operation(self.recording, op, (self, *others))

    # Arithmetic.
    def __add__(self, other: object) -> "Traced":
        return self._apply("add", other)

    def __radd__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("add", self)

    def __sub__(self, other: object) -> "Traced":
        return self._apply("sub", other)

    def __rsub__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("sub", self)

    def __mul__(self, other: object) -> "Traced":
        return self._apply("mul", other)

    def __rmul__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("mul", self)

    def __truediv__(self, other: object) -> "Traced":
        return self._apply("div", other)

    def __rtruediv__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("div", self)

    def __floordiv__(self, other: object) -> "Traced":
        return self._apply("floordiv", other)

    def __rfloordiv__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("floordiv", self)

    def __mod__(self, other: object) -> "Traced":
        return self._apply("mod", other)

    def __rmod__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("mod", self)

    def __pow__(self, other: object) -> "Traced":
        return _power(self, other)

    def __rpow__(self, other: object) -> "Traced":
        return _power(self.recording.lift(other), self)

    def __neg__(self) -> "Traced":
        return self._apply("neg")

    def __pos__(self) -> "Traced":
        return self

    def __abs__(self) -> "Traced":
        return self._apply("abs")

    # Bits and logic.
    def __and__(self, other: object) -> "Traced":
        return self._apply("and", other)

    def __rand__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("and", self)

    def __or__(self, other: object) -> "Traced":
        return self._apply("or", other)

    def __ror__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("or", self)

    def __xor__(self, other: object) -> "Traced":
        return self._apply("xor", other)

    def __rxor__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("xor", self)

    def __invert__(self) -> "Traced":
        return self._apply("not")

    def __lshift__(self, other: object) -> "Traced":
        return self._apply("shl", other)

    def __rlshift__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("shl", self)

    def __rshift__(self, other: object) -> "Traced":
        return self._apply("shr", other)

    def __rrshift__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("shr", self)

    # Comparisons.
    def __lt__(self, other: object) -> "Traced":
        return self._apply("lt", other)

    def __le__(self, other: object) -> "Traced":
        return self._apply("le", other)

    def __gt__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("lt", self)

    def __ge__(self, other: object) -> "Traced":
        return self.recording.lift(other)._apply("le", self)

    def __eq__(self, other: object) -> "Traced":  # type: ignore[override]
        return self._apply("eq", other)

    def __ne__(self, other: object) -> "Traced":  # type: ignore[override]
        return self._apply("ne", other)

    # Casts and methods of tensors.
    def float(self) -> "Traced":
        """This value as a float, of the type that the kernel computes in."""
        return self._apply("to_float")

    double = float
    half = float

    def long(self) -> "Traced":
        """This value as an integer, rounded towards zero."""
        return self._apply("to_int")

    int = long

    def bool(self) -> "Traced":
        """Whether this value is not zero."""
        return self if self.kind == "bool" else self._apply("ne", 0)

    def to(self, dtype: torch.dtype) -> "Traced":
        """This value as a bool, an integer or a float."""
        if dtype is torch.bool:
            return self.bool()
        if dtype in _INTEGERS:
            return self.long()
        if dtype in _FLOATS:
            return self.float()
        raise InvalidArgument(
            self.recording.argument, f".to({dtype})", "a boolean, integer or float dtype"
        )

    type = to

    def __getattr__(self, name: str) -> Any:
        """The methods that tensors have: ``s.exp()``, ``s.clamp(min=0)``."""
        if name.startswith("__") or name in ("place", "recording"):
            raise AttributeError(name)  # asked by who looks at objects, or before there is a value
        handler = _TORCH.get(name)
        if handler is None:
            required = f"operators, or one of: {', '.join(sorted(_TORCH))}"
            raise InvalidArgument(
                self.recording.argument, f".{name} of a traced value", required, _where_am_i()
            )

        def method(*args: object, **kwargs: object) -> Traced:
            return handler(self.recording, self, *args, **kwargs)

        return method

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Traced":
        """A function of torch, or an operator of a tensor, of operands that are traced."""
        kwargs = kwargs or {}
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Traced)]
        recording = operands[0].recording
        handler = _FUNCTIONS.get(func)
        if handler is None:
            required = f"one of: {', '.join(sorted(_TORCH))}"
            raise InvalidArgument(
                recording.argument, f"{func} of a traced value", required, _where_am_i()
            )
        return handler(recording, *args, **kwargs)

    def __bool__(self) -> NoReturn:
        raise InvalidType(
            self.recording.argument,
            f"the truth value of a traced {self.kind}{_line()}",
            "&, | and ~ for 'and', 'or' and 'not', tilewise.where(condition, x, y) for 'if'",
            "Write a < b < c as (a < b) & (b < c). What is decided here must hold for every pair.",
        )

    def __index__(self) -> NoReturn:
        self._refuse("a Python integer")

    def __int__(self) -> NoReturn:
        self._refuse("a Python integer")

    def __float__(self) -> NoReturn:
        self._refuse("a Python float")

    def __iter__(self) -> NoReturn:
        self._refuse("a sequence")

    def __len__(self) -> NoReturn:
        self._refuse("a sequence")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidType(
            self.recording.argument,
            f"a traced {self.kind} used as {what}{_line()}",
            "operators and torch functions of it; .float() and .long() convert",
        )


def _user_frame() -> tuple[str, int] | None:
    """File and line of the code that is being traced."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if os.path.dirname(name) != _HERE and "/torch/" not in name.replace("\\", "/"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _line() -> str:
    found = _user_frame()
    if found is None:
        return ""
    source = linecache.getline(*found).strip()
    return f" ({found[0]}:{found[1]}{': ' + source if source else ''})"


def _where_am_i() -> str:
    line = _line()
    return f"At{line.replace(' (', ' ', 1)[:-1]}" if line else ""


def _operation(recording: Recording, op: str, operands: tuple[object, ...]) -> Traced:
    """An operation, its operands lifted and brought to the kinds that it takes."""
    values = [recording.lift(operand) for operand in operands]
    graph = recording.graph
    given = [value.kind for value in values]
    if op in ("and", "or", "xor", "not", "shl", "shr") and "float" in given:
        required = "booleans or integers"
        raise InvalidType(
            recording.argument, f"a float as operand of {_SIGNS[op]}", required, _where_am_i()
        )
    kind = _common(given)
    if op in _FLOATING:
        kind = "float"
    elif kind == "bool" and op not in ("and", "or", "xor", "not", "eq", "ne"):
        kind = "int"
    if op in ("to_float", "to_int"):
        return Traced(recording, graph.apply(op, values[0].place))
    places = [_cast(graph, value.place, kind) for value in values]
    return Traced(recording, graph.apply(op, *places))


_SIGNS = {"and": "&", "or": "|", "xor": "^", "not": "~", "shl": "<<", "shr": ">>"}
_UNARY = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos")
_ROUNDING = ("floor", "ceil", "round", "trunc")
_FLOATING = frozenset(("div", "pow", *_UNARY, *_ROUNDING))


def _common(given: list[Kind]) -> Kind:
    return "float" if "float" in given else "int" if "int" in given else "bool"


def _cast(graph: Graph, place: int, kind: Kind) -> int:
    if graph.kinds[place] == kind:
        return place
    if kind == "bool":
        return graph.apply("ne", _cast(graph, place, graph.kinds[place]), graph.constant(0))
    return graph.apply(f"to_{kind}", place)


def _power(base: Traced, exponent: object) -> Traced:
    """Whole small powers as products, as torch takes them; the others by ``pow``."""
    if isinstance(exponent, int | float) and not isinstance(exponent, bool):
        whole = int(exponent) if exponent == int(exponent) else None
        if base.kind == "float":
            if whole in (1, 2, 3):
                return base if whole == 1 else base * base if whole == 2 else base * base * base
            return (
                base**2 / base**4
                if whole == -2
                else base._apply("pow", float(exponent))
                if (exponent not in (0.5, -0.5, -1))
                else _ROOTS[float(exponent)](base)
            )
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
            "x.float() ** y, or 1 << y for powers of two." + " " + _where_am_i(),
        )
    return base._apply("pow", raised)


_ROOTS: dict[float, Callable[[Traced], Traced]] = {
    0.5: lambda x: x._apply("sqrt"),
    -0.5: lambda x: x._apply("rsqrt"),
    -1.0: lambda x: 1.0 / x,
}


def _select(recording: Recording, condition: object, x: object, y: object) -> Traced:
    chosen = recording.lift(condition).bool()
    first, second = recording.lift(x), recording.lift(y)
    graph = recording.graph
    kind = _common([first.kind, second.kind])
    places = [_cast(graph, value.place, kind) for value in (first, second)]
    return Traced(recording, graph.apply("where", chosen.place, *places))


def _clamp(recording: Recording, x: object, min: object = None, max: object = None) -> Traced:
    found = recording.lift(x)
    if min is not None:
        found = found._apply("max", min)
    return found if max is None else found._apply("min", max)


def _divide(recording: Recording, x: object, y: object, rounding_mode: str | None = None) -> Traced:
    if rounding_mode is None:
        return _operation(recording, "div", (x, y))
    if rounding_mode == "floor":
        return _operation(recording, "floordiv", (x, y))
    came = f"torch.div(rounding_mode={rounding_mode!r})"
    raise InvalidArgument(recording.argument, came, "None or 'floor'", _where_am_i())


def _logical(op: str) -> Callable[..., Traced]:
    def handler(recording: Recording, *operands: object) -> Traced:
        return _operation(recording, op, tuple([recording.lift(x).bool() for x in operands]))

    return handler


def _plain(op: str) -> Callable[..., Traced]:
    def handler(recording: Recording, *operands: object) -> Traced:
        return _operation(recording, op, operands)

    return handler


def _swapped(op: str) -> Callable[..., Traced]:
    def handler(recording: Recording, x: object, y: object) -> Traced:
        return _operation(recording, op, (y, x))

    return handler


def _round(recording: Recording, x: object) -> Traced:
    return _operation(recording, "round", (x,))


def _softplus(recording: Recording, x: object) -> Traced:
    value = recording.lift(x).float()
    tail = _operation(recording, "log", (1.0 + (-abs(value))._apply("exp"),))
    return value._apply("max", 0.0) + tail


def _filled(number: float) -> Callable[..., Traced]:
    def handler(recording: Recording, like: object, **_: object) -> Traced:
        return (
            recording.lift(number)
            if recording.lift(like).kind == "float"
            else recording.lift(int(number))
        )

    return handler


# What torch's functions and methods mean here, by their names.
_TORCH: dict[str, Callable[..., Traced]] = {
    **{name: _plain(name) for name in (*_UNARY, *_ROUNDING)},
    **{name: _plain("abs") for name in ("abs", "absolute")},
    **{name: _plain("neg") for name in ("neg", "negative")},
    "sign": _plain("sign"),
    "round": _round,
    "add": _plain("add"),
    **{name: _plain("sub") for name in ("sub", "subtract")},
    **{name: _plain("mul") for name in ("mul", "multiply")},
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _divide),
    **{name: _plain("floordiv") for name in ("floor_divide", "floordiv")},
    **{name: _plain("mod") for name in ("remainder", "mod")},
    "pow": lambda recording, x, y: _power(recording.lift(x), y),
    "minimum": _plain("min"),
    "maximum": _plain("max"),
    **{name: _plain("lt") for name in ("lt", "less")},
    **{name: _plain("le") for name in ("le", "less_equal")},
    **{name: _swapped("lt") for name in ("gt", "greater")},
    **{name: _swapped("le") for name in ("ge", "greater_equal")},
    "eq": _plain("eq"),
    **{name: _plain("ne") for name in ("ne", "not_equal")},
    **{name: _plain("and") for name in ("and", "bitwise_and")},
    **{name: _plain("or") for name in ("or", "bitwise_or")},
    **{name: _plain("xor") for name in ("xor", "bitwise_xor")},
    **{name: _plain("not") for name in ("invert", "bitwise_not")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{name: _plain("shl") for name in ("lshift", "bitwise_left_shift")},
    **{name: _plain("shr") for name in ("rshift", "bitwise_right_shift")},
    "where": _select,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "square": lambda recording, x: recording.lift(x) * x,
    "reciprocal": lambda recording, x: 1.0 / recording.lift(x),
    "relu": lambda recording, x, inplace=False: recording.lift(x)._apply("max", 0),
    "silu": lambda recording, x, inplace=False: recording.lift(x) * recording.lift(x).sigmoid(),
    "softplus": _softplus,
    "zeros_like": _filled(0.0),
    "ones_like": _filled(1.0),
}


def _functions() -> dict[Any, Callable[..., Traced]]:
    """The table above by the functions and methods themselves, reflected operators too."""
    found: dict[Any, Callable[..., Traced]] = {}
    for name, handler in _TORCH.items():
        for owner in (torch, Tensor, torch.nn.functional):
            if hasattr(owner, name):
                found[getattr(owner, name)] = handler
        if hasattr(Tensor, f"__{name}__"):
            found[getattr(Tensor, f"__{name}__")] = handler
        if hasattr(Tensor, f"__r{name}__"):
            found[getattr(Tensor, f"__r{name}__")] = _reflected(handler)
    return found


def _reflected(handler: Callable[..., Traced]) -> Callable[..., Traced]:
    return lambda recording, x, y: handler(recording, y, x)


_FUNCTIONS = _functions()


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
