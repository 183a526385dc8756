"""What the tables in ``operations.py`` say of an operation, and the terms in which they say it."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from tilewise.variants.float_intervals import Bounds

Kind: TypeAlias = Literal["bool", "int", "float"]
Constant: TypeAlias = bool | int | float


class Builder(Protocol):
    """The part of ``expr.Graph`` that derivatives use."""

    def apply(self, op: str, *args: int) -> int:
        """Return the place of an operation on the values at these places."""

    def constant(self, value: Constant) -> int:
        """Return the place of a constant."""

    def constant_at(self, place: int) -> Constant | None:
        """Return the value of the constant at a place; None if it is no constant."""


class Share(NamedTuple):
    """The derivative of a score by one of its nodes: ``factor`` times the node at ``place``.

    The factor, which is never 0, gathers what is constant.
    """

    graph: Builder
    factor: float
    place: int

    def scaled(self, factor: float) -> "Share":
        """Return the share, multiplied by a number."""
        return Share(self.graph, self.factor * factor, self.place)

    def times(self, place: int) -> "Share":
        """Return the share, multiplied by a node."""
        number = self.number(place)
        if number is not None:
            return self.scaled(number)
        return self.at(self.graph.apply("mul", self.place, place))

    def over(self, place: int) -> "Share":
        """Return the share, divided by a node."""
        number = self.number(place)
        if number is not None:
            return Share(self.graph, self.factor / number, self.place)
        return self.at(self.graph.apply("div", self.place, place))

    def where(self, condition: int, *, holds: bool = True) -> "Share":
        """Return the share where a condition holds (or where it does not), else 0."""
        zero = self.graph.constant(0.0)
        sides = (self.place, zero) if holds else (zero, self.place)
        return self.at(self.graph.apply("where", condition, *sides))

    def at(self, place: int) -> "Share":
        """Return the factor times another node."""
        return Share(self.graph, self.factor, place)

    def number(self, place: int) -> float | None:
        """Return the value of a constant that may become part of a factor: finite and not 0."""
        value = self.graph.constant_at(place)
        good = isinstance(value, float) and math.isfinite(value) and value != 0.0
        return value if good else None


class Form(NamedTuple):
    """An operation on arguments of one kind."""

    # Its code. ``{0}`` and so on are the arguments; ``{bits}`` and ``{type}`` are those of
    # integers, arguments and value alike.
    triton: str
    # What it makes of intervals (of booleans: of what is known of them); None where it may be NaN
    # or anything.
    interval: Callable[..., Bounds]
    ulps: int = 1  # by how many units in the last place of float32 its Triton code may be off


class Op(NamedTuple):
    """An operation: all that Python knows of it."""

    torch: Callable[..., Tensor]  # its meaning, of tensors: booleans, int64, or floats of one type
    # By the kind of its arguments, which is one (but a condition is a boolean).
    forms: Mapping[Kind, Form]
    arity: int = 2  # the number of its arguments
    gives: Kind | None = None  # the kind of its value; None for that of its last argument
    # Its value for constants; None where it is not taken ahead.
    fold: Callable[..., Constant] | None = None
    # Its derivative. From its share, and the places of its arguments and its value: the share of
    # each argument (None for a condition). None for a step, which has none.
    slope: Callable[..., tuple[Share | None, ...]] | None = None
    # What torch, and Python's operators, call it; None for its own name.
    names: tuple[str, ...] | None = None
