"""Interactions of arms and effects of designs, against contrasts worked out by hand.

Factorial designs: their runs, words and aliases, by hand and against the published table.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy import stats as oracle

from tests.lab.study.records_of import Behaviour, experiment_of, judged, known
from tilelab.common.svg import house_style
from tilelab.stats.factorial import (
    arm_name,
    check,
    combinations_of,
    estimates,
    predicted,
    resolution,
    words,
)
from tilelab.stats.paired import paired
from tilelab.study.ask.config import Experiment
from tilelab.study.ask.designs import Design, fraction
from tilelab.study.report.tuning import effects_chart
from tilelab.study.verdict.result import FactorEffect, Interaction
from tilelab.study.verdict.text import signed
from tilewise.errors import InvalidArgument

BASE = {0: 2.0, 1: 2.2, 2: 2.1}


def found(
    *names: str, seeds: tuple[int, ...] = (0, 1, 2), **behaviours: Any
) -> tuple[Interaction, ...]:
    named = {name.replace("_", "+"): each for name, each in behaviours.items()}
    return judged(experiment_of(*names, seeds=seeds), named).interactions


def at(*shifts: float) -> Behaviour:
    """Runs whose seeds end so far from the baseline's."""
    rows = zip(BASE.items(), shifts, strict=True)
    return Behaviour(finals={seed: value + shift for (seed, value), shift in rows})


def two(both: Behaviour) -> Interaction:
    (only,) = found(
        *("lion", "wsd", "lion+wsd"),
        baseline=at(0, 0, 0),
        lion=at(-0.10, -0.11, -0.12),
        wsd=at(-0.05, -0.05, -0.06),
        lion_wsd=both,
    )
    return only


def test_the_contrast_is_what_is_beyond_the_sum() -> None:
    only = two(at(-0.20, -0.24, -0.25))
    expected = paired([-0.05, -0.08, -0.07], 0.95)
    assert (only.arms, only.together, only.n) == (("lion", "wsd"), "lion+wsd", 3)
    assert only.effect == pytest.approx(expected.mean)
    assert only.p_value == only.p_holm == pytest.approx(expected.p_value)
    assert known(only.interval).low == pytest.approx(known(expected.interval).low)
    assert only.label == "better together"
    assert only.reason.startswith("-0.067 bits per byte [-0.105, -0.029] beyond the sum")


@pytest.mark.parametrize(
    ("both", "label"),
    [
        ((-0.05, -0.05, -0.08), "worse together"),
        ((-0.150, -0.161, -0.179), "additive"),
        ((-0.35, 0.05, -0.25), "undecided"),
    ],
)
def test_the_interval_decides(both: tuple[float, ...], label: str) -> None:
    only = two(at(*both))
    assert only.label == label
    assert ("they add up, to within 0.02" in only.reason) == (label == "additive")


def test_a_run_that_diverged_or_is_missing_is_said() -> None:
    (one,) = found("a", "b", "a+b", seeds=(0,))
    assert (one.label, one.n, one.p_value) == ("undecided", 1, None)
    broken = two(Behaviour(diverged={1: 5}))
    assert (broken.label, broken.effect, broken.p_holm, broken.n) == ("diverged", None, None, 0)
    partial = two(Behaviour(absent=(1,)))
    assert (partial.label, partial.n, partial.p_holm) == ("incomplete", 2, None)
    assert partial.effect is not None
    nothing = two(Behaviour(absent=(0, 1, 2)))
    assert (nothing.label, nothing.effect) == ("incomplete", None)
    (lost,) = found("a", "b", "a+b", baseline=Behaviour(diverged={0: 4}))
    assert lost.label == "diverged"


def test_three_choices_have_three_pairs_and_one_triple() -> None:
    names = ("a", "b", "c", "a+b", "a+c", "b+c", "a+b+c")
    shifts = dict(zip(names, (1, 2, 4, 3, 5, 6, 7.5), strict=True))  # only the triple adds 0.5
    behaviours: dict[str, Any] = {
        name.replace("+", "_"): at(shift, shift + 0.001, shift - 0.001)
        for name, shift in shifts.items()
    }
    result = found(*names, baseline=at(0, 0, 0), **behaviours)
    assert [each.together for each in result] == ["a+b", "a+c", "b+c", "a+b+c"]
    assert [each.effect for each in result] == pytest.approx([0, 0, 0, 0.5], abs=1e-9)
    assert [each.label for each in result][:3] == ["additive"] * 3
    triple = result[3]
    assert triple.arms == ("a", "b", "c")
    assert triple.p_holm == pytest.approx(4 * known(triple.p_value)), "Holm over the four"


def test_only_whole_designs_are_interactions_in_whatever_order() -> None:
    assert [each.arms for each in found("wsd", "lion", "lion+wsd")] == [("lion", "wsd")]
    assert len(found("a", "b", "c", "b+a", "c+a", "c+b", "a+b+c")) == 4
    assert found("lion", "wsd") == ()
    assert found("lion", "lion+wsd") == (), "wsd alone is missing"
    assert len(found("a", "b", "c", "a+b+c", "a+b")) == 1, "a+c and b+c are missing"
    assert found("a", "a+a") == ()
    assert found("a", "a+") == ()


SEEDS = (0, 1, 2, 3)


def experiment(design: Design) -> Experiment:
    arms = [arm_name(each) for each in combinations_of(design) if each]
    return experiment_of(*arms, design=design, seeds=SEEDS)


def drawn(design: Design, seed: int = 0) -> dict[str, dict[int, float]]:
    """Arm -> seed -> final metric."""
    random = Random(seed)
    return {
        arm_name(each) or "baseline": {at: 2 + random.gauss(0, 0.1) for at in SEEDS}
        for each in combinations_of(design)
    }


def effects_found(design: Design, finals: dict[str, dict[int, float]]) -> list[FactorEffect]:
    behaviours = {arm: Behaviour(finals=each) for arm, each in finals.items()}
    verdict = judged(experiment(design), behaviours)
    assert verdict.interactions == ()
    return list(verdict.effects)


@pytest.mark.parametrize("design", [fraction("abc", 8, 3), fraction("abcd", 8), fraction("abc", 4)])
def test_effects_are_those_of_least_squares(design: Design) -> None:
    finals = drawn(design)
    effects = effects_found(design, finals)
    runs = combinations_of(design)
    signs = {name: [1.0 if name in on else -1.0 for on in runs] for name in design.factors}
    columns = [np.ones(len(runs))]
    columns += [np.prod([signs[name] for name in each.factors], axis=0) for each in effects]
    y = np.array([np.mean(list(finals[arm_name(on) or "baseline"].values())) for on in runs])
    fitted, *_ = np.linalg.lstsq(np.array(columns).T, y, rcond=None)
    for each, coefficient in zip(effects, fitted[1:], strict=True):
        assert each.effect == pytest.approx(2 ** len(each.factors) * coefficient, abs=1e-9)


def test_two_factors_by_hand() -> None:
    design = fraction("ab", 4)
    table = {
        "baseline": (2.0, 2.1, 2.2, 2.3), "a": (1.9, 2.0, 2.0, 2.2),
        "b": (2.3, 2.5, 2.4, 2.6), "a+b": (2.0, 2.1, 2.1, 2.2),
    }  # fmt: skip
    one, two, both = effects_found(
        design, {arm: dict(zip(SEEDS, row, strict=True)) for arm, row in table.items()}
    )
    base, a, b, ab = (np.array(row) for row in table.values())
    for effect, values in ((one, (a + ab - base - b) / 2), (two, (b + ab - base - a) / 2)):
        test = oracle.ttest_1samp(values, 0)
        assert effect.effect == pytest.approx(values.mean())
        assert effect.p_value == pytest.approx(test.pvalue)
        assert effect.interval is not None
        ends = test.confidence_interval(0.95)
        assert (effect.interval.low, effect.interval.high) == pytest.approx((ends.low, ends.high))
    joint = ab - a - b + base
    assert both.effect == pytest.approx(joint.mean())
    assert both.p_holm == both.p_value == pytest.approx(oracle.ttest_1samp(joint, 0).pvalue)
    assert one.label == "better"
    assert (two.label, both.label) == ("worse", "better together")
    # Holm over the two main effects.
    pair = sorted((each.p_value or 0.0) for each in (one, two))
    assert min(one.p_holm or 1, two.p_holm or 1) == pytest.approx(2 * pair[0])


def test_a_fraction_says_what_it_cannot_tell_apart() -> None:
    design = fraction("abcd", 8)
    effects = {each.factors: each for each in effects_found(design, drawn(design))}
    assert effects["a",].aliases == ("+b x c x d",)
    assert effects["a", "b"].aliases == ("+c x d",)
    assert ("c", "d") not in effects


@pytest.mark.parametrize(
    ("design", "absent"),
    [(fraction("abcd", 8), ["aliased"] * 3), (fraction("ab", 4, 1), ["\N{EN DASH}"])],
    ids=["aliased", "not-estimated"],
)
def test_the_map_says_which_effects_it_lacks(design: Design, absent: list[str]) -> None:
    effects = effects_found(design, drawn(design))
    with house_style():
        chart = known(effects_chart(effects, "bits_per_byte", "effects"))
    axes, cells = design.factors * 2, re.findall(r">([^<>]+)</text>", chart.svg)
    sizes = [signed(known(each.effect), 3) for each in effects]
    assert sorted(cells) == sorted([*axes, *sizes, *absent])


@pytest.mark.parametrize(
    ("behaviour", "label"),
    [(Behaviour(diverged={1: 5}), "diverged"), (Behaviour(absent=(3,)), "incomplete")],
)
def test_a_run_that_is_missing_is_missing_in_every_effect(behaviour: Behaviour, label: str) -> None:
    verdict = judged(experiment(fraction("ab", 4)), {"a": behaviour})
    assert {each.label for each in verdict.effects} == {label}
    assert all(each.p_holm is None for each in verdict.effects)


def test_the_effects_predict_every_run_of_a_full_factorial() -> None:
    design = fraction("abc", 8, 3)
    finals = drawn(design, 5)
    effects = effects_found(design, finals)
    means = {arm: np.mean(list(each.values())) for arm, each in finals.items()}
    for on in combinations_of(design):
        expected = means[arm_name(on) or "baseline"] - means["baseline"]
        assert predicted(effects, on) == pytest.approx(expected, abs=1e-9)


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
