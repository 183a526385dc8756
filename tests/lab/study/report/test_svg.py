"""Figures become part of the page: fonts, colours and ids are the page's."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tilelab.common.svg import (
    ARM_COLOURS,
    SOFT,
    arm_colour,
    arm_dashes,
    canvas,
    finish,
    place,
    spread,
)

EVIL = "<script>&\"'"


def _drawn(name: str) -> str:
    figure = canvas(300, 200)
    axes = place(figure, 40, 40, 20, 10)
    axes.plot([0, 1], [2, 3], color=arm_colour(1), marker="o")
    axes.fill_between([0, 1], [1, 2], [3, 4], color=arm_colour(2), alpha=0.2)
    axes.text(0.5, 2.5, EVIL, color=SOFT, weight="bold", parse_math=False)
    return str(finish(figure, name, EVIL))


def test_a_figure_is_the_pages() -> None:
    svg = _drawn("one")
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert 'viewBox="0 0 300 200"' in svg
    assert not re.search(r'<svg[^>]* (?:width|height)="', svg)
    assert "var(--arm-1)" in svg
    assert "var(--arm-2)" in svg
    assert not re.search(r"#[0-9a-f]{6}", svg)  # no colour that the page does not decide
    assert "<style" not in svg  # matplotlib's own would hold for the whole page
    assert "font:" not in svg
    assert 'class="strong"' in svg
    assert "&lt;script&gt;&amp;" in svg
    assert "<script" not in svg


def test_ids_do_not_meet() -> None:
    first, second = _drawn("one"), _drawn("two")
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', first))
    assert used == ids[0]


def test_a_figure_is_the_same_each_time() -> None:
    assert _drawn("one") == _drawn("one")


def test_colours_come_round_again_dashed() -> None:
    assert len({arm_colour(index) for index in range(ARM_COLOURS)}) == ARM_COLOURS
    assert arm_colour(ARM_COLOURS) == arm_colour(1)  # never the baseline's
    assert arm_dashes(ARM_COLOURS - 1) == "solid"
    looks = [(arm_colour(index), arm_dashes(index)) for index in range(3 * ARM_COLOURS - 2)]
    assert len(set(looks)) == len(looks)  # of 22 arms; a factorial of four factors has 16


def test_labels_keep_their_distance() -> None:
    assert spread([1.0, 5.0], 1.0, 0.0, 6.0) == [1.0, 5.0]
    assert spread([3.0, 3.0], 1.0, 0.0, 6.0) == [2.5, 3.5]
    assert spread([6.0, 6.0, 6.0], 1.0, 0.0, 6.0) == [4.0, 5.0, 6.0]
    assert spread([0.5, 0.5, 0.5], 1.0, 0.0, 1.0) == [0.0, 0.5, 1.0]  # closer where it must be
    assert spread([], 1.0, 0.0, 1.0) == []


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12), st.floats(0.1, 2))
def test_labels_keep_their_order_and_the_frame(wanted: list[float], gap: float) -> None:
    places = spread(wanted, gap, 0.0, 10.0)
    least = min(gap, 10.0 / max(len(wanted) - 1, 1))
    ordered = sorted(places)
    assert all(after - before >= least - 1e-6 for before, after in pairwise(ordered))
    assert all(-1e-6 <= at <= 10 + 1e-6 for at in places)
    for one, first in zip(places, wanted, strict=True):
        for other, second in zip(places, wanted, strict=True):
            assert not (first < second and one > other + 1e-6)
