"""Intervals hold every value, and are sharp where kernels need them to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.variants.drawn import SHAPES, expressions
from tilewise.reference.expressions import evaluate
from tilewise.variants import float_intervals
from tilewise.variants.expr import Expr, Graph
from tilewise.variants.intervals import EVERY_INT, Bounds, Interval, bounds, every_bound
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Kind
from tilewise.variants.trace import trace_mask

KINDS = ("float", "int", "bool", "int", "float", "int")


def held(kind: str, shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-9, 10, tuple(shape), generator=generator)
    if kind == "bool":
        return numbers > 0
    return numbers if kind == "int" else numbers.double() / 4


def extremes_of(tensors: Sequence[Tensor]) -> Callable[[int, Sequence[Interval]], Bounds]:
    """What is in a box of a tensor, found the plain way."""

    def extremes(slot: int, indices: Sequence[Interval]) -> Bounds:
        tensor = tensors[slot]
        if tensor.numel() == 0:
            return False if tensor.dtype == torch.bool else Interval(0, 0)
        for dim, index in enumerate(indices):
            low, high = (min(max(int(end), 0), tensor.shape[dim] - 1) for end in index)
            tensor = tensor.narrow(dim, low, high - low + 1)
        if tensor.dtype == torch.bool:
            return bool(tensor.any()) if bool(tensor.all()) == bool(tensor.any()) else None
        return Interval(tensor.min().item(), tensor.max().item())

    return extremes


def values(
    expr: Expr, box: dict[str, range], tensors: Sequence[Tensor], dtype: Any
) -> list[Tensor]:
    """Of every node, on the whole box."""

    def along(span: range, dim: int) -> Tensor:
        return torch.arange(span.start, span.stop).view([-1 if i == dim else 1 for i in range(4)])

    return evaluate(
        expr._replace(outputs=tuple(range(len(expr.nodes)))),
        s=None,
        **{leaf: along(box[leaf], dim) for dim, leaf in enumerate("bhmn")},
        queries=50,
        keys=70,
        loads=tensors,
        dtype=dtype,
    )


def of_box(box: dict[str, range]) -> dict[str, Interval]:
    ranges = {leaf: Interval(span.start, span.stop - 1) for leaf, span in box.items()}
    return {**ranges, "M": Interval(50, 50), "N": Interval(70, 70)}


SPANS = st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda x: range(x[0], x[0] + x[1]))


def assert_inside(found: Bounds, got: Tensor) -> None:
    if got.dtype == torch.bool:
        assert found is None or set(got.flatten().tolist()) == {found}, (found, got)
        return
    if found is None:
        return
    assert isinstance(found, Interval), found
    low, high = got.min().item(), got.max().item()
    assert found.low <= low <= high <= found.high, (found, low, high)


@given(data=st.data(), kind=st.sampled_from(("bool", "int", "float")), seed=st.integers(0, 9))
@settings(max_examples=80)
def test_every_value_is_inside(data: st.DataObject, kind: Kind, seed: int) -> None:
    """Of each node of random expressions on random boxes, in float32 and in float64."""
    check_every_value(data, kind, seed)


@pytest.mark.slow
@given(data=st.data(), kind=st.sampled_from(("bool", "int", "float")), seed=st.integers(0, 9))
@settings(max_examples=1000)
def test_every_value_of_many_is_inside(data: st.DataObject, kind: Kind, seed: int) -> None:
    check_every_value(data, kind, seed)


def check_every_value(data: st.DataObject, kind: Kind, seed: int) -> None:
    expr = data.draw(expressions(kind, kinds=KINDS))
    box = {leaf: data.draw(SPANS) for leaf in "bhmn"}
    tensors = [held(*of, seed + i) for i, of in enumerate(zip(KINDS, SHAPES, strict=True))]
    found = every_bound(expr, of_box(box), extremes_of(tensors))
    assert found[expr.outputs[0]] == bounds(expr, of_box(box), extremes_of(tensors))
    for dtype in (torch.float32, torch.float64):
        for known, got in zip(found, values(expr, box, tensors, dtype), strict=True):
            assert_inside(known, got)


ENDS = [
    -math.inf,
    -1e30,
    -3.0,
    -1.0,
    -0.25,
    -1e-39,
    0.0,
    1e-39,
    0.1,
    0.5,
    1.0,
    2.0,
    7.0,
    1e20,
    math.inf,
]


OF_FLOATS = [op for op, row in OPS.items() if "float" in row.forms and row.names != ()]


@pytest.mark.parametrize("op", OF_FLOATS)
def test_every_operation_on_floats_is_sound_by_itself(op: str) -> None:
    """Infinite, tiny and huge arguments included: NaN only where nothing is known."""
    graph = Graph()
    leaves = [graph.load("float", slot, [graph.leaf("mn"[slot])]) for slot in (0, 1)]
    arity = OPS[op].arity
    expr = graph.expr(graph.apply(op, *leaves[:arity]))
    whole = {"b": range(1), "h": range(1), "m": range(len(ENDS)), "n": range(len(ENDS))}
    for dtype in (torch.float32, torch.float64):
        ends = torch.tensor(ENDS, dtype=dtype)
        every = values(expr, whole, [ends, ends], dtype)[-1][0, 0]
        spans = [(i, j) for i in range(len(ENDS)) for j in range(i, len(ENDS))]
        for first in spans:
            for second in spans[::3] if arity == 2 else spans[:1]:
                box = {leaf: Interval(*span) for leaf, span in (("m", first), ("n", second))}
                found = bounds(expr, box, extremes_of([ends, ends]))
                got = every[first[0] : first[1] + 1]
                got = got[:, second[0] : second[1] + 1] if arity == 2 else got
                assert found is None or not bool(got.isnan().any()), (first, second, found)
                assert_inside(found, got)


def on(mask: Callable[..., Any], rows: tuple[int, int], columns: tuple[int, int]) -> Bounds:
    """What a mask function is on a box of rows and columns (first and last) of head 1 of item 1."""
    expr, tensors = trace_mask(mask)
    ranges = {
        "b": Interval(1, 1),
        "h": Interval(1, 1),
        "m": Interval(*rows),
        "n": Interval(*columns),
        "M": Interval(512, 512),
        "N": Interval(512, 512),
    }
    return bounds(expr, ranges, extremes_of(tensors))


IDS = torch.arange(512).div(100, rounding_mode="floor").expand(2, 512)
LAYOUT = (torch.arange(128).view(2, 2, 8, 4) % 3) == 0
# Of each mask function: boxes (first and last row, first and last key) and what it is there.
SHARP: dict[str, tuple[Callable[..., Any], dict[tuple[int, int, int, int], bool | None]]] = {
    "causal": (
        lambda b, h, m, n: n <= m,
        {(64, 127, 0, 63): True, (64, 127, 64, 127): None, (64, 127, 128, 191): False},
    ),
    "causal-strict-corner": (
        lambda b, h, m, n: n < m,
        {(64, 127, 0, 63): True, (63, 127, 0, 63): None, (0, 63, 63, 127): False},
    ),
    "window": (
        lambda b, h, m, n: abs(m - n) <= 100,
        {(0, 10, 90, 100): True, (0, 10, 90, 101): None, (0, 10, 111, 120): False},
    ),
    "window-as-product": (
        lambda b, h, m, n: (m - n <= 100) & (n <= m),
        {(64, 127, 27, 64): True, (64, 127, 26, 64): None, (64, 127, 27, 65): None}
        | {(64, 127, 128, 191): False, (264, 300, 0, 127): False},
    ),
    "prefix": (
        lambda b, h, m, n: (n <= m) | (n < 100),
        {(0, 63, 36, 99): True, (0, 63, 36, 100): None, (0, 63, 100, 163): False},
    ),
    "documents": (
        lambda b, h, m, n: IDS[b, m] == IDS[b, n],
        {(0, 63, 0, 63): True, (64, 127, 0, 63): None, (0, 63, 100, 163): False}
        | {(200, 263, 264, 299): True, (500, 511, 0, 499): False},
    ),
    "layout": (
        lambda b, h, m, n: LAYOUT[b, h, m // 64, n // 128],
        {
            (64 * i, 64 * i + 63, 128 * j, 128 * j + 127): bool(LAYOUT[1, 1, i, j])
            for i in range(8)
            for j in range(4)
        },
    ),
    "layout-misaligned": (
        lambda b, h, m, n: LAYOUT[b, h, m // 64, n // 128],
        {(0, 64, 0, 127): None if LAYOUT[1, 1, 0, 0] != LAYOUT[1, 1, 1, 0] else True},
    ),
    "checkerboard": (
        lambda b, h, m, n: (m // 64 + n // 64) % 2 == 0,
        {(0, 63, 0, 63): True, (64, 127, 0, 63): False, (64, 127, 192, 255): True}
        | {(0, 64, 0, 63): None},
    ),
    "bits": (
        lambda b, h, m, n: ((m >> 6) ^ (n >> 6)) & 1 == 0,
        {(0, 63, 0, 63): True, (64, 127, 0, 63): False, (64, 127, 192, 255): True},
    ),
    "floats": (
        lambda b, h, m, n: torch.floor(m / 64) == torch.floor(n / 64),
        {(0, 63, 0, 63): True, (64, 127, 0, 63): False, (60, 70, 0, 63): None},
    ),
    "anchored": (
        lambda b, h, m, n: n <= m + 0.5 * 128,
        {(0, 63, 0, 64): True, (0, 63, 0, 65): None, (0, 63, 128, 200): False},
    ),
    "always": (lambda b, h, m, n: (m >= 0) & (n % 7 < 7), {(0, 511, 0, 511): True}),
    "masked-bits": (lambda b, h, m, n: (m & 5) < 6, {(0, 511, 0, 511): True}),
    "never": (lambda b, h, m, n: (n < 0) | (h > 1), {(0, 511, 0, 511): False}),
}


@pytest.mark.parametrize("name", SHARP)
def test_bounds_are_sharp_where_tiles_are(name: str) -> None:
    mask, boxes = SHARP[name]
    found = {box: on(mask, box[:2], box[2:]) for box in boxes}
    assert found == boxes


def test_integers_that_leave_64_bits_are_unknown() -> None:
    """They wrap: nothing is claimed of them."""
    graph = Graph()
    huge = graph.constant(2**62)
    wrapped = graph.apply("add", graph.apply("mul", graph.leaf("m"), huge), graph.leaf("n"))
    positive = graph.expr(graph.apply("lt", graph.constant(0), wrapped))
    assert bounds(graph.expr(wrapped), {"m": Interval(0, 2), "n": Interval(0, 0)}) == EVERY_INT
    assert bounds(positive, {"m": Interval(2, 2), "n": Interval(1, 1)}) is None
    assert bounds(positive, {"m": Interval(1, 1), "n": Interval(1, 1)}) is True


def test_nothing_is_claimed_of_what_is_not_given() -> None:
    graph = Graph()
    m, s = graph.leaf("m"), graph.leaf("s")
    assert bounds(graph.expr(m), {}) == EVERY_INT
    assert bounds(graph.expr(graph.apply("lt", m, graph.constant(5))), {}) is None
    assert bounds(graph.expr(s), {}) is None
    assert bounds(graph.expr(graph.apply("eq", s, s)), {}) is None
    for kind, expected in (("float", None), ("bool", None), ("int", EVERY_INT)):
        load = graph.load(kind, 0, [m])  # type: ignore[arg-type]
        assert bounds(graph.expr(load), {"m": Interval(0, 1)}) == expected


def test_a_nan_among_captured_floats_is_not_compared() -> None:
    expr, _ = trace_mask(lambda b, h, m, n: torch.ones(4)[m] < 5.0)
    ranges = {"m": Interval(0, 3)}
    assert bounds(expr, ranges, lambda slot, indices: Interval(1.0, 1.0)) is True
    assert bounds(expr, ranges, lambda slot, indices: Interval(math.nan, math.nan)) is None


def test_a_floor_division_is_sharp_and_may_round_to_the_next_number() -> None:
    """A tenth is a little more than 0.1, and 1 / 0.1 is rounded to 10."""
    tenth = Interval(0.1, 0.1)
    assert float_intervals.floordiv(Interval(6.0, 8.0), Interval(2.0, 2.0)) == Interval(3.0, 4.0)
    assert float_intervals.floordiv(Interval(1.0, 1.0), tenth) == Interval(9.0, 10.0)


def test_what_may_be_flushed_to_zero_may_be_zero() -> None:
    """A product below the least normal float32 is positive, or 0 on some processors."""
    tiny = Interval(1e-20, 2e-20)
    found = float_intervals.mul(tiny, tiny)
    assert found is not None
    assert found.low == 0.0
    assert found.high >= 4e-40
    small = float_intervals.mul(tiny, Interval(1.0, 1.0))
    assert small is not None
    assert small.low > 0.0
