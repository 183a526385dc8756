"""Operations and loads of emitted Triton functions against the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.gpu import emitted as run
from tests.kernels.gpu.emitted import emitted, problem, reference, value
from tests.variants.drawn import Extents
from tilewise.variants.expr import Expr, Graph
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind

_LEAST, _MOST = -(2**63), 2**63 - 1
_INTS = (_LEAST, _LEAST + 1, -(2**40), -65, -7, -2, -1, 0, 1, 2, 3, 8, 63, 64, 2**31, _MOST)
_SIZES = (0.0, 1e-30, 3e-7, 0.1, 0.5, 0.59, 0.61, 1.0, 1.5, 2.5, 3.0, 9.3, 60.0, 87.0, 4e6, 2e30)
_FLOATS = tuple(
    [sign * size for size in (*_SIZES, float("inf"), float("nan")) for sign in (1.0, -1.0)]
)
# By which positions arguments are told: rows, columns and numbers in every mixture.
_PLACES = (("m", "n"), ("n", "h"), ("h", "m"), ("h", "h"))
_HEADS, _HEAD_STEP = 5, 7


def _operation(op: str, kind: Kind, places: tuple[str, str]) -> Expr:
    """The operation on loads (``where`` has its condition before them)."""
    graph = Graph()
    count = OPS[op].arity
    at = {place: graph.leaf(place) for place in "hmn"}
    at["h"] = graph.apply("mul", at["h"], graph.constant(_HEAD_STEP))
    args = []
    if count == 3:
        parity = graph.apply("mod", at[places[0]], graph.constant(3))
        args.append(graph.apply("lt", parity, graph.constant(1)))
    args += [graph.load(kind, slot, [at[place]]) for slot, place in enumerate(places)]
    return graph.expr(graph.apply(op, *args[:count]))


def _as_float(expr: Expr) -> Expr:
    graph = Graph()
    return graph.expr(graph.apply("to_float", graph.include(expr)[0]))


def _tables(values: Sequence[Any]) -> tuple[Extents, list[Tensor]]:
    """Every value for both arguments."""
    tables = [torch.tensor(values), torch.tensor(values[::-1])]
    return Extents(1, _HEADS, len(values), len(values)), tables


def _taking(kind: Kind) -> list[str]:
    return [op for op, row in OPS.items() if kind in row.forms]


@pytest.mark.parametrize("op", _taking("int"))
@pytest.mark.parametrize("places", _PLACES, ids="".join)
def test_integers(op: str, places: tuple[str, str]) -> None:
    """Bit for bit, also where 64 bits wrap: the kernel compares them with what they should be."""
    extents, loads = _tables(_INTS)
    expr = _operation(op, "int", places)
    (expected,) = reference(expr, extents, loads)
    if expected.dtype is not torch.int64:
        assert torch.equal(value(expr, extents, loads), expected)
        return
    graph = Graph()
    (place,) = graph.include(expr)
    wanted = graph.load("int", 2, [graph.leaf(leaf) for leaf in "bhmn"])
    equal = graph.expr(graph.apply("eq", place, wanted))
    found = value(equal, extents, [*loads, expected.contiguous()])
    assert found.all(), ((~found).nonzero()[:5], expected[~found][:5])


_NARROW = ("add", "sub", "mul", "floordiv", "mod", "min", "max", "neg", "abs", "sign")


@pytest.mark.parametrize("op", [*_NARROW, "not", "and", "or", "xor", "shl", "shr"])
def test_narrow_integers(op: str) -> None:
    """The same in 32 bits: of positions, with divisors of either sign and none."""
    extents = Extents(1, 1, 23, 25)
    graph = Graph()
    first = graph.apply("sub", graph.leaf("m"), graph.constant(11))
    second = graph.apply("sub", graph.leaf("n"), graph.constant(0 if op[:2] == "sh" else 12))
    found = graph.apply(op, *(first, second)[: OPS[op].arity])
    expr = graph.expr(graph.apply("to_float", found))
    (expected,) = reference(expr, extents, [])
    assert torch.equal(value(expr, extents, []), expected)


@pytest.mark.parametrize("divisor", [1, 2, 6, 8, -1, -3, 0])
@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_constant_divisors(op: str, divisor: int) -> None:
    """Each of the short forms, for dividends of either sign."""
    extents = Extents(1, 1, 9, 20)
    graph = Graph()
    for first in (graph.leaf("n"), graph.apply("sub", graph.leaf("m"), graph.leaf("n"))):
        found = graph.apply(op, first, graph.constant(divisor))
        expr = graph.expr(graph.apply("to_float", found))
        (expected,) = reference(expr, extents, [])
        assert torch.equal(value(expr, extents, []), expected)


@pytest.mark.parametrize("op", _taking("bool"))
@pytest.mark.parametrize("places", _PLACES, ids="".join)
def test_booleans(op: str, places: tuple[str, str]) -> None:
    """Of both values, and of numbers joined with blocks."""
    extents, loads = _tables((False, True))
    expr = _operation(op, "bool", places)
    expr = _as_float(expr) if op == "to_int" else expr
    (expected,) = reference(expr, extents, loads)
    assert torch.equal(value(expr, extents, loads), expected)


@pytest.mark.parametrize("op", _taking("float"))
@pytest.mark.parametrize("places", _PLACES, ids="".join)
def test_floats(op: str, places: tuple[str, str]) -> None:
    """Against the correctly rounded value, infinities and NaN included."""
    extents, loads = _tables(_FLOATS)
    expr = _operation(op, "float", places)
    expr = _as_float(expr) if op == "to_int" else expr
    (expected,) = reference(expr, extents, loads, dtype=torch.float64)
    found = value(expr, extents, loads)
    if expected.dtype is torch.bool:
        assert torch.equal(found, expected)
        return
    if op == "mod":  # further than that only the size of a remainder is known
        known = ~(expected.isfinite() & _is_far(expr, extents, loads))
        expected, found = expected[known], found[known]
    _assert_ulps(found, expected, OPS[op].forms["float"].ulps)


def _is_far(expr: Expr, extents: Extents, loads: Sequence[Tensor]) -> Tensor:
    """Where the operation's first argument is many times the second."""
    graph = Graph()
    graph.include(expr)
    args = [place for place, node in enumerate(graph.nodes) if node.op == "load_float"]
    far = graph.apply("lt", graph.constant(2.0**46), graph.apply("abs", graph.apply("div", *args)))
    (found,) = reference(graph.expr(far), extents, loads, dtype=torch.float64)
    return found


def _assert_ulps(found: Tensor, expected: Tensor, ulps: float) -> None:
    """Float32 values next to float64 ones; what is below the normal numbers may be 0."""
    exact, single, got = expected.double().numpy(), expected.float().numpy(), found.numpy()
    assert np.array_equal(np.isnan(got), np.isnan(single)), "NaN"
    finite = np.isfinite(single) & np.isfinite(got)
    assert np.array_equal(got[~finite & ~np.isnan(got)], single[~finite & ~np.isnan(single)])
    allowed = ulps * np.spacing(np.abs(single[finite])) + 2.0**-125
    wrong = np.abs(got[finite].astype(np.float64) - exact[finite]) > allowed
    assert not wrong.any(), (got[finite][wrong][:5], single[finite][wrong][:5])


@pytest.mark.parametrize("op", ["exp", "exp2", "tanh", "sigmoid", "log", "log2"])
def test_functions_all_over(op: str) -> None:
    """Between the values above, near 0 and where results leave the range."""
    spread = torch.linspace(-110, 110, 4001, dtype=torch.float64).pow(3) / 110**2
    table = spread.abs() if op.startswith("log") else spread
    graph = Graph()
    place = graph.apply(
        "add", graph.leaf("n"), graph.apply("mul", graph.leaf("m"), graph.leaf("N"))
    )
    expr = graph.expr(graph.apply(op, graph.load("float", 0, [place])))
    extents, loads = Extents(1, 1, 63, 64), [table.float()]
    (expected,) = reference(expr, extents, loads, dtype=torch.float64)
    _assert_ulps(value(expr, extents, loads), expected, OPS[op].forms["float"].ulps)


def test_powers_all_over() -> None:
    """Of bases near 1 and far away, by exponents of all sizes."""
    generator = torch.Generator().manual_seed(1)
    bases = torch.cat([torch.randn(32, generator=generator).exp(), torch.logspace(-37, 37, 32)])
    exponents = torch.cat([torch.randn(32, generator=generator) * 3, torch.logspace(-3, 2, 32)])
    graph = Graph()
    args = [graph.load("float", slot, [graph.leaf(leaf)]) for slot, leaf in enumerate("mn")]
    expr = graph.expr(graph.apply("pow", *args))
    extents, loads = Extents(1, 1, 64, 64), [bases, exponents]
    (expected,) = reference(expr, extents, loads, dtype=torch.float64)
    _assert_ulps(value(expr, extents, loads), expected, OPS["pow"].forms["float"].ulps)


# ---- loads

_GENERATOR = torch.Generator().manual_seed(5)
_LOADED = (
    torch.tensor(2.5),
    torch.randn(4, generator=_GENERATOR),
    torch.randn(3, 8, generator=_GENERATOR)[:, ::2],
    torch.randn(4, 2, 3, generator=_GENERATOR).permute(2, 0, 1),
    torch.randn(1, 4, generator=_GENERATOR).expand(5, 4),
    torch.randn(4, 1, generator=_GENERATOR),
    torch.zeros(0),
    torch.zeros(3, 0),
    torch.randn(5, 2, generator=_GENERATOR).bfloat16(),
)


@pytest.mark.parametrize("table", _LOADED, ids=lambda table: str(list(table.shape)))
@pytest.mark.parametrize("kind", ["float", "int", "bool"])
def test_loads(table: Tensor, kind: Kind) -> None:
    """Of any rank and strides; an index outside reads the nearest element, of nothing 0."""
    extents = Extents(2, 2, 9, 11)
    tensor = table if kind == "float" else (table * 8).long() if kind == "int" else table > 0
    graph = Graph()
    away = graph.apply("sub", graph.leaf("n"), graph.leaf("m"))
    far = graph.apply("mul", away, graph.constant(2**40))
    expr = graph.expr(graph.load(kind, 0, [away, graph.leaf("n"), far][: table.dim()]))
    expr = _as_float(expr) if kind == "int" else expr
    (expected,) = reference(expr, extents, [tensor])
    assert torch.equal(value(expr, extents, [tensor]), expected)
    if kind == "float":
        _check_places(expr, extents, tensor)


def _check_places(expr: Expr, extents: Extents, tensor: Tensor) -> None:
    """The element that is said to be loaded is the one that was."""
    score, used = run.instruction(expr, [tensor])
    variant = emitted(problem(extents, (), score), (), used)
    assert variant.load_slots == (0,)
    assert len(variant.load_forms[0].outputs) == tensor.dim()
    place = run.scored(variant.load_indices[0], extents, used, torch.zeros(()), torch.int64)
    filled = tensor if tensor.numel() else tensor.new_zeros([1] * tensor.dim())
    (expected,) = reference(expr, extents, [tensor])
    assert torch.equal(filled.float().reshape(-1)[place], expected)


def test_loads_by_what_was_loaded() -> None:
    """A table of indices, and the score as an index."""
    extents = Extents(2, 2, 9, 11)
    graph = Graph()
    first = graph.load("int", 0, [graph.leaf("n")])
    second = graph.apply("to_int", graph.leaf("s"))
    expr = graph.expr(graph.load("float", 1, [first, second]))
    generator = torch.Generator().manual_seed(3)
    loads = [torch.arange(11).flip(0), torch.randn(6, 7, generator=generator)]
    s = torch.randn(*extents, generator=generator) * 5
    (expected,) = reference(expr, extents, loads, s)
    assert torch.equal(value(expr, extents, loads, s), expected)
