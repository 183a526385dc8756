"""Values that record what a function under trace does with them.

They support Python's operators, and know torch's functions and tensor methods by their names. While
a function is traced, indexing any tensor with a traced value records a load.
"""

import inspect
import linecache
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from tilewise.checks import INTEGERS
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.expr import Graph
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind

# What torch's methods and functions mean here: filled in by ``trace.py``, which says it in
# terms of what is below.
Handler: TypeAlias = Callable[..., "Traced"]
METHODS: dict[str, Handler] = {}
DISPATCHED: dict[Any, Handler] = {}

_LENGTHS = {"m": "M", "n": "N"}
_KINDS: dict[torch.dtype, Kind] = {
    torch.bool: "bool",
    **dict.fromkeys(INTEGERS, "int"),
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "float"),
}
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def named(value: object) -> str:
    """Describe a value for an error message."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def is_numpy_boolean(value: object) -> bool:
    """Return whether a value is a boolean of numpy, which to Python is no number."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


class Recording:
    """One call of a function: the graph that it writes, and the tensors that it reads."""

    def __init__(self, argument: str) -> None:
        self.argument, self.graph = argument, Graph()
        self.captured: list[Tensor] = []

    def leaf(self, name: str) -> "Traced":
        """Return a position or the score."""
        return Traced(self, self.graph.leaf(name))

    def lift(self, value: object) -> "Traced":
        """Return a value of the language from an operand."""
        if isinstance(value, Traced):
            if value.recording is not self:
                came = "a value of another function, or of an earlier call"
                raise InvalidArgument(self.argument, came, "values of this call", whereabouts())
            return value
        if isinstance(value, bool):
            return Traced(self, self.graph.constant(value))
        # A number that torch.compile lets vary becomes the one that it is now, and another graph is
        # made for another one: of the ways to say so, dynamo knows these.
        if isinstance(value, int | torch.SymInt):
            return Traced(self, self.graph.constant(operator.index(value)))
        if isinstance(value, float | torch.SymFloat):
            return Traced(self, self.graph.constant(value.__float__()))
        if isinstance(value, Tensor):
            return self.load(value, ())
        if isinstance(value, Row):
            return self.load(value.tensor, value.indices)
        if is_numpy_boolean(value):
            return Traced(self, self.graph.constant(bool(value)))
        if isinstance(value, numbers.Integral):
            return Traced(self, self.graph.constant(int(value)))
        if isinstance(value, numbers.Real):
            return Traced(self, self.graph.constant(float(value)))
        required = "numbers, tensors that are indexed, and what is computed from them"
        raise InvalidType(self.argument, named(value), required, whereabouts())

    def load(self, tensor: Tensor, indices: tuple[object, ...]) -> "Traced":
        """Return an element of a captured tensor."""
        if len(indices) != tensor.dim():
            raise InvalidArgument(
                self.argument,
                f"a tensor of shape {list(tensor.shape)} with "
                f"{len(indices)} ind{'ex' if len(indices) == 1 else 'ices'}",
                "an index for each of its dimensions",
                whereabouts(),
            )
        places = [self._index(index) for index in indices]
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            required = f"one of {', '.join(str(dtype) for dtype in _KINDS)}"
            came = f"a tensor of {tensor.dtype}"
            raise InvalidArgument(self.argument, came, required, whereabouts())
        return Traced(self, self.graph.load(kind, self._slot(tensor), places))

    def _index(self, index: object) -> int:
        if isinstance(index, int) and not isinstance(index, bool) and index < 0:
            required = "an index of 0 or more: negative ones do not wrap here"
            raise InvalidArgument(self.argument, f"the index {index}", required, whereabouts())
        lifted = None if isinstance(index, bool | float) else self.lift(index)
        if lifted is None or lifted.kind != "int":
            came = f"an index that is a {'bool' if isinstance(index, bool) else 'float'}"
            if lifted is not None:
                came = f"an index that is a {lifted.kind}"
            raise InvalidType(self.argument, came, "an integer for each dimension", whereabouts())
        return lifted.place

    def _slot(self, tensor: Tensor) -> int:
        for slot, known in enumerate(self.captured):
            if known is tensor:
                return slot
        self.captured.append(tensor)
        return len(self.captured) - 1


class Row:
    """A tensor with fewer indices than dimensions: the rest may follow, as in ``bias[h][m]``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor, indices: tuple[object, ...]) -> None:
        self.tensor, self.indices = tensor, indices

    @property
    def recording(self) -> Recording:
        """Return the call that its indices belong to."""
        return recording_of(self.indices)

    def _refuse(self, *_: object) -> NoReturn:
        """Nothing but another index may follow."""
        self.recording.load(self.tensor, self.indices)
        raise AssertionError("an element has as many indices as its tensor has dimensions")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __invert__ = __bool__ = __index__ = __float__ = _refuse
    __eq__ = __ne__ = __pos__ = __matmul__ = __rmatmul__ = _refuse
    # Python would iterate by ``__getitem__``, which has no last element.
    __iter__ = __len__ = __contains__ = _refuse

    def __getitem__(self, index: object) -> "Traced | Row":
        return _indexed(self.tensor, (*self.indices, *_as_tuple(index)))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse the methods that tensors have."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse the functions of torch."""
        recording = recording_of((*args, *(kwargs or {}).values()))
        came = f"{resolve_name(func) or func} of a row of a tensor"
        required = "an index for each of its dimensions"
        raise InvalidArgument(recording.argument, came, required, whereabouts())


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
            if any(_is_traced(index) for index in indices):
                return _indexed(args[0], indices)
        return func(*args, **(kwargs or {}))


def _is_traced(index: object) -> bool:
    if isinstance(index, list | tuple):
        return any(_is_traced(each) for each in index)
    return isinstance(index, Traced | Row)


def _as_tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def _indexed(tensor: Tensor, indices: tuple[object, ...]) -> "Traced | Row":
    recording = recording_of(indices)
    for index in indices:
        if index is None or index is Ellipsis or isinstance(index, slice | list | tuple):
            required = "an integer for each dimension"
            raise InvalidType(recording.argument, f"the index {index}", required, whereabouts())
    if len(indices) < tensor.dim():
        return Row(tensor, indices)
    return recording.load(tensor, indices)


def recording_of(values: Iterable[object]) -> Recording:
    """Return the call that the first traced value belongs to, in lists and tuples too."""
    stack = list(values)[::-1]
    while stack:
        value = stack.pop()
        if isinstance(value, Traced):
            return value.recording
        if isinstance(value, Row):
            stack.extend(value.indices[::-1])
        elif isinstance(value, list | tuple):
            stack.extend(value[::-1])
    raise AssertionError("torch brings no call here that has no traced value")


_Operator: TypeAlias = Callable[["Traced", object], "Traced"]


def _operators(op: str) -> tuple[_Operator, _Operator]:
    """An operator, and the same with its operands exchanged."""

    def straight(self: "Traced", other: object) -> "Traced":
        return apply(self.recording, op, (self, other))

    def exchanged(self: "Traced", other: object) -> "Traced":
        return apply(self.recording, op, (other, self))

    return straight, exchanged


class Traced:
    """A value of a pair that a function under trace computes with.

    Operators are Python's, with torch's rules of kinds: an integer meets a float as a float, ``/``
    gives floats, ``//`` and ``%`` round down. ``m.length`` and ``n.length`` are the numbers of
    query rows and keys of the sequence.
    """

    __slots__ = ("place", "recording")

    def __init__(self, recording: Recording, place: int) -> None:
        self.recording, self.place = recording, place

    @property
    def kind(self) -> Kind:
        """``"bool"``, ``"int"`` or ``"float"``."""
        return self.recording.graph.kinds[self.place]

    @property
    def length(self) -> "Traced":
        """Return the number of rows (of ``m``) or keys (of ``n``) in the sequence."""
        name = _LENGTHS.get(self.recording.graph.nodes[self.place].op)
        if name is None:
            required = "m.length or n.length of the function's own m and n"
            raise InvalidArgument(
                self.recording.argument, ".length of another value", required, whereabouts()
            )
        return self.recording.leaf(name)

    def __repr__(self) -> str:
        return f"<traced {self.kind} of a {self.recording.argument}>"

    def _apply(self, op: str, *others: object) -> "Traced":
        """An operation on this value and others, which are brought to one kind."""
        return apply(self.recording, op, (self, *others))

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __floordiv__, __rfloordiv__ = _operators("floordiv")
    __mod__, __rmod__ = _operators("mod")
    __and__, __rand__ = _operators("and")
    __or__, __ror__ = _operators("or")
    __xor__, __rxor__ = _operators("xor")
    __lshift__, __rlshift__ = _operators("shl")
    __rshift__, __rrshift__ = _operators("shr")
    __lt__, __gt__ = _operators("lt")
    __le__, __ge__ = _operators("le")
    __eq__ = _operators("eq")[0]  # type: ignore[assignment]
    __ne__ = _operators("ne")[0]  # type: ignore[assignment]

    def __pow__(self, other: object) -> "Traced":
        return METHODS["pow"](self.recording, self, other)

    def __rpow__(self, other: object) -> "Traced":
        return METHODS["pow"](self.recording, other, self)

    def __neg__(self) -> "Traced":
        return self._apply("neg")

    def __pos__(self) -> "Traced":
        return self

    def __abs__(self) -> "Traced":
        return self._apply("abs")

    def __invert__(self) -> "Traced":
        return self._apply("not")

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
        """Return whether this value differs from zero."""
        return self if self.kind == "bool" else self._apply("ne", 0)

    ndim = 0
    shape = torch.Size(())  # one value for a pair, as torch's vmap shows it: x.new_zeros(x.shape)

    @property
    def device(self) -> torch.device:
        """Return no real device: captured tensors may be on any, and ``.to`` changes nothing."""
        return torch.device("meta")

    def to(self, dtype: object = None, *others: object, **options: object) -> "Traced":
        """This value as a bool, an integer or a float."""
        if isinstance(dtype, torch.device) and not (others or options):
            return self
        kind = _KINDS.get(dtype) if isinstance(dtype, torch.dtype) else None
        if kind is None or others or options:
            given = [*([] if dtype is None else [dtype]), *others]
            came = ", ".join([str(x) for x in given] + [f"{x}={y}" for x, y in options.items()])
            required = "one argument: a boolean, integer or float dtype, or a torch.device"
            raise InvalidArgument(self.recording.argument, f".to({came})", required, whereabouts())
        return self.as_kind(kind)

    type = to

    def as_kind(self, kind: Kind) -> "Traced":
        """This value as one of a kind."""
        return {"bool": self.bool, "int": self.long, "float": self.float}[kind]()

    def __getattr__(self, name: str) -> Any:
        """The methods that tensors have: ``s.exp()``, ``s.clamp(min=0)``."""
        if name.startswith("__") or name in ("place", "recording"):
            raise AttributeError(name)  # asked by who looks at objects, or before there is a value
        handler = METHODS.get(name)
        if handler is None:
            required = f"operators, or one of: {', '.join(sorted(METHODS))}"
            raise InvalidArgument(
                self.recording.argument, f".{name} of a traced value", required, whereabouts()
            )

        def method(*args: object, **kwargs: object) -> Traced:
            return _handled(self.recording, name, handler, (self, *args), kwargs)

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
        recording = recording_of((*args, *kwargs.values()))
        handler = DISPATCHED.get(func)
        if handler is None:
            required = f"one of: {', '.join(sorted(METHODS))}"
            came = f"{resolve_name(func) or func} of a traced value"
            raise InvalidArgument(recording.argument, came, required, whereabouts())
        return _handled(recording, func, handler, args, kwargs)

    def __bool__(self) -> NoReturn:
        raise InvalidType(
            self.recording.argument,
            f"the truth value of a traced {self.kind}{_line()}",
            "&, | and ~ for 'and', 'or' and 'not', tilewise.where(condition, x, y) for 'if', "
            "tilewise.minimum and maximum for min and max in functions that it calls",
            "Write a < b < c as (a < b) & (b < c). What is decided here must hold for every pair.",
        )

    def __hash__(self) -> NoReturn:
        self._refuse("a key of a dict or a set, or as an argument of a cached function")

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

    __array_ufunc__ = None  # operators of a numpy array leave the work to the operators here

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Return what numpy asks for of an index, and of an operand of its functions."""
        raise InvalidType(
            self.recording.argument,
            f"a traced {self.kind} in a numpy array or function{_line()}",
            "torch tensors and functions of torch",
            "Make the array a torch tensor before the function: t = torch.from_numpy(t).",
        )

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidType(
            self.recording.argument,
            f"a traced {self.kind} used as {what}{_line()}",
            "operators and torch functions of it; .float() and .long() convert",
        )


def _handled(
    recording: Recording,
    called: str | Callable[..., Any],
    handler: Handler,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Traced:
    """Call what a method (its name) or a function means here."""
    try:
        return handler(recording, *args, **kwargs)
    except TypeError:
        try:
            inspect.signature(handler).bind(recording, *args, **kwargs)
        except TypeError as error:
            name = f".{called}" if isinstance(called, str) else resolve_name(called) or called
            came = f"{name} of a traced value with other arguments than it takes here: {error}"
            required = "its operands by position, without torch's further options"
            raise InvalidType(recording.argument, came, required, whereabouts()) from None
        raise


def _user_frame() -> tuple[str, int] | None:
    """File and line of the code that is being traced, or of the call whose function has ended."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and "/torch/" not in name.replace("\\", "/"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _line() -> str:
    found = _user_frame()
    if found is None:
        return ""
    source = linecache.getline(*found).strip()
    return f" ({found[0]}:{found[1]}{': ' + source if source else ''})"


def whereabouts() -> str:
    """Return the line of the code that is being traced, for the end of an error."""
    line = _line()
    return f"At{line.replace(' (', ' ', 1)[:-1]}" if line else ""


def apply(recording: Recording, op: str, operands: tuple[object, ...]) -> Traced:
    """Apply an operation, with its operands lifted and brought to the kinds that it takes."""
    values = [recording.lift(operand) for operand in operands]
    graph = recording.graph
    if op in ("to_float", "to_int"):
        return Traced(recording, graph.apply(op, values[0].place))
    kind = common([value.kind for value in values])
    if kind == "bool":
        op = _OF_BOOLEANS.get(op, op)
    taken = OPS[op].forms
    if kind not in taken:
        if kind == "float":
            came = f"a float as operand of {_SIGNS.get(op, op)}"
            raise InvalidType(recording.argument, came, "booleans or integers", whereabouts())
        kind = "int" if kind == "bool" and "int" in taken else "float"
    places = [cast(graph, value.place, kind) for value in values]
    return Traced(recording, graph.apply(op, *places))


# Torch's arithmetic of two booleans gives a boolean.
_OF_BOOLEANS = {"add": "or", "mul": "and", "min": "and", "max": "or"}
_SIGNS = {"and": "&", "or": "|", "xor": "^", "not": "~", "shl": "<<", "shr": ">>"}


def common(given: list[Kind]) -> Kind:
    """Return the kind that values of different kinds meet in."""
    return "float" if "float" in given else "int" if "int" in given else "bool"


def cast(graph: Graph, place: int, kind: Kind) -> int:
    """Return the place of a value as one of another kind."""
    if graph.kinds[place] == kind:
        return place
    if kind == "bool":
        return graph.apply("ne", cast(graph, place, graph.kinds[place]), graph.constant(0))
    return graph.apply(f"to_{kind}", place)
