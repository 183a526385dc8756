"""Numbers in sentences."""

from __future__ import annotations

import pytest

from tilelab.study.verdict.result import Interval
from tilelab.study.verdict.text import effect_text, interval_text, layers_text, p_text, seeds_text


@pytest.mark.parametrize(
    ("value", "smallest", "expected"),
    [
        (-0.11167, 0.02, "-0.112"),
        (0.11167, 0.1, "+0.11"),
        (0.0, 0.02, "0"),
        (3e-7, 0.02, "+3e-07"),
        (-0.0004, 0.02, "-0.0004"),
        (-0.0005, 0.02, "-0.001"),
        (12.3, 25.0, "+12"),
    ],
)
def test_effects_are_as_exact_as_what_matters(value: float, smallest: float, expected: str) -> None:
    assert effect_text(value, smallest) == expected


def test_intervals() -> None:
    assert interval_text(Interval(-0.14, 0.0312), 0.02) == "[-0.140, +0.031]"


@pytest.mark.parametrize(
    ("p_value", "expected"), [(0.5, "0.5"), (0.03412, "0.034"), (9e-5, "below 0.0001")]
)
def test_p_values(p_value: float, expected: str) -> None:
    assert p_text(p_value) == expected


def test_seeds() -> None:
    assert seeds_text([3]) == "seed 3"
    assert seeds_text([0, 2]) == "seeds 0 and 2"
    assert seeds_text([0, 2, 7]) == "seeds 0, 2 and 7"


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        ((2,), 4, "Layer 2"),
        ((0,), 1, "Layer 0"),
        ((0, 1, 2, 3), 4, "All layers"),
        ((0, 1, 3), 4, "Layers 0 to 1 and 3"),
        ((0, 2, 3, 4, 7), 8, "Layers 0, 2 to 4 and 7"),
    ],
)
def test_layers(layers: tuple[int, ...], count: int, expected: str) -> None:
    assert layers_text(layers, count) == expected
