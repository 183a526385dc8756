"""The asymptotic forms against exact counts, and the lower bound below them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tests.plan.some_problems import problem
from tilelab.counted import bounds
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain, tiled, visits_of
from tilewise.problem import Operands, Problem

SIZES = {
    "length": st.sampled_from((256, 384, 1000, 2048, 4096)),
    "width": st.sampled_from((16, 32, 64)),
    "share": st.integers(6, 60),
}


def square(length: int, width: int) -> Problem:
    return problem(1, 1, 1, length, length, head_dim=width, value_dim=width)


def numbers(asked: Problem, byte_count: int) -> float:
    """Elements, a statistic (of 4 bytes) counting twice."""
    return byte_count / asked.dtype.itemsize


@given(length=SIZES["length"], width=SIZES["width"])
@settings(max_examples=15)
def test_plain_is_of_its_form(length: int, width: int) -> None:
    asked = square(length, width)
    for traffic, low, high in ((plain.forward(asked), 3, 5), (plain.backward(asked), 6, 9)):
        ratio = numbers(asked, traffic.bytes) / bounds.plain_form(length, width)
        assert low < ratio < high


@given(**SIZES)
@settings(max_examples=30)
def test_tiles_that_fill_fast_memory_are_of_their_form(length: int, width: int, share: int) -> None:
    """Within a constant of N^2 d^2 / M, and never below what anything must move."""
    fast = min(share * width, length) * width
    if fast < 6 * width:
        return
    asked, form = square(length, width), bounds.tiled_form(length, width, fast)
    least = bounds.lower_bound(length, width, fast)
    tile = bounds.tiles_for(width, fast)
    held = tile[0] * (2 * width + tile[1]) + 2 * tile[1] * width
    assert held <= fast
    queries_outside = numbers(asked, tiled.forward(asked, visits_of(asked, tile)).bytes)
    assert least <= queries_outside <= 8 * form + 12 * length * width
    visited = visits_of(asked, bounds.paper_tiles(width, fast))
    keys_outside = numbers(asked, tiled.forward_keys_outside(asked, visited, 2).bytes)
    assert form <= keys_outside <= 20 * form + 12 * length * width
    # The two walks of backward_by_tiles want tall tiles both: the paper's would be wrong for dQ.
    side = max(1, fast // (8 * width))
    for count in (
        tiled.backward_by_tiles(asked, visits_of(asked, (side, side))),
        tiled.backward_keys_outside(asked, visited),
    ):
        assert form <= numbers(asked, count.bytes) <= 60 * form + 20 * length * width


@given(
    length=st.sampled_from((512, 1024)),
    tile=st.sampled_from((16, 32, 64)),
    every=st.integers(1, 6),
)
@settings(max_examples=15)
def test_blocks_that_are_skipped_are_not_paid_for(length: int, tile: int, every: int) -> None:
    """Proposition 4: the form times the density, and N d."""
    side = length // tile
    layout = (torch.arange(side)[:, None] + torch.arange(side)) % every == 0
    mask = tilewise.BlockMask.from_layout(layout[None, None], (tile, tile))
    asked = square(length, 32)._replace(mask=mask.program)
    nothing = torch.empty(0)
    operands = Operands(nothing, nothing, nothing, mask.captured)
    visited = visits_of(asked, (tile, tile), operands)
    full = visits_of(square(length, 32), (tile, tile))
    assert visited.density == pytest.approx(float(layout.float().mean()))
    k, v = (each for each in tiled.forward(asked, visited).operands if each.name in "kv")
    dense = next(x for x in tiled.forward(square(length, 32), full).operands if x.name == "k")
    assert k.read == v.read == pytest.approx(dense.read * visited.density)
    fast = 4 * tile * 32
    form = bounds.sparse_form(length, 32, fast, visited.density)
    assert numbers(asked, tiled.forward(asked, visited).bytes) <= 10 * form


def test_the_bound_is_below_the_form() -> None:
    assert bounds.lower_bound(1024, 64, 64 * 1024) == 4 * 1024 * 64
    assert bounds.lower_bound(10**6, 64, 10**5) == 10**12 * 64 * 64 / 10**5 - 10**5
    assert bounds.paper_tiles(64, 100 * 1024 // 2) == (64, 200)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="fast"):
        bounds.tiled_form(128, 64, 63)
    with pytest.raises(InvalidArgument, match="density"):
        bounds.sparse_form(128, 64, 1000, 1.5)
    with pytest.raises(InvalidArgument, match="length"):
        bounds.lower_bound(0, 64, 1000)
