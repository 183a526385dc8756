"""The model's exact count against what the references write down while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tests.cases import Case, Inputs, build
from tests.oracle import problem_of
from tests.orders.backward import (
    backward_by_tiles,
    backward_in_turns,
    backward_keys_outside,
)
from tests.orders.forward import forward_in_parts, forward_keys_outside
from tests.orders.ledger import Ledger
from tests.paged import in_pages, paged_problem_of, sequences_of
from tilewise.plan.traffic import Traffic, visits_of
from tilewise.plan.traffic import tiled as model
from tilewise.plan.traffic.visits import Visits
from tilewise.problem import Needs, Operands, Problem
from tilewise.reference import tiled, tiles
from tilewise.reference.blocks import Walk
from tilewise.serving.pages import quantised
from tilewise.variants.lower import Extent, lower_mask

MASKS: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("causal_top",),
    ("window",),
    ("window_left",),
    ("prefix",),
    ("causal", "prefix", "and"),
    ("lengths",),
    ("document",),
    ("document_each", "causal", "and"),
    ("bool",),
    ("bool_keys",),
    ("nothing",),
    ("window", "not"),
)
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
SMALL = settings(max_examples=25)


@pytest.fixture(autouse=True)
def small_products() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_WHOLE", 8)
        yield


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Small problems of odd sizes, with groups, masks and sequences."""
    length = st.integers(0, 45)
    kv_heads = draw(st.integers(1, 2))
    return Case(
        "counted",
        batch=draw(st.integers(0, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        queries=draw(length),
        keys=draw(length),
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(FLOATS)),
        mask=draw(st.sampled_from(MASKS)),
        score=draw(st.sampled_from(((), ("softcap",), ("alibi",), ("bias",), ("bias_keys",)))),
        dropout_p=draw(st.sampled_from((0.0, 0.3))),
        sequences=draw(st.none() | st.lists(st.tuples(length, length), max_size=3).map(tuple)),
    )


TILES = st.tuples(st.integers(1, 50), st.integers(1, 50))


def in_pages_of(
    problem: Problem,
    operands: Operands,
    inputs: Inputs,
    page_size: int,
    stored: torch.dtype | None = None,
) -> tuple[Problem, Operands]:
    """A packed problem with its keys and values in pages, perhaps of 8 bits."""
    paged = in_pages(*sequences_of(inputs), page_size)
    if stored is not None:
        (k, k_scale), (v, v_scale) = (quantised(pool, stored) for pool in paged[:2])
        paged = paged._replace(k_pages=k, v_pages=v)
        operands = operands._replace(k_scale=k_scale, v_scale=v_scale)
    return paged_problem_of(problem._replace(stored=stored), operands, paged)


def assert_counted(traffic: Traffic, walk: Walk) -> None:
    """Each operand's bytes, the operations and the exponentials."""
    ledger = walk.ledger
    assert ledger is not None
    said = {each.name: (each.read, each.written) for each in traffic.operands}
    names = {*ledger.read, *ledger.written}
    seen = {name: (ledger.read[name], ledger.written[name]) for name in names}
    assert said == {name: moved for name, moved in seen.items() if moved != (0, 0)}
    assert traffic.flops == ledger.flops
    assert traffic.exponentials == ledger.exponentials


def assert_forward_counted(problem: Problem, operands: Operands, tile: tuple[int, int]) -> Visits:
    """Those of the forward pass with queries outside; the visits of its tiles."""
    walk = Walk(*tile, Ledger())
    tiled.forward(problem, operands, walk=walk)
    visited = visits_of(problem, tile, operands, together=True)
    assert_counted(model.forward(problem, visited), walk)
    return visited


def prepared(case: Case, tile: tuple[int, int]) -> tuple[Problem, Operands, Walk, Visits]:
    problem, operands = problem_of(build(case).detached())
    walk = Walk(*tile, Ledger())
    return problem, operands, walk, visits_of(problem, tile, operands, together=True)


@given(case=drawn_cases(), tile=TILES, sinks=st.booleans(), wanted=st.sampled_from(("", "top1")))
@SMALL
def test_forward(case: Case, tile: tuple[int, int], sinks: bool, wanted: Any) -> None:
    problem, operands, walk, visited = prepared(replace(case, sinks=sinks), tile)
    tiled.forward(problem, operands, wanted, walk)
    assert_counted(model.forward(problem, visited, wanted), walk)


@given(case=drawn_cases(), tile=TILES, lse=st.booleans())
@SMALL
def test_backward_with_queries_outside(case: Case, tile: tuple[int, int], lse: bool) -> None:
    problem, operands, walk, visited = prepared(case, tile)
    result = tiled.forward(problem, operands)
    grad_lse = torch.ones_like(result.lse) if lse else None
    needs = Needs(True, True, True, (False,) * len(operands.score_tensors))
    grad_out = torch.ones_like(result.out)
    tiled.backward(problem, operands, result, grad_out, grad_lse, needs, walk=walk)
    assert_counted(model.backward_rows_outside(problem, visited, lse), walk)


def close(case: Case, got: Any, expected: Any) -> None:
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-11}.get(case.dtype, 0.05)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", [backward_by_tiles, backward_in_turns])
@given(case=drawn_cases(), tile=TILES)
@SMALL
def test_backward_by_tiles(order: Callable[..., Any], case: Case, tile: tuple[int, int]) -> None:
    problem, operands, walk, visited = prepared(case, tile)
    result = tiled.forward(problem, operands)
    grad_out = torch.ones_like(result.out)
    grads = order(problem, operands, result, grad_out, walk)
    assert_counted(getattr(model, order.__name__)(problem, visited), walk)
    needs = Needs(True, True, True, (False,) * len(operands.score_tensors))
    expected = tiled.backward(problem, operands, result, grad_out, None, needs)
    close(case, grads[:3], expected[:3])


@given(
    case=drawn_cases(),
    tile=TILES,
    delta=st.sampled_from(("pass", "first", "each")),
    partial=st.sampled_from((None, torch.float32)),
)
@SMALL
def test_backward_with_keys_outside(
    case: Case, tile: tuple[int, int], delta: Any, partial: torch.dtype | None
) -> None:
    problem, operands, walk, visited = prepared(case, tile)
    result = tiled.forward(problem, operands)
    grad_out = torch.ones_like(result.out)
    grads = backward_keys_outside(problem, operands, result, grad_out, walk, partial, delta)
    size = None if partial is None else partial.itemsize
    assert_counted(model.backward_keys_outside(problem, visited, size, delta), walk)
    if case.dtype != torch.float64:
        needs = Needs(True, True, True, (False,) * len(operands.score_tensors))
        expected = tiled.backward(problem, operands, result, grad_out, None, needs)
        close(case, grads[:3], expected[:3])


@given(case=drawn_cases(), tile=TILES, narrow=st.booleans())
@SMALL
def test_forward_with_keys_outside(case: Case, tile: tuple[int, int], narrow: bool) -> None:
    problem, operands, walk, visited = prepared(case, tile)
    partial = problem.dtype if narrow else None
    out, stats = forward_keys_outside(problem, operands, walk, partial)
    size = problem.dtype.itemsize if narrow else None
    assert_counted(model.forward_keys_outside(problem, visited, size), walk)
    expected = tiled.forward(problem, operands)
    close(case, out, expected.out)
    torch.testing.assert_close(stats[1] == 0, expected.stats[1] == 0)


@given(case=drawn_cases(), tile=TILES, parts=st.integers(1, 3), shared=st.booleans())
@SMALL
def test_forward_in_parts(case: Case, tile: tuple[int, int], parts: int, shared: bool) -> None:
    problem, operands, walk, visited = prepared(case, tile)
    shared = shared and case.sequences is None and case.queries <= tile[0]
    out, lse = forward_in_parts(problem, operands, walk, parts * tile[1], shared)
    said = model.forward_in_parts(problem, visited, parts * tile[1], shared)
    assert_counted(said, walk)
    expected = tiled.forward(problem, operands)
    close(case, out, expected.out)
    close(case, lse, expected.lse)


SEQUENCES = st.lists(st.tuples(st.integers(0, 45), st.integers(0, 45)), min_size=1, max_size=3).map(
    tuple
)


@given(
    case=drawn_cases(),
    sequences=SEQUENCES,
    tile=TILES,
    page_size=st.integers(1, 20),
    split=st.integers(0, 3),
    stored=st.sampled_from((None, torch.int8, torch.float8_e4m3fn)),
)
@SMALL
def test_block_tables(
    case: Case,
    sequences: Any,
    tile: tuple[int, int],
    page_size: int,
    split: int,
    stored: torch.dtype | None,
) -> None:
    """Keys in pages: each visited tile looks up the pages that it touches.

    In 8 bits a number has one byte, and each row a scale of four.
    """
    inputs = build(replace(case, sequences=sequences)).detached()
    packed = problem_of(inputs)
    problem, operands = in_pages_of(*packed, inputs, page_size, stored)
    if split:
        walk, visited = Walk(*tile, Ledger()), visits_of(problem, tile, operands, together=True)
        forward_in_parts(problem, operands, walk, split * tile[1])
        assert_counted(model.forward_in_parts(problem, visited, split * tile[1]), walk)
    else:
        visited = assert_forward_counted(problem, operands, tile)
    without = visits_of(packed[0], tile, packed[1], together=True)
    assert visited._replace(pages=0) == without
    least = visited.tiles * -(-tile[1] // page_size) if page_size < tile[1] else visited.tiles
    assert (visited.pages > 0) == (visited.tiles > 0)
    assert visited.pages <= visited.keys_walked
    if all(keys % tile[1] == 0 for _, keys in sequences):
        assert visited.pages >= least


def test_a_group_that_walks_together_looks_pages_up_together() -> None:
    case = Case("pages", heads=4, kv_heads=2, sequences=((1, 40), (1, 33)))
    inputs = build(case).detached()
    problem, operands = in_pages_of(*problem_of(inputs), inputs, 16)
    read = []
    for shared in (False, True):
        walk = Walk(4, 16, Ledger())
        assert walk.ledger is not None
        forward_in_parts(problem, operands, walk, 16, shared)
        visited = visits_of(problem, (4, 16), operands, together=True)
        assert_counted(model.forward_in_parts(problem, visited, 16, shared), walk)
        read.append(walk.ledger.read["block_table"])
    assert read == [4 * 4 * (3 + 3), 2 * 4 * (3 + 3)]


@given(case=drawn_cases(), tile=TILES)
@SMALL
def test_eight_bits(case: Case, tile: tuple[int, int]) -> None:
    """float8 is read a byte a number, and its output has two."""
    plain = replace(case, dtype=torch.float32, score=())
    problem, operands = problem_of(build(plain).detached())
    eight = [x.to(torch.float8_e4m3fn) for x in operands[:3]]
    operands = operands._replace(q=eight[0], k=eight[1], v=eight[2])
    assert_forward_counted(problem._replace(dtype=torch.float8_e4m3fn), operands, tile)


@given(
    queries=st.integers(1, 60),
    keys=st.integers(1, 60),
    block=st.sampled_from(((4, 8), (7, 5))),
    times=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    odd=st.booleans(),
    word=st.sampled_from(("causal", "window", "document_each", "bool", "nothing")),
)
@SMALL
def test_block_masks(queries: int, keys: int, block: Any, times: Any, odd: bool, word: str) -> None:
    """Tables whose tiles fit into the walk's, and others."""
    case = Case("table", heads=4, kv_heads=2, queries=queries, keys=keys, head_dim=4, value_dim=4)
    inputs = build(replace(case, mask=(word,))).detached()
    plain, operands = problem_of(inputs)
    assert inputs.mask is not None
    mask = tilewise.BlockMask.of(inputs.mask, queries, keys, batch=2, heads=4, block=block)
    extent = Extent(2, 4, queries, keys)
    lowered = lower_mask(mask.program, mask.captured, extent, operands.q.device)
    problem = plain._replace(mask=mask.program)
    operands = operands._replace(mask_tensors=lowered)
    tile = (block[0] * times[0] + odd, block[1] * times[1])
    visited = assert_forward_counted(problem, operands, tile)
    apart = visits_of(problem, tile, operands)
    assert apart.pairs <= visited.pairs


@pytest.mark.parametrize("tile", [(8, 16), (16, 16), (5, 9)])
def test_a_table_of_sequences(tile: tuple[int, int]) -> None:
    """Of a variable-length call: each sequence has its own piece of the table."""
    case = Case("ragged", sequences=((20, 31), (0, 4), (37, 17)), mask=("document_each",))
    inputs = build(case).detached()
    assert inputs.mask is not None
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    mask = tilewise.BlockMask.of(inputs.mask, block=(8, 16), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    plain, operands = problem_of(inputs)
    problem = plain._replace(mask=mask.program)
    operands = operands._replace(mask_tensors=mask.captured)
    assert assert_forward_counted(problem, operands, tile).density < 1


def test_a_table_of_heads_counts_each_head() -> None:
    """Head 0 sees everything and head 1 nothing: half the pairs, though the union is all."""
    layout = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    layout[:, 1] = False
    mask = tilewise.BlockMask.from_layout(layout, (8, 8))
    case = Case("heads", batch=3, queries=32, keys=32)
    plain, operands = problem_of(build(case).detached())
    problem = plain._replace(mask=mask.program)
    operands = operands._replace(mask_tensors=mask.captured)
    assert visits_of(problem, (8, 8), operands).density == 0.5
    assert visits_of(problem, (8, 8), operands, together=True).density == 1.0


def test_counting_changes_no_bit() -> None:
    case = Case("bits", queries=70, keys=50, mask=("causal",), sinks=True)
    problem, operands = problem_of(build(case).detached())
    walks = (None, Walk(ledger=Ledger()))
    first, second = (tiled.forward(problem, operands, "top1", walk) for walk in walks)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)
