"""Find how a load is indexed, as far as that decides which pairs load the same element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from tilewise.problem import Problem
from tilewise.variants.expr import Expr, Node

# All pairs of a row, a column, or a diagonal load the same element; or nothing is known.
Lines: TypeAlias = Literal["rows", "columns", "diagonals", "pairs"]


class Form(NamedTuple):
    """Form of a load's indices.

    Args:
        lines: pairs that load the same element, in one head of one batch item. Where it depends
            on neither position, ``rows``.
        axes: of each of "bhmn" that indexes a dimension by itself, the dimension; None if an index
            is anything else. The dimension is as long as the call needs, or longer.
    """

    lines: Lines
    axes: dict[str, int] | None


class _Positions(NamedTuple):
    """Dependence of a value on m and n.

    Args:
        lines: the pairs for which it is the same; None for all of them.
        slopes: of ``slopes[0] * m + slopes[1] * n + something else``, or None.
    """

    lines: Lines | None
    slopes: tuple[int, int] | None


def form_of(indices: Expr, shape: Sequence[int], problem: Problem, *, fits: bool) -> Form:
    """Return the form of a load.

    Args:
        indices: its indices before clamping, one per dimension.
        shape: of the tensor; an index into a dimension of size 1 does not matter.
        problem: with the sizes of the call.
        fits: whether the tensor was lowered to fit the longest sequence.
    """
    places = [(dim, place) for dim, place in enumerate(indices.outputs) if shape[dim] != 1]
    known = _positions(indices.nodes)
    lines: Lines | None = None
    for _, place in places:
        lines = _joined(lines, known[place].lines)
    if lines == "diagonals" and problem.layout == "varlen":
        lines = "pairs"
    least = {"b": problem.batch, "h": problem.heads, "m": problem.queries, "n": problem.keys}
    axes: dict[str, int] = {}
    for dim, place in places:
        leaf = indices.nodes[place].op
        if leaf not in least or leaf in axes:
            return Form(lines or "rows", None)
        exact = leaf in "bh" and shape[dim] == least[leaf]
        long_enough = leaf in "mn" and (
            fits if problem.layout == "varlen" else shape[dim] >= least[leaf]
        )
        if not exact and not long_enough:
            return Form(lines or "rows", None)
        axes[leaf] = dim
    return Form(lines or "rows", axes)


def _positions(nodes: Sequence[Node]) -> list[_Positions]:
    """Return how each node depends on the positions."""
    found: list[_Positions] = []
    for node in nodes:
        args = [found[arg] for arg in node.args]
        slopes = _slopes(nodes, node, args)
        if slopes is not None:
            found.append(_Positions(_lines(*slopes), slopes))
            continue
        lines: Lines | None = "pairs" if node.op == "s" else None
        for arg in args:
            lines = _joined(lines, arg.lines)
        found.append(_Positions(lines, None if lines else (0, 0)))
    return found


def _slopes(
    nodes: Sequence[Node], node: Node, args: Sequence[_Positions]
) -> tuple[int, int] | None:
    if node.op in "mn":
        return (1, 0) if node.op == "m" else (0, 1)
    slopes = [arg.slopes for arg in args]
    match node.op, slopes:
        case "add", [(a, b), (c, d)]:
            return a + c, b + d
        case "sub", [(a, b), (c, d)]:
            return a - c, b - d
        case "neg", [(a, b)]:
            return -a, -b
        case "mul", [(a, b), (c, d)]:
            for place, (x, y) in zip(node.args, ((c, d), (a, b)), strict=True):
                value = nodes[place].value
                if nodes[place].op == "const_int" and value is not None:
                    return int(value) * x, int(value) * y
    return None


def _lines(by_m: int, by_n: int) -> Lines | None:
    if by_m == -by_n:
        return "diagonals" if by_m else None
    if by_n == 0:
        return "rows"
    return "columns" if by_m == 0 else "pairs"


def _joined(one: Lines | None, other: Lines | None) -> Lines | None:
    if one is None or other is None:
        return one or other
    return one if one == other else "pairs"
