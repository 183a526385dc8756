"""Derive the derivative of a score: another expression, made once for all backends.

This is reverse mode on the graph: from the value back to its arguments, each node passes its own
share on. A share (``Share``) is a constant times a node. So the constants of
``cap * tanh(s / cap)`` cancel ahead of time, and the derivative of ``s + f(m, n)`` is the constant
1. A share of zero makes no node.

What an operation hands on is in its row (``operations.py``). Where a function
has no derivative, torch's convention holds:

* ``abs`` has its sign (0 at 0).
* ``min`` and ``max`` give half to each side of a tie.
* ``where`` selects.
* ``mod`` is (1, -floor(a / b)).
* Steps (``floor``, ``ceil``, ``round``, ``trunc``, ``sign``, ``floordiv``) have none.
* Whatever passes through an integer or boolean has none.
"""

from functools import lru_cache
from typing import NamedTuple

from tilewise.errors import InvalidArgument
from tilewise.variants.expr import Expr, Graph, decode, encode, kinds
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Share


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


class _Shares:
    """The derivative of the value with respect to each node, by the node's place."""

    def __init__(self, graph: Graph, value: int) -> None:
        self.graph = graph
        self.found = {value: Share(graph, 1.0, graph.constant(1.0))}
        active = _active(graph, value)
        # The nodes that this loop adds come after the value, and have no share.
        for place in range(value, -1, -1):
            share = self.found.get(place)
            op, args, _ = graph.nodes[place]
            slope = _SLOPES.get(op)
            if share is None or slope is None:
                continue
            for arg, part in zip(args, slope(share, *args, place), strict=True):
                if active[arg] and part is not None:
                    self._add(arg, part)

    def node(self, share: Share) -> int:
        """Return the place of the share's value."""
        if self.graph.constant_at(share.place) == 1.0:
            return self.graph.constant(share.factor)
        if share.factor == -1.0:
            return self.graph.apply("neg", share.place)
        return self.graph.apply("mul", self.graph.constant(share.factor), share.place)

    def _add(self, place: int, share: Share) -> None:
        if share.factor == 0.0 or self.graph.constant_at(share.place) == 0.0:
            return
        before = self.found.get(place)
        if before is None:
            total = share
        elif before.factor == share.factor:
            total = before.at(self.graph.apply("add", before.place, share.place))
        elif before.factor == -share.factor:
            total = before.at(self.graph.apply("sub", before.place, share.place))
        else:
            both = self.graph.apply("add", self.node(before), self.node(share))
            total = Share(self.graph, 1.0, both)
        self.found[place] = total


def _active(graph: Graph, value: int) -> list[bool]:
    """Return which nodes are ``s``, a float load, or hand shares on to one."""
    active: list[bool] = []
    for place in range(value + 1):
        node = graph.nodes[place]
        through = node.op in _SLOPES and any(active[arg] for arg in node.args)
        active.append(node.op in ("s", "load_float") or through)
    return active


_SLOPES = {op: row.slope for op, row in OPS.items() if row.slope is not None}
