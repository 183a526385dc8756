"""Derivatives against torch's autograd, and that they cost what they should."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.variants.drawn import EXTENTS, SHAPES, Extents, expressions, program_of, quarters, run
from tilewise import attention
from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu import absence
from tilewise.reference.expressions import load_indices
from tilewise.variants.derive import Derivative, differentiate
from tilewise.variants.expr import Expr, Graph, encode, slot_of
from tilewise.variants.intervals import Interval, bounds
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind
from tilewise.variants.trace import trace_score
from tilewise.variants.values import Score

KINDS = ("float",) * len(SHAPES)


def scattered(
    derivative: Derivative, found: list[Tensor], loads: list[Tensor], s: Tensor
) -> list[Tensor]:
    """What the derivatives of a sum over all pairs say of each captured tensor."""
    nodes = derivative.expr.nodes
    totals = [torch.zeros_like(tensor) for tensor in loads]
    for place, by_load in zip(derivative.loads, found[2:], strict=True):
        slot = nodes[place].value
        assert isinstance(slot, int)
        if totals[slot].numel() == 0:
            continue
        indices = run(Expr(nodes, nodes[place].args), loads, s=s) if nodes[place].args else []
        clamped = load_indices(totals[slot], indices)
        if clamped:
            totals[slot].index_put_(clamped, by_load, accumulate=True)
        else:
            totals[slot] += by_load.sum()
    return totals


@given(expr=expressions("float", kinds=KINDS, with_s=True), seed=st.integers(0, 99))
@settings(max_examples=300)
def test_derivatives_are_those_of_autograd(expr: Expr, seed: int) -> None:
    """Through every operation, at kinks too, with respect to s and every captured tensor."""
    s = quarters(tuple(EXTENTS), seed)
    loads = [quarters(shape, seed + slot) for slot, shape in enumerate(SHAPES)]
    every = run(Expr(expr.nodes, tuple(range(len(expr.nodes)))), loads, s=s)
    floats = [value for value in every if value.is_floating_point()]
    assume(all(bool((value.abs() < 1e6).all()) for value in floats))
    leaves = [tensor.clone().requires_grad_() for tensor in (s, *loads)]
    (value,) = run(expr, leaves[1:], s=leaves[0])
    expected: tuple[Tensor, ...] = tuple(torch.zeros_like(leaf) for leaf in leaves)
    if value.requires_grad:
        expected = torch.autograd.grad(
            value.sum(), leaves, allow_unused=True, materialize_grads=True
        )
    assume(all(bool((grad.abs() < 1e6).all()) for grad in expected))
    derivative = differentiate(expr)
    found = run(derivative.expr, loads, s=s)
    torch.testing.assert_close(found[0], value.detach(), rtol=0, atol=0)
    torch.testing.assert_close(found[1], expected[0])
    torch.testing.assert_close(scattered(derivative, found, loads, s), expected[1:])


OF_FLOATS = {op: row for op, row in OPS.items() if "float" in row.forms and row.gives is None}
UNARY = {op: row.torch for op, row in OF_FLOATS.items() if row.arity == 1}
BINARY = {op: row.torch for op, row in OF_FLOATS.items() if row.arity == 2 and row.slope}
POINTS = torch.tensor([-2.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 2.0, 3.0]).double()


def at_points(expr: Expr, tables: list[Tensor]) -> list[Tensor]:
    """The results for every row m and key n of a square of points."""
    extents = Extents(1, 1, len(POINTS), len(POINTS))
    return [value[0, 0] for value in run(expr, tables, extents=extents)]


@pytest.mark.parametrize("name", UNARY)
def test_every_function_follows_torch_at_its_edges(name: str) -> None:
    """At 0, where the argument has no value, and at halves."""
    graph = Graph()
    expr = graph.expr(graph.apply(name, graph.load("float", 0, [graph.leaf("m")])))
    derivative = differentiate(expr)
    found = at_points(derivative.expr, [POINTS])
    x = POINTS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(UNARY[name](x).sum(), x)
    got = found[2][:, 0] if derivative.loads else torch.zeros_like(expected)
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert bool((found[1] == 0).all()), "it does not depend on s"


@pytest.mark.parametrize("fixed", [None, 0, 1], ids=["both", "a-constant", "b-constant"])
@pytest.mark.parametrize("name", BINARY)
def test_every_pair_follows_torch_at_its_edges(name: str, fixed: int | None) -> None:
    """Ties, zeros of either sign, powers of negatives; also with a constant on one side."""
    for constant in POINTS.tolist() if fixed is not None else [0.0]:
        graph = Graph()
        args = [graph.load("float", i, [graph.leaf(leaf)]) for i, leaf in enumerate("mn")]
        tables = [POINTS, POINTS]
        if fixed is not None:
            args[fixed] = graph.constant(constant)
            tables[fixed] = torch.full_like(POINTS, constant)
        expr = graph.expr(graph.apply(name, *args))
        derivative = differentiate(expr)
        found = at_points(derivative.expr, tables)
        a = tables[0][:, None].expand(-1, len(POINTS)).clone().requires_grad_()
        b = tables[1].expand(len(POINTS), -1).clone().requires_grad_()
        expected = torch.autograd.grad(BINARY[name](a, b).sum(), [a, b])
        slots = [derivative.expr.nodes[place].value for place in derivative.loads]
        got = dict(zip(slots, found[2:], strict=True))
        for slot in {0, 1} - {fixed}:
            ours = got.get(slot, torch.zeros_like(a))
            torch.testing.assert_close(ours, expected[slot], equal_nan=True)


@pytest.mark.parametrize("names", [("min", "max"), ("min",), ("max",)], ids=" and ".join)
def test_a_clamp_follows_torch_at_its_bounds(names: tuple[str, ...]) -> None:
    """Also where bounds are equal, or exchanged; but below equal ones torch gives ``min`` none."""
    tables = [POINTS.clone() for _ in ("x", *names)]
    expr, _ = trace_score(
        lambda s, b, h, m, n: tables[0][m].clamp(
            **{name: tables[at][(n, h)[at - 1]] for at, name in enumerate(names, 1)}
        )
    )
    derivative = differentiate(expr)
    found = run(derivative.expr, tables, extents=Extents(1, *[len(POINTS)] * 3))
    grids = torch.meshgrid(POINTS, POINTS, POINTS, indexing="ij")  # h, m, n
    x, *limits = (grids[at].clone().requires_grad_() for at in (1, 2, 0)[: len(tables)])
    due = x.clamp(**dict(zip(names, limits, strict=True)))
    expected = list(torch.autograd.grad(due.sum(), [x, *limits]))
    if len(limits) == 2:
        expected[1] += (x < limits[0]) & (limits[0] == limits[1])
    torch.testing.assert_close(found[0][0], due.detach(), rtol=0, atol=0)
    slots = [slot_of(derivative.expr.nodes[place]) for place in derivative.loads]
    assert sorted(slots) == list(range(len(tables)))
    for slot, got in zip(slots, found[2:], strict=True):
        torch.testing.assert_close(got[0], expected[slot], rtol=0, atol=0)


def test_floor_division_is_a_step() -> None:
    graph = Graph()
    x = graph.load("float", 0, [graph.leaf("m")])
    expr = graph.expr(graph.apply("floordiv", x, graph.leaf("s")))
    assert differentiate(expr) == Derivative(
        Expr((*expr.nodes, graph.nodes[graph.constant(0.0)]), (expr.outputs[0], len(expr.nodes))),
        (),
    )


def text_of_derivative(place: int, graph: Graph, output: int = 1) -> str:
    """One derivative's own text."""
    whole = differentiate(graph.expr(place)).expr
    alone = Graph()
    return encode(alone.expr(alone.include(whole)[output]))


def test_an_added_term_costs_nothing() -> None:
    graph = Graph()
    distance = graph.apply("to_float", graph.apply("sub", graph.leaf("m"), graph.leaf("n")))
    bias = graph.load("float", 0, [graph.leaf("h"), graph.leaf("n")])
    place = graph.apply("add", graph.leaf("s"), graph.apply("mul", bias, distance))
    assert text_of_derivative(place, graph) == "const_float:1.0"
    assert text_of_derivative(place, graph, 2) == "m;n;sub(0,1);to_float(2)"
    place = graph.apply("sub", graph.leaf("s"), bias)
    assert text_of_derivative(place, graph, 2) == "const_float:-1.0"


def test_constants_of_a_softcap_cancel() -> None:
    graph = Graph()
    cap = graph.constant(30.0)
    tanh = graph.apply("tanh", graph.apply("div", graph.leaf("s"), cap))
    expected = "const_float:1.0;s;const_float:30.0;div(1,2);tanh(3);mul(4,4);sub(0,5)"
    assert text_of_derivative(graph.apply("mul", cap, tanh), graph) == expected


def test_powers_with_constants_are_short() -> None:
    graph = Graph()
    s = graph.leaf("s")
    square = graph.apply("pow", s, graph.constant(2.0))
    assert text_of_derivative(square, graph) == "const_float:2.0;s;mul(0,1)"
    assert text_of_derivative(graph.apply("mul", s, s), graph) == "s;add(0,0)"


def test_opposite_shares_are_subtracted() -> None:
    graph = Graph()
    s = graph.leaf("s")
    tanh, sin = graph.apply("tanh", s), graph.apply("sin", s)
    x = torch.tensor(0.3).double()
    expected = float(1 - x.tanh() ** 2 - x.cos())
    for first, second, sign in ((tanh, sin, 1), (sin, tanh, -1)):
        derivative = differentiate(graph.expr(graph.apply("sub", first, second)))
        found = run(derivative.expr, [], s=x, extents=Extents(1, 1, 1, 1))
        assert float(found[1]) == pytest.approx(sign * expected)


def test_a_load_used_twice_is_one() -> None:
    """Equal loads are one; other indices or another slot make another."""
    graph = Graph()
    h, m, n = (graph.leaf(name) for name in "hmn")
    total = graph.leaf("s")
    for slot, index in ((0, m), (0, n), (0, m), (1, m), (1, h)):
        total = graph.apply("add", total, graph.load("float", slot, [index]))
    derivative = differentiate(graph.expr(total))
    loads = {derivative.expr.nodes[place] for place in derivative.loads}
    assert len(loads) == len(derivative.loads) == 4
    assert len(derivative.expr.outputs) == 2 + 4
    assert text_of_derivative(total, graph, 2) == "const_float:2.0"


def test_what_goes_through_integers_has_no_derivative() -> None:
    graph = Graph()
    x = graph.load("float", 0, [graph.leaf("m")])
    step = graph.apply("to_float", graph.apply("to_int", x))
    derivative = differentiate(graph.expr(graph.apply("add", graph.leaf("s"), step)))
    assert derivative.loads == ()


def test_deep_graphs_are_differentiated() -> None:
    """Without recursion, and the work grows with the number of nodes only."""
    graph = Graph()
    place = graph.leaf("s")
    for _ in range(5000):
        place = graph.apply("tanh", graph.apply("mul", place, place))
    assert len(differentiate(graph.expr(place)).expr.nodes) < 10 * 5000


def test_only_one_float_is_differentiated() -> None:
    graph = Graph()
    below = graph.apply("lt", graph.leaf("n"), graph.leaf("m"))
    for outputs in ((below,), (graph.leaf("n"),), (graph.leaf("s"), graph.leaf("s"))):
        with pytest.raises(InvalidArgument, match="one float"):
            differentiate(graph.expr(*outputs))


def test_derivatives_are_finite_where_the_factor_would_not_be() -> None:
    """A constant that is no number stays a node, and is never part of a factor."""
    graph = Graph()
    s = graph.leaf("s")
    for special in (0.0, -0.0, math.inf, math.nan):
        by = graph.apply("mul", s, graph.constant(special))
        one = torch.ones(()).double()
        got = run(differentiate(graph.expr(by)).expr, [], s=one, extents=Extents(1, 1, 1, 1))[1]
        torch.testing.assert_close(got.flatten(), torch.tensor([special]).double(), equal_nan=True)


# ---- Every operation of the language is known everywhere: what is missing has a name here.


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
    fix = f"the interval of its Form in operations.py gives {known}, and no Interval"
    assert isinstance(known, Interval) or op == "pow", fix  # pow may have any value
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
    torch.testing.assert_close(results[0], results[-1], rtol=1e-9, atol=1e-9)
