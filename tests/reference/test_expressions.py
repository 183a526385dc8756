"""Expressions in plain torch: Python's integers, clamped loads, and covers of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.variants.drawn import EXTENTS, expressions, run
from tests.variants_catalogue import CATALOGUE, Sizes, Variant
from tilewise.reference import expressions as of_blocks
from tilewise.reference.blocks import Block
from tilewise.reference.programs import Cover, cover, visible
from tilewise.variants.expr import Expr, Graph, encode
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr
from tilewise.variants.rows import Kind
from tilewise.variants.trace import trace_mask
from tilewise.variants.values import as_mask

CPU = torch.device("cpu")
LIMIT = 2**63


def by_python(expr: Expr, at: dict[str, int]) -> Any:
    """The value for one pair by Python's own operators; None where 64 bits do not hold it."""
    values: list[Any] = []
    for node in expr.nodes:
        args = [values[arg] for arg in node.args]
        fold = None if node.op in at or node.value is not None else OPS[node.op].fold
        fold = int if node.op == "to_int" else fold
        if any(arg is None for arg in args):
            values.append(None)
        elif node.op in at:
            values.append(at[node.op])
        elif node.value is not None:
            values.append(node.value)
        elif node.op in ("shl", "shr"):
            good = 0 <= args[1] < 64
            values.append(
                (args[0] << args[1] if node.op == "shl" else args[0] >> args[1]) if good else None
            )
        elif node.op in ("floordiv", "mod") and args[1] == 0:
            values.append(None)
        else:
            assert fold is not None, node
            values.append(fold(*args))
        if isinstance(values[-1], int) and not -LIMIT <= values[-1] < LIMIT:
            values[-1] = None
    return values[expr.outputs[0]]


@given(data=st.data(), kind=st.sampled_from(("int", "bool")))
@settings(max_examples=200)
def test_integers_are_pythons(data: st.DataObject, kind: Kind) -> None:
    expr = data.draw(expressions(kind, floats=False))
    (found,) = run(expr, [])
    for _ in range(10):
        b, h, m, n = (data.draw(st.integers(0, size - 1)) for size in EXTENTS)
        at = {"b": b, "h": h, "m": m, "n": n, "M": EXTENTS.queries, "N": EXTENTS.keys}
        expected = by_python(expr, at)
        assert expected is None or found[b, h, m, n].item() == expected


EDGES = torch.tensor([-(2**63), -(2**63) + 1, -64, -3, -1, 0, 1, 2, 63, 64, 100, 2**63 - 1])


@pytest.mark.parametrize("op", [name for name, row in OPS.items() if "int" in row.forms])
def test_no_integer_traps(op: str) -> None:
    """Division by 0, the least integer by -1, shifts by too much: a value, and no error."""
    graph = Graph()
    args = [graph.load("int", 0, [graph.leaf(name)]) for name in "mn"]
    if op == "where":
        args.insert(0, graph.apply("lt", *args))
    expr = graph.expr(graph.apply(op, *args[: OPS[op].arity]))
    (found,) = run(expr, [EDGES], extents=EXTENTS._replace(queries=len(EDGES), keys=len(EDGES)))
    assert found.shape[-2:] == (len(EDGES), len(EDGES))
    fold = OPS[op].fold
    for i, first in enumerate(EDGES.tolist()):
        for j, second in enumerate(EDGES.tolist()):
            if fold is None or op == "where" or (op in ("floordiv", "mod") and second == 0):
                continue
            wanted = fold(*(first, second)[: OPS[op].arity])
            if -LIMIT <= wanted < LIMIT:
                assert found[0, 0, i, j].item() == wanted, (op, first, second)


def load(graph: Graph, kind: Any, *indices: int) -> Expr:
    return graph.expr(graph.load(kind, 0, indices))


def test_indices_are_moved_into_their_dimension() -> None:
    """The nearest element; negative ones do not wrap."""
    graph = Graph()
    m, n = graph.leaf("m"), graph.leaf("n")
    expr = load(graph, "int", graph.apply("sub", m, graph.constant(2)), n)
    table = torch.arange(12).view(4, 3)
    (found,) = run(expr, [table])
    for i in range(EXTENTS.queries):
        for j in range(EXTENTS.keys):
            assert found[0, 0, i, j] == table[min(max(i - 2, 0), 3), min(j, 2)]


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
def test_an_empty_tensor_gives_zero(kind: Any) -> None:
    graph = Graph()
    dtype = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}[kind]
    for shape in ((0,), (3, 0), (0, 3)):
        expr = load(graph, kind, *[graph.leaf("m")] * len(shape))
        (found,) = run(expr, [torch.ones(shape, dtype=dtype)], dtype=torch.float32)
        assert found.dtype == dtype
        assert not bool(found.any())


def test_any_rank_and_any_strides() -> None:
    """No dimension, six of them, and a view of another tensor."""
    graph = Graph()
    (found,) = run(load(graph, "float"), [torch.tensor(3.0)], dtype=torch.float32)
    assert found.dtype == torch.float32
    assert found.unique().tolist() == [3.0]
    b, h, m, n = (graph.leaf(name) for name in "bhmn")
    indices = [b, graph.constant(1), h, m, n, graph.constant(0)]
    table = torch.randn(2, 2, 3, 5, 7, 2).double()
    (found,) = run(load(graph, "float", *indices), [table])
    torch.testing.assert_close(found, table[:, 1, :, :, :, 0])
    turned = torch.randn(2, 7, 5, 2, 2, 3).double().permute(0, 3, 5, 2, 1, 4)
    (found,) = run(load(graph, "float", *indices), [turned])
    torch.testing.assert_close(found, turned[:, 1, :, :, :, 0])


def test_narrow_tensors_are_widened() -> None:
    """Integers of any width are 64 bits wide, floats of the type that is computed in."""
    graph = Graph()
    m = graph.leaf("m")
    place = graph.load("int", 0, [m])
    expr = graph.expr(graph.apply("mul", place, place), graph.load("float", 1, [m]))
    narrow = torch.full((5,), 100, dtype=torch.int8)
    product, half = run(expr, [narrow, torch.full((5,), 0.1, dtype=torch.bfloat16)])
    assert product.unique().tolist() == [10000]
    assert half.dtype == torch.float64


def whole(variant: Variant, sizes: Sizes) -> tuple[Instr, tuple[Tensor, ...]]:
    """The mask of a variant as one expression, nothing of it recognised."""
    mask = variant.make(sizes, torch.float32).mask
    assert mask is not None
    expr, captured = trace_mask(mask)
    return Instr("expr", (encode(expr),), tuple(range(len(captured)))), captured


def blocks(sizes: Sizes, size: int) -> list[Block]:
    return [
        Block(
            range(top, min(top + size, sizes.queries)),
            range(left, min(left + size, sizes.keys)),
            sizes.queries,
            sizes.keys,
            range(sizes.batch),
            range(sizes.heads),
        )
        for top in range(0, sizes.queries, size)
        for left in range(0, sizes.keys, size)
    ]


MASKED = [variant for variant in CATALOGUE if variant.mask is not None]


@pytest.mark.parametrize("variant", MASKED, ids=str)
def test_covers_of_expressions_are_sound(variant: Variant) -> None:
    """EMPTY shows nothing, FULL everything; and an expression shows what its program shows."""
    sizes = Sizes()
    made = variant.make(sizes, torch.float32)
    recognised = as_mask(made.mask)
    instr, captured = whole(variant, sizes)
    for block in blocks(sizes, 8):
        seen = visible((instr,), captured, block, CPU).expand(2, 4, -1, -1)
        found = cover((instr,), captured, block)
        if found is not Cover.PARTIAL:
            assert bool((seen == (found is Cover.FULL)).all())
        if all(op == "expr" or op in ("band", "and", "or", "not") for op, *_ in recognised.program):
            same = visible(recognised.program, recognised.captured, block, CPU)
            assert bool((seen == same).all())


# Masks of which interval arithmetic leaves no block undecided that shows nothing or all of it.
SHARP = {
    *("causal", "bottom-right", "window", "causal-window", "prefix", "lengths", "documents"),
    *("checkerboard", "blocks-below", "layout", "local-and-global"),
}


@pytest.mark.parametrize("variant", [v for v in MASKED if v.name in SHARP], ids=str)
def test_covers_of_expressions_are_sharp(variant: Variant) -> None:
    """For one batch item and head: the answer says more than it can of several."""
    sizes = Sizes(1, 1)
    instr, captured = whole(variant, sizes)
    for block in blocks(sizes, 8):
        seen = visible((instr,), captured, block, CPU)
        if bool(seen.all()) or not bool(seen.any()):
            assert cover((instr,), captured, block) is not Cover.PARTIAL


def covered(mask: Any, batches: range) -> Cover:
    """What 64 x 64 pairs of batch items show by a mask that is one expression."""
    expr, captured = trace_mask(mask)
    block = Block(range(64), range(64), 64, 64, batches, range(1))
    return cover((Instr("expr", (encode(expr),), (0,)),), captured, block)


def test_large_boxes_of_captured_tensors_are_not_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have to be looked at element by element counts as unknown."""
    ids = torch.zeros(1, 64, dtype=torch.int64)
    same: Any = lambda b, h, m, n: ids[b, m] == ids[b, n]  # noqa: E731
    assert covered(same, range(1)) is Cover.FULL
    monkeypatch.setattr(of_blocks, "_MOST_SCANNED", 63)
    assert covered(same, range(1)) is Cover.PARTIAL


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (range(1), Cover.EMPTY),
        (range(1, 2), Cover.FULL),
        (range(2), Cover.PARTIAL),
        (range(100), Cover.PARTIAL),
    ],
)
def test_batch_items_that_differ_make_a_block_partial(batches: range, expected: Cover) -> None:
    lengths = torch.tensor([0, 64])
    assert covered(lambda b, h, m, n: n < lengths[b], batches) is expected


def test_each_batch_item_is_looked_at_by_itself() -> None:
    """Two items with one document each, not the same one."""
    ids = torch.arange(2)[:, None].expand(2, 64)
    assert covered(lambda b, h, m, n: ids[b, m] == ids[b, n], range(2)) is Cover.FULL
