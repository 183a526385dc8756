"""Derive the derivative of a score: another expression, made once for all backends.

This is reverse mode on the graph: from the value back to its arguments, each node passes its own
share on. A share (``_Share``) is a constant times a node. So the constants of
``cap * tanh(s / cap)`` cancel ahead of time, and the derivative of ``s + f(m, n)`` is the constant
1. A share of zero makes no node.

Where a function has no derivative, torch's convention holds:

* ``abs`` has its sign (0 at 0).
* ``min`` and ``max`` give half to each side of a tie.
* ``where`` selects.
* ``mod`` is (1, -floor(a / b)).
* Steps (``floor``, ``ceil``, ``round``, ``trunc``, ``sign``, ``floordiv``) have none.
* Whatever passes through an integer or boolean has none.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tilewise.errors import InvalidArgument
from tilewise.variants.expr import Expr, Graph, decode, encode, kinds
from tilewise.variants.functions import FUNCTIONS


class Derivative(NamedTuple):
    """A score with its derivatives.

    Args:
        expr: its outputs are the value, d value / d s, and d value / d load for each of ``loads``.
        loads: the places among ``expr.nodes`` of the float loads that the value depends on, each
            slot with the same indices once. A load whose derivative is 0 everywhere is not among
            them.
    """

    expr: Expr
    loads: tuple[int, ...]


def differentiate(expr: Expr) -> Derivative:
    """Return the derivatives of a score with respect to ``s`` and to every element that it loads.

    Args:
        expr: one float value.

    Raises:
        InvalidArgument: it has another kind, or several results.
    """
    if len(expr.outputs) != 1 or kinds(expr)[expr.outputs[0]] != "float":
        found = ", ".join([kinds(expr)[output] for output in expr.outputs])
        raise InvalidArgument("expression", f"results ({found})", "one float to differentiate")
    return _differentiated(encode(expr))


@lru_cache(maxsize=1024)
def _differentiated(text: str) -> Derivative:
    """Kept by text: expressions that differ in the sign of a zero only are equal to Python."""
    graph = Graph()
    (value,) = graph.include(decode(text))
    shares = _Shares(graph, value)
    leaf_s = graph.leaf("s")
    loads = [
        place
        for place in range(value + 1)
        if graph.nodes[place].op == "load_float" and place in shares.found
    ]
    by_s = shares.found.get(leaf_s)
    derivatives = [graph.constant(0.0) if by_s is None else shares.node(by_s)]
    derivatives += [shares.node(shares.found[load]) for load in loads]
    # The loads lie below the value: naming them as results as well only tells where they end up.
    whole = graph.expr(value, *derivatives, *loads)
    count = 1 + len(derivatives)
    return Derivative(whole._replace(outputs=whole.outputs[:count]), whole.outputs[count:])


class _Share(NamedTuple):
    """``factor`` times the node at ``place``; the factor is never 0."""

    factor: float
    place: int


def _negative(share: _Share) -> _Share:
    return share._replace(factor=-share.factor)


class _Shares:
    """The derivative of the value with respect to each node, by the node's place."""

    def __init__(self, graph: Graph, value: int) -> None:
        self.graph = graph
        self.found: dict[int, _Share] = {value: _Share(1.0, graph.constant(1.0))}
        active = _active(graph, value)
        # The nodes that this loop adds come after the value, and have no share.
        for place in range(value, -1, -1):
            share = self.found.get(place)
            if share is not None and graph.nodes[place].op in _SMOOTH:
                for arg, part in self._handed_on(place, share):
                    if active[arg]:
                        self._add(arg, part)

    def _handed_on(self, place: int, share: _Share) -> Iterator[tuple[int, _Share]]:
        """(argument, its share) of a node; what goes to arguments that need none is dropped."""
        node = self.graph.nodes[place]
        function = FUNCTIONS.get(node.op)
        if function is not None and function.slope is not None:
            factor, by, divides = function.slope(self.graph, node.args[0], place)
            part = self._over(share, by) if divides else self._times(share, by)
            yield node.args[0], part._replace(factor=part.factor * factor)
            return
        first, second = node.args[:2] if len(node.args) > 1 else (*node.args, -1)
        match node.op:
            case "add" | "sub":
                yield first, share
                yield second, share if node.op == "add" else _negative(share)
            case "neg":
                yield first, _negative(share)
            case "mul":
                yield first, self._times(share, second)
                yield second, self._times(share, first)
            case "div":
                yield first, self._over(share, second)
                yield second, _negative(self._over(self._times(share, place), second))
            case "abs":
                yield first, self._times(share, self.graph.apply("sign", first))
            case "mod":
                yield first, share
                steps = self.graph.apply("floordiv", first, second)
                yield second, _negative(self._times(share, steps))
            case "min" | "max":
                yield from self._of_extreme(node.op, first, second, share)
            case "pow":
                yield from self._of_power(place, first, second, share)
            case "where":
                yield second, self._select(first, share, inside=True)
                yield node.args[2], self._select(first, share, inside=False)

    def _of_extreme(
        self, op: str, first: int, second: int, share: _Share
    ) -> Iterator[tuple[int, _Share]]:
        apply = self.graph.apply
        half = apply("mul", self.graph.constant(0.5), share.place)
        either = share._replace(place=apply("where", apply("eq", first, second), half, share.place))
        below, above = apply("lt", first, second), apply("lt", second, first)
        if op == "max":
            below, above = above, below
        yield first, self._select(above, either, inside=False)
        yield second, self._select(below, either, inside=False)

    def _of_power(
        self, value: int, base: int, exponent: int, share: _Share
    ) -> Iterator[tuple[int, _Share]]:
        graph, apply = self.graph, self.graph.apply
        zero = graph.constant(0.0)
        number = self._number(exponent)
        if number is not None:
            lower = base
            if number != 2.0:
                lower = apply("pow", base, graph.constant(number - 1.0))
            yield base, share if number == 1.0 else self._times(share, lower, number)
            return
        lower = apply("pow", base, apply("sub", exponent, graph.constant(1.0)))
        by_base = self._times(share, apply("mul", exponent, lower))
        yield base, self._select(apply("eq", exponent, zero), by_base, inside=False)
        by_exponent = self._times(share, apply("mul", value, apply("log", base)))
        flat = apply("and", apply("eq", base, zero), apply("le", zero, exponent))
        yield exponent, self._select(flat, by_exponent, inside=False)

    def node(self, share: _Share) -> int:
        """Return the place of the share's value."""
        constant = self.graph.nodes[share.place]
        if constant.op == "const_float" and constant.value == 1.0:
            return self.graph.constant(share.factor)
        if share.factor == -1.0:
            return self.graph.apply("neg", share.place)
        return self.graph.apply("mul", self.graph.constant(share.factor), share.place)

    def _number(self, place: int) -> float | None:
        """Return the value of a constant that may become part of a factor: finite and not 0."""
        node = self.graph.nodes[place]
        if node.op != "const_float" or node.value is None:
            return None
        value = float(node.value)
        return value if math.isfinite(value) and value != 0.0 else None

    def _times(self, share: _Share, place: int, factor: float = 1.0) -> _Share:
        """Return the share, multiplied by a node and a number."""
        constant = self._number(place)
        if constant is not None:
            return _Share(share.factor * constant * factor, share.place)
        return _Share(share.factor * factor, self.graph.apply("mul", share.place, place))

    def _over(self, share: _Share, place: int) -> _Share:
        """Return the share, divided by a node."""
        constant = self._number(place)
        if constant is not None:
            return _Share(share.factor / constant, share.place)
        return share._replace(place=self.graph.apply("div", share.place, place))

    def _select(self, condition: int, share: _Share, *, inside: bool) -> _Share:
        """Return the share where the condition is ``inside``, else 0."""
        zero = self.graph.constant(0.0)
        sides = (share.place, zero) if inside else (zero, share.place)
        return share._replace(place=self.graph.apply("where", condition, *sides))

    def _add(self, place: int, share: _Share) -> None:
        node = self.graph.nodes[share.place]
        if share.factor == 0.0 or (node.op == "const_float" and node.value == 0.0):
            return
        before = self.found.get(place)
        if before is None:
            self.found[place] = share
        elif before.factor == share.factor:
            self.found[place] = _Share(
                share.factor, self.graph.apply("add", before.place, share.place)
            )
        elif before.factor == -share.factor:
            self.found[place] = _Share(
                before.factor, self.graph.apply("sub", before.place, share.place)
            )
        else:
            total = self.graph.apply("add", self.node(before), self.node(share))
            self.found[place] = _Share(1.0, total)


def _active(graph: Graph, value: int) -> list[bool]:
    """Return which nodes are ``s``, a float load, or hand shares on to one."""
    active: list[bool] = []
    for place in range(value + 1):
        node = graph.nodes[place]
        through = node.op in _SMOOTH and any(active[arg] for arg in node.args)
        active.append(node.op in ("s", "load_float") or through)
    return active


_SMOOTH = {
    *(name for name, function in FUNCTIONS.items() if function.slope is not None),
    *("add", "sub", "neg", "abs", "mul", "div", "mod", "min", "max", "pow", "where"),
}
