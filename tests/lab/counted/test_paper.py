"""The paper's account, and the numbers that docs/io-model.md prints of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tilelab.counted import paper
from tilewise.plan.traffic.time import predict

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


def test_the_picture_is_drawn_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = runpy.run_path(str(ROOT / "scripts" / "io_model.py"))
    for name in ("one.svg", "two.svg"):
        drawn["draw"](tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()
