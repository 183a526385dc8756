"""Every operation of the language is known everywhere: what is missing has a name here."""

from __future__ import annotations

import pytest
import torch

from tests.variants.drawn import program_of
from tilewise import attention
from tilewise.kernels.cpu.core import absence
from tilewise.variants.derive import differentiate
from tilewise.variants.expr import Graph
from tilewise.variants.intervals import Interval, bounds
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind
from tilewise.variants.values import Score

M, N = 9, 21
BOX = {"m": Interval(0, M - 1), "n": Interval(0, N - 1)}
SAME = {("to_int", "int"), ("to_float", "float")}  # they are left out of an expression
FORMS = [(op, x) for op, row in OPS.items() for x in row.forms if (op, x) not in SAME]


def _argument(graph: Graph, place: int, kind: Kind) -> int:
    """Something that differs from pair to pair, and is above 0 where it is a float."""
    number = graph.apply("add", graph.leaf("m"), graph.constant(place + 1))
    number = graph.apply("sub", graph.apply("mul", number, graph.constant(3)), graph.leaf("n"))
    if kind == "int" and place:  # a divisor is not 0
        rest = graph.apply("mod", number, graph.constant(5))
        return graph.apply("add", rest, graph.constant(1))
    if kind == "int":
        return number
    if kind == "bool":
        return graph.apply("lt", number, graph.constant(4 + place))
    s = graph.apply("mul", graph.leaf("s"), graph.constant(0.25))
    near = graph.apply("add", s, graph.apply("to_float", graph.apply("abs", number)))
    return graph.apply("add", near, graph.constant(1.5 + place))


def expression(op: str, kind: Kind) -> Graph:
    """The operation's value as a change of the score; the last place is the result."""
    graph = Graph()
    takes = ["bool", kind, kind] if op == "where" else [kind] * OPS[op].arity
    found = graph.apply(op, *(_argument(graph, place, each) for place, each in enumerate(takes)))
    # Small: exponentials of what a pair has would hide everything else.
    scaled = graph.apply("mul", graph.apply("to_float", found), graph.constant(0.01))
    graph.apply("add", graph.leaf("s"), graph.apply("sigmoid", scaled))
    return graph


@pytest.mark.parametrize(("op", "kind"), FORMS)
def test_an_operation_is_known_by_the_reference_the_core_and_the_derivative(
    op: str, kind: Kind
) -> None:
    graph = expression(op, kind)
    expr = graph.expr(len(graph.nodes) - 1)
    assert any(node.op == op for node in expr.nodes)
    assert len(differentiate(expr).expr.outputs) == 2
    known = bounds(expr, {**BOX, "s": Interval(-2.0, 2.0)})
    assert isinstance(known, Interval) or op == "pow"  # which may have any value
    score = Score(program_of(expr))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for rows in (M, N, N)
    )
    results = []
    for backend in ["tiled"] if absence() else ["tiled", "cpu"]:
        out = attention(q, k, v, score=score, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for mine, theirs in zip(results[0], results[-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
