"""Compiled expressions against the interpreter and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS
from tests.kernels.cpu.expressed import case_of, check, needs_compiler
from tests.kernels.cpu.test_expressions import ENDS, PACKED, VARIANTS, variant
from tests.kernels.targets import CPU_TARGETS, Target, only_cpu
from tests.kernels.test_catalogue import test_a_variant_is_exact as exact
from tests.kernels.test_catalogue import test_over_several_tiles as over_several_tiles
from tests.kernels.test_threads import check_threads
from tests.variants_catalogue import CATALOGUE, Variant
from tilewise import masks
from tilewise.kernels.cpu import compiled
from tilewise.variants.expr import Graph, encode
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr
from tilewise.variants.values import Score

# Of 16-bit operands, tanh is the worst.
_CLOSE = {torch.float32: 5e-7, torch.float64: 1e-14, torch.bfloat16: 4e-5}

NATIVE = CPU_TARGETS[:1]


def _every_op(wide: bool, half: int) -> tuple[Score, int]:
    """A score whose key says which operation it is the value of, and the number of operations.

    Of every second one: an expression has no room for all of them.

    Arguments come from tables, special values among them.
    """
    graph = Graph()
    m, n, s = graph.leaf("m"), graph.leaf("n"), graph.leaf("s")
    # Of query and key, so that nothing but compiled code computes it.
    both = graph.apply("add", m, graph.apply("mul", n, graph.constant(2)))
    at = [graph.apply("mod", both, graph.constant(size)) for size in (13, 7, 2)]
    real = [graph.load("float", 0, [at[0]]), graph.load("float", 1, [graph.apply("add", at[1], n)])]
    real[1] = graph.apply("add", real[1], graph.apply("mul", s, graph.constant(1e-3)))
    whole = [graph.load("int", 2, [at[0]]), graph.load("int", 3, [graph.apply("sub", n, at[1])])]
    truth = [graph.load("bool", 4, [at[2]]), graph.apply("lt", real[1], graph.constant(0.1))]
    by_kind = {"float": real, "int": whole, "bool": truth}
    found = []
    for name, op in OPS.items():
        for kind in op.forms:
            args = [by_kind[kind][i % 2] for i in range(op.arity)]
            if name == "where":
                args = [truth[1], *args[1:]]
            if name in ("shl", "shr"):
                args[1] = graph.apply("mod", args[1], graph.constant(9))
            if name in ("floordiv", "mod") and kind == "int":
                args[1] = graph.apply("max", args[1], graph.constant(1))
                found.append(graph.apply(name, args[0], graph.constant(4)))
                found.append(graph.apply(name, args[0], graph.constant(-3)))
            if name in ("eq", "ne") and kind == "float":
                args = [graph.apply("floor", real[1]), graph.constant(1.0)]
            if name == "to_int" and kind == "float":
                args[0] = graph.apply("tanh", graph.apply("min", s, graph.constant(2.0)))
            found.append(graph.apply(name, *args))
    # Quotients by constants, exact ones among them, and powers.
    for number in (7.0, -0.3, 1e-30):
        found.append(graph.apply("div", real[0], graph.constant(number)))
        found.append(graph.apply("tanh", graph.apply("div", real[1], graph.constant(number))))
    powers = (2.0, 3.0, -2.0, -0.5, 1.7)
    found += [graph.apply("pow", real[1], graph.constant(number)) for number in powers]
    seventh = graph.apply("div", graph.apply("to_float", whole[0]), graph.constant(7.0))
    found.append(graph.apply("floor", seventh))
    found = found[half::2]
    value = graph.constant(0.5)
    which = graph.apply("mod", n, graph.constant(len(found)))
    for number, node in enumerate(found):
        kind = graph.kinds[node]
        cast = node if kind == "float" else graph.apply("to_float", node)
        value = graph.apply("where", graph.apply("eq", which, graph.constant(number)), cast, value)
    inf = torch.inf
    large = 2**40 if wide else 1000
    tables = (
        torch.tensor(
            [0.0, -0.0, inf, -inf, torch.nan, 1e-40, 3e38, -2.5, 0.5, 1.5, 1.0, 7.25, -1e6]
        ),
        torch.linspace(-3, 3, 400),
        torch.tensor([0, 1, -1, 7, -7, 64, -64, large, -large, 3, 5, 2, -2]),
        torch.arange(400) % 11 - 5,
        torch.tensor([True, False]),
    )
    text = encode(graph.expr(value))
    return Score((Instr("expr", (text,), tuple(range(5))),), tables), len(found)


def _diagonal(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For attention in which row m sees the key m alone: lse is that pair's score."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 1, count, 4, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, False),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.float64, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=() if target.rank == 0 else (pytest.mark.slow,))
        for target in CPU_TARGETS
    ],
    ids=str,
    indirect=True,
)
def test_every_operation(
    target: Target, here: Path, dtype: torch.dtype, wide: bool, half: int
) -> None:
    """What the interpreter says of each operation and of special values, compiled code says too."""
    score, count = _every_op(wide, half)
    score = Score(
        score.program,
        tuple(
            t.to(torch.float64) if t.dtype == torch.float32 and dtype is torch.float64 else t
            for t in score.captured
        ),
    )
    assert count % 13 != 0
    x = _diagonal(26 * count + 5, dtype)

    # Ids that are captured: without them the call, some of whose indices are clamped, was refused.
    mask = masks.window(0, 0) & masks.document(torch.zeros(x[0].shape[2], dtype=torch.int64))

    def lse() -> Tensor:
        found = tilewise.attention(*x, score=score, mask=mask, backend="cpu", return_lse=True)
        assert found.lse is not None
        return found.lse

    expected = lse()
    with compiled.compiling():
        got = lse()
    assert expected.isfinite().float().mean() > 0.7
    torch.testing.assert_close(got, expected, rtol=_CLOSE[dtype], atol=0, equal_nan=True)


@pytest.fixture
def compiling(here: Path) -> Iterator[None]:
    """Every expression is compiled: one that is not would warn, which is an error in tests."""
    with compiled.compiling():
        yield


@needs_compiler
def test_trains(compiling: None) -> None:
    """Forward, backward and the gradients of loads of a masked score, by compiled code."""
    check(variant("parted", torch.float32))


def _pairs() -> list[Any]:
    return [
        pytest.param(target, name, dtype, id=f"{target}-{name}-{dtype}")
        for target in CPU_TARGETS
        for i, name in enumerate(VARIANTS)
        for j, dtype in enumerate(FLOATS)
        if target.rank == 0 or (i + j) % 4 == target.rank
    ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("target", "name", "dtype"), _pairs(), indirect=["target"])
def test_exact(target: Target, compiling: None, name: str, dtype: torch.dtype) -> None:
    """The contract, dense and packed, and the bits on two threads."""
    check(variant(name, dtype))
    check(variant(name, dtype, **PACKED))
    check_threads(variant(name, dtype), (1, 2))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@only_cpu
def test_sums(target: Target, compiling: None, name: str, dtype: torch.dtype) -> None:
    """Scores that are scaled late, that are the lowest there are, and that hide pairs."""
    check(case_of(name, lambda _: ENDS[name], dtype=dtype))


@needs_compiler
@pytest.mark.slow
@only_cpu
def test_sizes(target: Target, compiling: None) -> None:
    """One row, no row, no key, tails of pieces, and dropout."""
    for queries, keys in ((1, 1), (0, 5), (3, 0), (64, 16), (65, 129), (33, 15)):
        check(variant("relative", torch.float32, queries=queries, keys=keys))
    check(variant("relative", torch.float32, dropout_p=0.3))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", CATALOGUE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("target", NATIVE, ids=str, indirect=True)
def test_the_catalogue(
    target: Target, compiling: None, variant: Variant, dtype: torch.dtype
) -> None:
    """What people write: the contract, and in float64 plain torch, over several tiles."""
    if dtype is torch.float64:
        over_several_tiles(target, variant)
    else:
        exact(target, variant, dtype)
