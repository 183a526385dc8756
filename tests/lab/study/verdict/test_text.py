"""Numbers in sentences, in tables and in figures."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from tilelab.study.verdict import text as words
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


MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


def test_numbers() -> None:
    assert [words.plain(n, 3) for n in (-0.11249, 1234.5, -0.0001)] == [
        f"{MINUS}0.112",
        "1,234.500",
        "0.000",
    ]
    assert words.plain(-math.inf, 2) == f"{MINUS}\N{INFINITY}"
    assert [words.signed(n, 3) for n in (0.01, -0.01, 0.0, 0.0001, math.inf)] == [
        "+0.010",
        f"{MINUS}0.010",
        "0.000",
        "0.000",
        "+\N{INFINITY}",
    ]
    assert [words.digits_for(n) for n in (0.0123, 0.5, 7.0, 1234.0, 1e-9, 0.0)] == [
        4,
        3,
        2,
        0,
        6,
        3,
    ]
    assert [words.p_value(p) for p in (None, 2e-6, 0.00123, 0.0337, 1.0)] == [
        "\N{EN DASH}",
        "< 0.0001",
        "0.0012",
        "0.034",
        "1.000",
    ]


def test_amounts() -> None:
    assert [words.duration(s) for s in (0.0123, 0.99999, 12.34, 250, 3599.7, 7500)] == [
        "12.3 ms",
        "1.0 s",
        "12.3 s",
        "4 min 10 s",
        "60 min 00 s",
        "2 h 05 min",
    ]
    assert [words.size(n) for n in (12, 640e3, 412e6, 999.7e6, 2.64e10, 2.5e12)] == [
        "12 B",
        "640 kB",
        "412 MB",
        "1 GB",
        "26.4 GB",
        "2,500 GB",
    ]
    assert [words.rate(n) for n in (12345.6, 3.214)] == ["12,346", "3.21"]
    assert [words.shorten(n) for n in (0.5, 250, 1_200_000, -2500, 3e9)] == [
        "0.5",
        "250",
        "1.2M",
        f"{MINUS}2.5k",
        "3G",
    ]


def test_ratios() -> None:
    assert [words.ratio(n) for n in (2.414, 12.34, 123.4)] == [
        f"2.41{TIMES}",
        f"12.3{TIMES}",
        f"123{TIMES}",
    ]
    assert words.times(1.8, "faster", "slower") == f"1.80{TIMES} faster"
    assert words.times(0.5, "faster", "slower") == f"2.00{TIMES} slower"
    assert words.times(1.001, "faster", "slower") == "as fast"


def test_sentences() -> None:
    raised = "\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT SIX}"
    assert words.power(-4.2e-6) == f"{MINUS}4{TIMES}10{raised}"
    assert words.power(0.0) == "0"
    assert (
        words.typeset("+1e-06 nats [-0.5, +6e-06], lion-2 in a-1, seeds 0-3")
        == f"+1{TIMES}10{raised} nats [{MINUS}0.5, +6{TIMES}10{raised}], lion-2 in a-1, seeds 0-3"
    )


@pytest.mark.parametrize(
    ("items", "said"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_lists(items: list[str], said: str) -> None:
    assert words.listing(items) == said
    assert words.count(len(items), "thing") == f"{len(items)} thing{'s' * (len(items) > 1)}"


def test_counting() -> None:
    assert [words.count(number, "run") for number in (0, 1, 1200)] == [
        "0 runs",
        "1 run",
        "1,200 runs",
    ]


def test_names_of_arms_in_figures_stay_apart() -> None:
    factors = ("dropout", "decay", "wsd", "muon")
    names = ["+".join(on) for size in range(1, 5) for on in combinations(factors, size)]
    short = {name: words.short_name(name, 15) for name in names}
    assert len(set(short.values())) == len(names)
    assert all(len(each) <= 15 for each in short.values())
    assert short["dropout+decay"] == "dropout+decay"
    assert short["dropout+decay+wsd+muon"] == "dro+dec+wsd+muo"
    assert short["dropout+wsd+muon"] == "dropou+wsd+muon"
    assert words.short_name("a-name-without-factors", 15) == "a-name-without\N{HORIZONTAL ELLIPSIS}"
