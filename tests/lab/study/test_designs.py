"""Factorial designs: their runs, words and aliases, by hand and against the published table."""

from __future__ import annotations

import numpy as np
import pytest

from tilelab.stats.fractions import (
    arm_name,
    check,
    combinations_of,
    estimates,
    resolution,
    words,
)
from tilelab.study.ask.designs import Design, fraction
from tilewise.errors import InvalidArgument

HALF = Design(factors=("a", "b", "c", "d"), generators={"d": ("a", "b", "c")})

# Factors, runs, resolution: Box, Hunter and Hunter, table 6.22.
TABLE = [
    (3, 4, 3), (4, 8, 4), (5, 16, 5), (5, 8, 3), (6, 32, 6), (6, 16, 4), (6, 8, 3), (7, 64, 7),
    (7, 32, 4), (7, 16, 4), (7, 8, 3), (8, 64, 5), (8, 32, 4), (8, 16, 4),
]  # fmt: skip


def names(count: int) -> list[str]:
    return [f"f{at}" for at in range(count)]


@pytest.mark.parametrize(("count", "runs", "wanted"), TABLE)
def test_fractions_have_the_published_resolution(count: int, runs: int, wanted: int) -> None:
    design = fraction(names(count), runs)
    assert resolution(design) == wanted
    found = combinations_of(design)
    assert len(found) == len(set(found)) == runs
    assert found[0] == (), "the baseline is in it"
    check(design, [arm_name(each) for each in found if each])


@pytest.mark.parametrize(("count", "runs"), [(3, 4), (4, 8), (5, 8), (6, 16), (7, 16), (4, 16)])
def test_aliases_are_the_columns_that_are_equal_up_to_a_sign(count: int, runs: int) -> None:
    design = fraction(names(count), runs, order=3)
    signs = np.array(
        [[1 if name in on else -1 for name in design.factors] for on in combinations_of(design)]
    )

    def column(factors: tuple[str, ...]) -> np.ndarray:
        return np.asarray(signs[:, [design.factors.index(each) for each in factors]].prod(axis=1))

    found = estimates(design)
    for each in found:
        for sign, alias in each.aliases:
            assert (column(each.factors) == sign * column(alias)).all()
        assert column(each.factors).sum() == 0
    # What is estimated apart can be told apart.
    together = np.array([column(each.factors) for each in found])
    assert (together @ together.T == runs * np.eye(len(found))).all()
    assert len(found) <= runs - 1


def test_a_half_of_four_by_hand() -> None:
    assert words(HALF) == [("a", "b", "c", "d")]
    assert [arm_name(each) for each in combinations_of(HALF)] == [
        "", "a+d", "b+d", "c+d", "a+b", "a+c", "b+c", "a+b+c+d",
    ]  # fmt: skip
    found = {each.factors: each.aliases for each in estimates(HALF)}
    assert list(found) == [("a",), ("b",), ("c",), ("d",), ("a", "b"), ("a", "c"), ("a", "d")]
    assert found["a",] == ((1, ("b", "c", "d")),)
    assert found["a", "b"] == ((1, ("c", "d")),)
    third = Design(factors=("a", "b", "c"), generators={"c": ("a", "b")})
    assert estimates(third)[2].aliases == ((-1, ("a", "b")),), "a word of three factors"


def test_what_fits_is_run_whole() -> None:
    assert fraction(names(4), 16).generators == {}
    assert len(fraction(names(4), 15).generators) == 1
    with pytest.raises(InvalidArgument, match="fewer factors"):
        fraction(names(8), 8)


@pytest.mark.parametrize(
    ("fields", "arms", "message"),
    [
        ({"factors": ("a", "b")}, ["a", "b"], r"arms a, b, a\+b"),
        ({"factors": ("a", "a")}, ["a"], "each once"),
        ({"factors": ("a", "b+c")}, ["a"], r"without \+"),
        ({"factors": ("a", "b", "c"), "generators": {"c": ("a",)}}, [], "two or more"),
        ({"factors": ("a", "b", "c"), "generators": {"d": ("a", "b")}}, [], "d = a x b"),
        (
            {"factors": tuple("abcd"), "generators": {"c": ("a", "b"), "d": ("a", "b")}},
            [],
            "resolution 2: c x d is constant",
        ),
    ],
)
def test_a_design_that_does_not_hold_is_refused(fields: dict, arms: list, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check(Design(**fields), arms)
