"""The paper's account, and the numbers that docs/io-model.md prints of it.

The asymptotic forms against exact counts, and the lower bound below them.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tests.plan.some_problems import problem
from tilelab.counted import paper
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain, tiled, visits_of
from tilewise.plan.traffic.count import predict
from tilewise.problem import Operands, Problem

ROOT = Path(__file__).resolve().parents[3]


def test_standard_attention_to_the_printed_digit() -> None:
    moved = paper.standard()
    assert round(moved.bytes / 1e9, 1) == 40.3
    matrix = 64 * 16 * 1024 * 1024 * 2
    operand = 64 * 16 * 1024 * 64 * 2
    assert moved.bytes == 18 * matrix + 12 * operand + 1024 * 1024 * 2


def test_flash_attention_within_the_conventions() -> None:
    """4.54 against 4.4: 33 passes over operands are 4.43, row statistics the rest."""
    moved = paper.the_first()
    operand = 64 * 16 * 1024 * 64 * 2
    rows = sum(x.read + x.written for x in moved.operands if x.name in ("stats", "delta"))
    assert moved.bytes - rows == 33 * operand
    assert round(33 * operand / 1e9, 1) == 4.4
    assert moved.bytes == pytest.approx(4.54e9, rel=0.001)


def test_times_are_below_those_measured_but_tell_them() -> None:
    for moved, name in ((paper.standard(), "standard"), (paper.the_first(), "flash")):
        total = predict(moved, paper.CHIP, "float16").total
        assert 0.4 < total / paper.PRINTED[name][1] < 0.7


def test_a_causal_mask_saves_what_it_hides() -> None:
    assert paper.ours(mask=True).flops < 0.6 * paper.ours().flops
    assert paper.ours(mask=True).bytes < 0.7 * paper.ours().bytes


def test_the_curve_falls_until_products_take_longer() -> None:
    for keys_outside in (True, False):
        points = paper.against_blocks((32, 64, 128, 256, 512, 1024), keys_outside)
        sizes = [at.traffic.bytes for at in points]
        assert sizes == sorted(sizes, reverse=True)
        bounds = [at.seconds.bound for at in points]
        assert bounds[0] == "memory"
        assert bounds[-1] == "matrix"
        assert points[-1].seconds.total == points[-2].seconds.total


def test_the_page_prints_these_numbers() -> None:
    page = (ROOT / "docs" / "io-model.md").read_text()
    text = page.partition("## The paper's account, again")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| (\d+\.\d\d) \|", text, re.MULTILINE))
    tiles = paper.ours()
    behind = tiles.behind(paper.CHIP.last_cache_bytes, paper.CHIP.cores)
    said = {
        "standard attention": paper.standard(),
        "FlashAttention, keys outside, 256 of them": paper.the_first(),
        "tilewise, tiles of 128 x 128": tiles,
        "tilewise, behind 40 MB of cache": behind,
    }
    assert rows == {name: f"{moved.bytes / 1e9:.2f}" for name, moved in said.items()}
    for moved, name in ((said["standard attention"], "standard"), (paper.the_first(), "Flash")):
        milliseconds = predict(moved, paper.CHIP, "float16").total * 1e3
        line = next(x for x in text.splitlines() if x.startswith(f"| {name}"))
        assert f"| {milliseconds:.1f} |" in line


@pytest.mark.parametrize("draw", ["draw", pytest.param("draw_counted", marks=pytest.mark.thorough)])
def test_the_picture_is_drawn_the_same_every_time(draw: str, tmp_path: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "scripts" / "io_model.py"))
    for name in ("one.svg", "two.svg"):
        drawn[draw](tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()


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


def test_the_forms_by_hand() -> None:
    assert paper.plain_form(8, 2) == 8 * 2 + 64
    assert paper.tiled_form(8, 2, 4) == 64 * 4 / 4
    assert paper.sparse_form(8, 2, 4, 0.25) == 8 * 2 + 64 * 4 * 0.25 / 4


@given(length=SIZES["length"], width=SIZES["width"])
@settings(max_examples=15)
def test_plain_is_of_its_form(length: int, width: int) -> None:
    asked = square(length, width)
    for traffic, low, high in ((plain.forward(asked), 3, 5), (plain.backward(asked), 6, 9)):
        ratio = numbers(asked, traffic.bytes) / paper.plain_form(length, width)
        assert low < ratio < high


@given(**SIZES)
@settings(max_examples=30)
def test_tiles_that_fill_fast_memory_are_of_their_form(length: int, width: int, share: int) -> None:
    """Within a constant of N^2 d^2 / M, and never below what anything must move."""
    fast = min(share * width, length) * width
    if fast < 6 * width:
        return
    asked, form = square(length, width), paper.tiled_form(length, width, fast)
    least = paper.lower_bound(length, width, fast)
    tile = paper.tiles_for(width, fast)
    held = tile[0] * (2 * width + tile[1]) + 2 * tile[1] * width
    assert held <= fast
    queries_outside = numbers(asked, tiled.forward(asked, visits_of(asked, tile)).bytes)
    assert least <= queries_outside <= 8 * form + 12 * length * width
    visited = visits_of(asked, paper.paper_tiles(width, fast))
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
    form = paper.sparse_form(length, 32, fast, visited.density)
    assert numbers(asked, tiled.forward(asked, visited).bytes) <= 10 * form


def test_the_bound_is_below_the_form() -> None:
    assert paper.lower_bound(1024, 64, 64 * 1024) == 4 * 1024 * 64
    assert paper.lower_bound(10**6, 64, 10**5) == 10**12 * 64 * 64 / 10**5 - 10**5
    assert paper.paper_tiles(64, 100 * 1024 // 2) == (64, 200)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="fast"):
        paper.tiled_form(128, 64, 63)
    with pytest.raises(InvalidArgument, match="density"):
        paper.sparse_form(128, 64, 1000, 1.5)
    with pytest.raises(InvalidArgument, match="length"):
        paper.lower_bound(0, 64, 1000)
