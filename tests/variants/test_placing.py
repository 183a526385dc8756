"""Masks over a part of the score matrix are the parts of the masks."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import tilewise
from tilewise import masks
from tilewise.variants.placing import Place, placed
from tilewise.variants.values import Mask

ROWS, KEYS = 5, 7
SPANS = [range(3), range(1, 5), range(2, 4)]


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("right", [None, 0, 1, 3])
@pytest.mark.parametrize("left", [None, 0, 1, 2, 4])
def test_a_part_of_a_band(left: int | None, right: int | None, align: str) -> None:
    """With no, one and several keys on either side, wherever the part lies."""
    mask = masks.window(left, right, align)
    whole = tilewise.visible_pairs(mask, ROWS, KEYS)
    for rows, columns in product(SPANS, [*SPANS, range(3, 7)]):
        place = Place(range(1), range(1), rows, columns, ROWS, KEYS)
        part = Mask(placed(mask.program, "mask", place).program)
        found = tilewise.visible_pairs(part, len(rows), len(columns))
        due = whole[..., rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(found, due), (rows, columns)
