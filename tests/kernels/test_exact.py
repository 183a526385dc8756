"""The 2x rule for out, lse and every gradient: case table, widths, lengths, drawn problems."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.cases import FLOATS, LENGTHS, TABLE, WIDTHS, Case, cases
from tests.kernels.targets import TARGETS, Target, forced, pairs
from tests.oracle import attend, check_case, check_drawn, check_twice

ALL_DTYPES = [case.of(dtype) for dtype in FLOATS for case in TABLE]


@pytest.mark.parametrize(("target", "case"), pairs(ALL_DTYPES), indirect=["target"])
def test_case_table(target: Target, case: Case) -> None:
    """Every named case in every dtype."""
    check_case(case, target.backend)


def _width_cases() -> list[Case]:
    """Every D with a Dv that it is not, in two dtypes each; a mask that cuts tiles."""
    shuffled = random.Random(1).sample(WIDTHS, len(WIDTHS))
    return [
        Case(
            f"width-{width}-{value_width}",
            batch=1,
            queries=35,
            keys=67,
            head_dim=width,
            value_dim=value_width,
            mask=("causal",),
            dtype=FLOATS[(index + turn) % 3],
        )
        for turn in (0, 1)
        for index, (width, value_width) in enumerate(zip(WIDTHS, shuffled, strict=True))
    ]


@pytest.mark.parametrize(("target", "case"), pairs(_width_cases(), 4), indirect=["target"])
def test_widths(target: Target, case: Case) -> None:
    """Any D and Dv from 1 to 512, unequal."""
    check_case(case, target.backend)


def _length_cases() -> list[Case]:
    """Every number of queries and of keys, M above and below N, in all dtypes in turn."""
    found = []
    for index, queries in enumerate(LENGTHS):
        for step, mask in ((0, ()), (3, ("causal",)), (8, ("window", "lengths", "and"))):
            keys = LENGTHS[(index + step) % len(LENGTHS)]
            name = f"length-{queries}-{keys}-{len(mask)}"
            dtype = FLOATS[(index + step) % 4]
            found.append(
                Case(name, queries=queries, keys=keys, head_dim=17, mask=mask, dtype=dtype)
            )
    return found


@pytest.mark.parametrize(("target", "case"), pairs(_length_cases(), 3), indirect=["target"])
def test_lengths(target: Target, case: Case) -> None:
    """Tile remainders, one row, one key and none."""
    check_case(case, target.backend)


def _peaked_cases() -> list[Case]:
    """Logits of standard deviation 4 to 18: a softmax multiplies the rounding of their products."""
    found = [
        Case(
            f"peaked-{queries}-{width}",
            batch=1,
            heads=1,
            kv_heads=1,
            queries=queries,
            keys=600,
            head_dim=width,
            value_dim=width,
            gain=gain,
        )
        for queries, width, gain in (
            (1, 64, 3.0),
            (1, 128, 3.0),
            (1, 512, 3.0),
            (2, 320, 2.0),
            (8, 128, 3.1),
            (8, 256, 2.0),
            (8, 512, 3.0),
            (33, 128, 3.1),
            (64, 512, 3.0),
            (8, 576, 3.0),
        )
    ]
    varlen = Case("peaked-varlen", sequences=((8, 600), (3, 200)), scale=1.0)
    found.append(replace(varlen, head_dim=320, value_dim=320))
    return [case.of(dtype) for dtype in (torch.float32, torch.float64) for case in found]


def _peaked_pairs() -> list[Any]:
    """Every case on every target; tiled or in extended precision wide heads take seconds."""
    found = pairs(_peaked_cases(), 3)
    for at, (target, case) in enumerate(parameter.values for parameter in found):
        long = case.dtype == torch.float64 or target.backend == "tiled"
        if long and case.head_dim >= 512:
            marks = (*found[at].marks, pytest.mark.thorough)
            found[at] = pytest.param(*found[at].values, marks=marks, id=found[at].id)
    return found


@pytest.mark.parametrize(("target", "case"), _peaked_pairs(), indirect=["target"])
def test_peaked(target: Target, case: Case) -> None:
    """Few queries and wide heads with large logits, judged on as many draws as give 32 rows."""
    draws = max(2, 32 // case.queries)
    check_twice(case, draws, lambda inputs, sent: attend(inputs, target.backend, sent))


@pytest.mark.thorough
@given(case=cases())
@settings(max_examples=40)
def test_drawn(case: Case) -> None:
    """Whatever hypothesis draws, on the best instruction set there is."""
    with forced(TARGETS[0]):
        check_drawn(case, TARGETS[0].backend)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=400)
def test_drawn_everywhere(target: Target, case: Case) -> None:
    """The same at length, on every target."""
    check_drawn(case, target.backend)
