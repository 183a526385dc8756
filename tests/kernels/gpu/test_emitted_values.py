"""Values of emitted Triton functions, run in its interpreter, against the reference's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from tests import captured  # noqa: E402
from tests.kernels.gpu import emitted as run  # noqa: E402
from tests.kernels.gpu.emitted import Extents, emitted, problem  # noqa: E402
from tests.variants.calls import Call  # noqa: E402
from tests.variants.drawn import SHAPES, expressions  # noqa: E402
from tests.variants_catalogue import CATALOGUE, Sizes, Variant  # noqa: E402
from tilewise.reference.blocks import Block  # noqa: E402
from tilewise.reference.expressions import evaluate  # noqa: E402
from tilewise.reference.programs import apply_score, visible  # noqa: E402
from tilewise.variants.derive import differentiate  # noqa: E402
from tilewise.variants.expr import OPS, Expr, Graph, Kind, Node, encode  # noqa: E402
from tilewise.variants.lower import Extent, lower_mask, lower_score  # noqa: E402
from tilewise.variants.program import Instr, Program, fitted  # noqa: E402
from tilewise.variants.program import decode as program_of  # noqa: E402
from tilewise.variants.recognise import as_expression  # noqa: E402

_LEAST, _MOST = -(2**63), 2**63 - 1
_INTS = (_LEAST, _LEAST + 1, -(2**40), -65, -7, -2, -1, 0, 1, 2, 3, 8, 63, 64, 2**31, _MOST)
_FLOATS = tuple(
    value
    for size in (0.0, 1e-30, 3e-7, 0.1, 0.5, 0.59, 0.61, 1.0, 1.5, 2.5, 3.0, 9.3, 60.0, 87.0, 4e6)
    for value in (size, -size)
) + (2e30, -2e30, float("inf"), float("-inf"), float("nan"))
_TRUTHS = (False, True)
# Units in the last place of float32 by which the interpreter's values may be off.
_ULPS = {"exp": 2, "exp2": 1, "tanh": 2, "sigmoid": 3, "pow": 4, "rsqrt": 2, "mod": 1}


@pytest.fixture(autouse=True)
def _faithful() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, run.faithful(patch):
        yield


def _reference(
    expr: Expr,
    extents: Extents,
    loads: Sequence[Tensor],
    s: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The results for all pairs."""
    B, H, M, N = extents
    found = evaluate(
        expr,
        s=None if s is None else s.to(dtype),
        b=torch.arange(B)[:, None, None, None],
        h=torch.arange(H)[:, None, None],
        m=torch.arange(M)[:, None],
        n=torch.arange(N),
        queries=M,
        keys=N,
        loads=[each.detach() for each in loads],
        dtype=dtype,
    )
    return [value.expand(*extents) for value in found]


def _instruction(expr: Expr, loads: Sequence[Tensor]) -> tuple[Program, list[Tensor]]:
    """The program of an expression, and of the tensors those that are left after folding."""
    slots = sorted({int(node.value or 0) for node in expr.nodes if node.op.startswith("load_")})
    nodes = [
        Node(node.op, node.args, slots.index(int(node.value or 0)))
        if node.op.startswith("load_")
        else node
        for node in expr.nodes
    ]
    text = encode(Expr(tuple(nodes), expr.outputs))
    return (Instr("expr", (text,), tuple(range(len(slots)))),), [loads[slot] for slot in slots]


def _value(expr: Expr, kind: Kind, extents: Extents, loads: Sequence[Tensor], s: Any = 0.0) -> Any:
    """What the emitted function of an expression gives for all pairs.

    An integer is told from its value in two halves, which floats hold.
    """
    s = torch.as_tensor(s)
    if kind == "bool":
        mask, used = _instruction(expr, loads)
        function = emitted(problem(extents, mask), used).seen
        return run.seen(function, extents, used)
    score, used = _instruction(expr, loads)
    return run.scored(emitted(problem(extents, (), score), (), used).score, extents, used, s)


# ---- operations


def _places(kind: str) -> list[tuple[str, str]]:
    """By which positions the arguments are told: rows, columns and numbers in every mixture."""
    return [("m", "n"), ("n", "h"), ("h", "m"), ("h", "h")]


def _operation(op: str, kind: Kind, places: tuple[str, str]) -> Expr:
    """The operation on loads (``where`` has its condition first), its value told as a float."""
    graph = Graph()
    row = OPS[op]
    args = []
    if len(row.takes) == 3:
        parity = graph.apply("mod", graph.leaf(places[0]), graph.constant(3))
        args.append(graph.apply("lt", parity, graph.constant(1)))
    for slot, place in zip(range(min(len(row.takes), 2)), places, strict=False):
        args.append(graph.load(kind, slot, [graph.leaf(place)]))
    return graph.expr(graph.apply(op, *args[-len(row.takes) :]))


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if "i" in row.takes[-1]])
@pytest.mark.parametrize("places", _places("int"), ids="".join)
def test_integers(op: str, places: tuple[str, str]) -> None:
    """Bit for bit, where 64 bits wrap too: the result is compared with every value it may have."""
    extents = Extents(1, len(_INTS), len(_INTS), len(_INTS))
    loads = [torch.tensor(_INTS), torch.tensor(_INTS[::-1])]
    expr = _operation(op, "int", places)
    (expected,) = _reference(expr, extents, loads)
    if expected.dtype is not torch.int64:
        kind: Kind = "bool" if expected.dtype is torch.bool else "float"
        assert torch.equal(_value(expr, kind, extents, loads), expected)
        return
    same = Graph()
    (place,) = same.include(expr)
    wanted = same.load("int", 2, [same.leaf(leaf) for leaf in "bhmn"])
    found = _value(
        same.expr(same.apply("eq", place, wanted)), "bool", extents, [*loads, expected.contiguous()]
    )
    assert found.all(), (op, (~found).nonzero()[:5], expected[~found][:5])


@pytest.mark.parametrize("op", ["floordiv", "mod", "min", "max", "abs", "sign", "not", "shl", "shr"])
def test_narrow_integers(op: str) -> None:
    """The same in 32 bits: of positions, with divisors of either sign and none."""
    extents = Extents(1, 1, 23, 25)
    graph = Graph()
    first = graph.apply("sub", graph.leaf("m"), graph.constant(11))
    second = graph.apply("sub", graph.leaf("n"), graph.constant(0 if op[:2] == "sh" else 12))
    value = graph.apply(op, *(first, second)[: len(OPS[op].takes)])
    expr = graph.expr(graph.apply("to_float", value))
    (expected,) = _reference(expr, extents, [])
    assert torch.equal(_value(expr, "float", extents, []), expected)


@pytest.mark.parametrize("divisor", [1, 2, 6, 8, -1, -3, 0])
@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_constant_divisors(op: str, divisor: int) -> None:
    """Each of the short forms, for dividends of either sign."""
    extents = Extents(1, 1, 9, 20)
    graph = Graph()
    for first in (
        graph.leaf("n"),
        graph.apply("sub", graph.leaf("m"), graph.leaf("n")),
    ):
        expr = graph.expr(
            graph.apply("to_float", graph.apply(op, first, graph.constant(divisor)))
        )
        (expected,) = _reference(expr, extents, [])
        assert torch.equal(_value(expr, "float", extents, []), expected)


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if "b" in row.takes[-1]])
@pytest.mark.parametrize("places", _places("bool"), ids="".join)
def test_booleans(op: str, places: tuple[str, str]) -> None:
    extents = Extents(1, 2, 2, 2)
    loads = [torch.tensor(_TRUTHS), torch.tensor(_TRUTHS[::-1])]
    expr = _operation(op, "bool", places)
    if op == "to_int":
        graph = Graph()
        expr = graph.expr(graph.apply("to_float", graph.include(expr)[0]))
    (expected,) = _reference(expr, extents, loads)
    kind: Kind = "bool" if expected.dtype is torch.bool else "float"
    assert torch.equal(_value(expr, kind, extents, loads), expected)


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if "f" in row.takes[-1]])
@pytest.mark.parametrize("places", _places("float"), ids="".join)
def test_floats(op: str, places: tuple[str, str]) -> None:
    """Against the correctly rounded value, infinities and NaN included."""
    extents = Extents(1, len(_FLOATS), len(_FLOATS), len(_FLOATS))
    loads = [torch.tensor(_FLOATS), torch.tensor(_FLOATS[::-1])]
    expr = _operation(op, "float", places)
    if op == "to_int":
        graph = Graph()
        expr = graph.expr(graph.apply("to_float", graph.include(expr)[0]))
    (expected,) = _reference(expr, extents, loads, dtype=torch.float64)
    if expected.dtype is torch.bool:
        assert torch.equal(_value(expr, "bool", extents, loads), expected)
        return
    found = _value(expr, "float", extents, loads)
    if op in ("mod", "floordiv"):  # beyond 2**46 only the size of a remainder is known
        known = ~(expected.isfinite() & _is_far(loads, extents, places))
        expected, found = expected[known], found[known]
    _assert_ulps(found, expected, _ULPS.get(op, 1))


def _is_far(loads: Sequence[Tensor], extents: Extents, places: tuple[str, str]) -> Tensor:
    graph = Graph()
    args = [
        graph.load("float", slot, [graph.leaf(place)]) for slot, place in enumerate(places)
    ]
    far = graph.apply("lt", graph.constant(2.0**22), graph.apply("abs", graph.apply("div", *args)))
    (found,) = _reference(graph.expr(far), extents, loads, dtype=torch.float64)
    return found


def _assert_ulps(found: Tensor, expected: Tensor, ulps: float) -> None:
    """Float32 values next to float64 ones; what is below the normal numbers may be 0."""
    exact = expected.double().numpy()
    single = exact.astype(np.float32)
    got = found.numpy()
    assert np.array_equal(np.isnan(got), np.isnan(single)), "NaN"
    finite = np.isfinite(single) & np.isfinite(got)
    assert np.array_equal(got[~finite & ~np.isnan(got)], single[~finite & ~np.isnan(single)])
    allowed = ulps * np.spacing(np.abs(single[finite])) + 2.0**-125
    wrong = np.abs(got[finite].astype(np.float64) - exact[finite]) > allowed
    assert not wrong.any(), (got[finite][wrong][:5], single[finite][wrong][:5])
