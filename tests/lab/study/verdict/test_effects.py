"""Effects of a factorial design against least squares and by hand."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest
from scipy import stats as oracle

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.ask.config import Design, Experiment, Study
from tilelab.study.ask.designs import arm_name, combinations_of, fraction
from tilelab.study.verdict.effects import predicted
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import FactorEffect

SEEDS = (0, 1, 2, 3)


def study(design: Design, **fields: object) -> Study:
    arms = [arm_name(each) for each in combinations_of(design) if each]
    experiment: Experiment = experiment_of(*arms, design=design, seeds=SEEDS, **fields)
    return study_of(experiment)


def drawn(design: Design, seed: int = 0) -> dict[str, dict[int, float]]:
    """Arm -> seed -> final metric."""
    random = Random(seed)
    return {
        arm_name(each) or "baseline": {at: 2 + random.gauss(0, 0.1) for at in SEEDS}
        for each in combinations_of(design)
    }


def found(design: Design, finals: dict[str, dict[int, float]]) -> list[FactorEffect]:
    planned = study(design)
    records = records_of(planned, {arm: Behaviour(finals=each) for arm, each in finals.items()})
    (verdict,) = judge(planned, records).experiments
    assert verdict.interactions == ()
    return list(verdict.effects)


@pytest.mark.parametrize("design", [fraction("abc", 8, 3), fraction("abcd", 8), fraction("abc", 4)])
def test_effects_are_those_of_least_squares(design: Design) -> None:
    finals = drawn(design)
    effects = found(design, finals)
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
    one, two, both = found(
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


def test_factors_that_add_up_are_additive_and_what_does_nothing_is_no_difference() -> None:
    design = fraction("abc", 8)
    random = Random(1)
    finals = {
        arm_name(on) or "baseline": {
            at: 2 + at / 10 - 0.1 * ("a" in on) + random.gauss(0, 0.002) for at in SEEDS
        }
        for on in combinations_of(design)
    }
    effects = {each.factors: each for each in found(design, finals)}
    assert [effects[each,].label for each in "abc"] == [
        "better", "no difference", "no difference",
    ]  # fmt: skip
    assert {effects[pair].label for pair in combinations("abc", 2)} == {"additive"}


def test_a_fraction_says_what_it_cannot_tell_apart() -> None:
    design = fraction("abcd", 8)
    effects = {each.factors: each for each in found(design, drawn(design))}
    assert effects["a",].aliases == ("+b x c x d",)
    assert effects["a", "b"].aliases == ("+c x d",)
    assert ("c", "d") not in effects


@pytest.mark.parametrize(
    ("behaviour", "label"),
    [(Behaviour(diverged={1: 5}), "diverged"), (Behaviour(absent=(3,)), "incomplete")],
)
def test_a_run_that_is_missing_is_missing_in_every_effect(behaviour: Behaviour, label: str) -> None:
    planned = study(fraction("ab", 4))
    (verdict,) = judge(planned, records_of(planned, {"a": behaviour})).experiments
    assert {each.label for each in verdict.effects} == {label}
    assert all(each.p_holm is None for each in verdict.effects)


def test_the_effects_predict_every_run_of_a_full_factorial() -> None:
    design = fraction("abc", 8, 3)
    finals = drawn(design, 5)
    effects = found(design, finals)
    means = {arm: np.mean(list(each.values())) for arm, each in finals.items()}
    for on in combinations_of(design):
        expected = means[arm_name(on) or "baseline"] - means["baseline"]
        assert predicted(design, effects, on) == pytest.approx(expected, abs=1e-9)
