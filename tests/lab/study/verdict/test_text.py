"""Numbers in sentences, in tables and in figures."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import Interval
from tilelab.study.verdict.text import effect_text, interval_text, layers_text, p_text, seeds_text

MINUS, TIMES, DASH = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
INFINITY, RAISED = "\N{INFINITY}", "\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT SIX}"
DIGITS = {0.0123: 4, 0.5: 3, 7.0: 2, 1234.0: 0, 1e-9: 6, 0.0: 3}
CASES: list[tuple[Callable[..., object], tuple[object, ...], object]] = [
    (effect_text, (-0.11167, 0.02), "-0.112"),  # as exact as what matters
    (effect_text, (0.11167, 0.1), "+0.11"),
    (effect_text, (0.0, 0.02), "0"),
    (effect_text, (3e-7, 0.02), "+3e-07"),
    (effect_text, (-0.0004, 0.02), "-0.0004"),
    (effect_text, (-0.0005, 0.02), "-0.001"),
    (effect_text, (12.3, 25.0), "+12"),
    (interval_text, (Interval(-0.14, 0.0312), 0.02), "[-0.140, +0.031]"),
    (p_text, (0.5,), "0.5"),
    (p_text, (0.03412,), "0.034"),
    (p_text, (9e-5,), "below 0.0001"),
    (seeds_text, ([3],), "seed 3"),
    (seeds_text, ([0, 2],), "seeds 0 and 2"),
    (seeds_text, ([0, 2, 7],), "seeds 0, 2 and 7"),
    (layers_text, ((2,), 4), "Layer 2"),
    (layers_text, ((0,), 1), "Layer 0"),
    (layers_text, ((0, 1, 2, 3), 4), "All layers"),
    (layers_text, ((0, 1, 3), 4), "Layers 0 to 1 and 3"),
    (layers_text, ((0, 2, 3, 4, 7), 8), "Layers 0, 2 to 4 and 7"),
    (words.plain, (-0.11249, 3), f"{MINUS}0.112"),
    (words.plain, (1234.5, 3), "1,234.500"),
    (words.plain, (-0.0001, 3), "0.000"),
    (words.plain, (-2e300, 3), f"{MINUS}{words.typeset('2e300')}"),
    (words.plain, (-math.inf, 2), f"{MINUS}{INFINITY}"),
    (words.signed, (0.01, 3), "+0.010"),
    (words.signed, (-0.01, 3), f"{MINUS}0.010"),
    (words.signed, (0.0, 3), "0.000"),
    (words.signed, (0.0001, 3), "0.000"),
    (words.signed, (math.inf, 3), f"+{INFINITY}"),
    *((words.digits_for, (value,), digits) for value, digits in DIGITS.items()),
    (words.p_value, (None,), DASH),
    (words.p_value, (2e-6,), "< 0.0001"),
    (words.p_value, (0.00123,), "0.0012"),
    (words.p_value, (0.0337,), "0.034"),
    (words.p_value, (1.0,), "1.000"),
    (words.duration, (0.0123,), "12.3 ms"),
    (words.duration, (0.99999,), "1.0 s"),
    (words.duration, (12.34,), "12.3 s"),
    (words.duration, (250,), "4 min 10 s"),
    (words.duration, (3599.7,), "60 min 00 s"),
    (words.duration, (7500,), "2 h 05 min"),
    (words.amount, (12,), "12 B"),
    (words.amount, (640e3,), "640 kB"),
    (words.amount, (412e6,), "412 MB"),
    (words.amount, (999.7e6,), "1 GB"),
    (words.amount, (2.64e10,), "26.4 GB"),
    (words.amount, (2.5e12,), "2.5 TB"),
    (words.rate, (12345.6,), "12,346"),
    (words.rate, (3.214,), "3.21"),
    (words.shorten, (0.5,), "0.5"),
    (words.shorten, (250,), "250"),
    (words.shorten, (1_200_000,), "1.2M"),
    (words.shorten, (-2500,), f"{MINUS}2.5k"),
    (words.shorten, (3e9,), "3G"),
    (words.ratio, (2.414,), f"2.41{TIMES}"),
    (words.ratio, (12.34,), f"12.3{TIMES}"),
    (words.ratio, (123.4,), f"123{TIMES}"),
    (words.times, (1.8, "faster", "slower"), f"1.80{TIMES} faster"),
    (words.times, (0.5, "faster", "slower"), f"2.00{TIMES} slower"),
    (words.times, (1.001, "faster", "slower"), "as fast"),
    (words.power, (-4.2e-6,), f"{MINUS}4{TIMES}10{RAISED}"),
    (words.power, (0.0,), "0"),
    (
        words.typeset,
        ("+1e-06 nats [-0.5, +6e-06], lion-2 in a-1, seeds 0-3",),
        f"+1{TIMES}10{RAISED} nats [{MINUS}0.5, +6{TIMES}10{RAISED}], lion-2 in a-1, seeds 0-3",
    ),
    (words.listing, (["a"],), "a"),
    (words.listing, (["a", "b"],), "a and b"),
    (words.listing, (["a", "b", "c"],), "a, b and c"),
    (words.count, (0, "run"), "0 runs"),
    (words.count, (1, "run"), "1 run"),
    (words.count, (1200, "run"), "1,200 runs"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    CASES,
    ids=lambda each: each.__name__ if callable(each) else None,
)
def test_it_reads(
    function: Callable[..., object], arguments: tuple[object, ...], expected: object
) -> None:
    assert function(*arguments) == expected
