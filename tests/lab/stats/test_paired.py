"""Statistics against scipy's own tests and against tables; test_compare.py simulates studies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.lab.study.records_of import known
from tilelab.stats.paired import (
    SEEDS_LIMIT,
    critical_t,
    detectable,
    equivalence,
    holm,
    more_seeds,
    paired,
    pooled_spread,
    ratio,
    seeds_for_difference,
    seeds_for_equivalence,
    summary,
)
from tilelab.stats.values import Interval
from tilewise.errors import InvalidArgument


def drawn(n: int, mean: float = 0.0, seed: int = 0) -> list[float]:
    """Normal differences with a spread of 1."""
    return [float(each) for each in np.random.default_rng(seed).normal(mean, 1, n)]


@pytest.mark.parametrize("n", [2, 3, 5, 30])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_paired_is_scipys_one_sample_t_test(n: int, confidence: float) -> None:
    values = drawn(n, 0.4)
    found, expected = paired(values, confidence), stats.ttest_1samp(values, 0)
    ends = expected.confidence_interval(confidence)
    assert found.interval is not None
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.interval.low, found.interval.high) == pytest.approx((ends.low, ends.high))
    assert found.n == n
    assert found.mean == pytest.approx(np.mean(values))
    assert found.spread == pytest.approx(np.std(values, ddof=1))


def test_no_seed_and_one_seed_have_no_interval() -> None:
    assert paired([], 0.95).mean is None
    one = paired([0.3], 0.95)
    assert (one.n, one.mean, one.spread, one.interval, one.p_value) == (1, 0.3, None, None, None)
    assert equivalence([0.0], 0.1) is None


def test_differences_without_spread_give_the_limit() -> None:
    shift = paired([0.1, 0.1, 0.1], 0.95)
    assert (shift.spread, shift.p_value) == (0, 0)
    assert shift.interval is not None
    assert shift.interval.low == shift.interval.high == pytest.approx(0.1)
    assert paired([0.0, 0.0], 0.95).p_value == 1
    assert equivalence([0.0, 0.0], 0.1) == 0
    assert equivalence([0.2, 0.2], 0.1) == 1
    assert equivalence([-0.1, -0.1], 0.1) == 1, "the margin itself matters"


@pytest.mark.parametrize("mean", [-0.9, -0.2, 0.0, 0.5, 2.0])
def test_equivalence_is_the_larger_of_two_one_sided_tests(mean: float) -> None:
    values = drawn(8, mean, seed=3)
    below = stats.ttest_1samp(values, 1.0, alternative="less").pvalue
    above = stats.ttest_1samp(values, -1.0, alternative="greater").pvalue
    assert equivalence(values, 1.0) == pytest.approx(max(below, above), rel=1e-9)


def test_holm_by_hand() -> None:
    # 4 x .01, 3 x .02, then 2 x .03 = .06 and .04 are held up to the ones before.
    assert holm([0.02, 0.01, 0.04, 0.03]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.02, None, None]) == [0.06, None, None], "a missing test counts"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_p_value_and_bonferroni(values: list[float]) -> None:
    adjusted = [each for each in holm(values) if each is not None]
    assert len(adjusted) == len(values)
    for p, each in zip(values, adjusted, strict=True):
        assert p <= each <= min(1, len(values) * p) + 1e-12
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [adjusted[at] for at in order] == sorted(adjusted)


@pytest.mark.parametrize(
    # Standardised effect -> sample size of a two-sided one-sample t test, level .05, power .8:
    # the standard tables (Cohen, "Statistical power analysis").
    ("effect", "expected"),
    [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10)],
)
def test_seeds_for_difference_are_those_of_the_tables(effect: float, expected: int) -> None:
    assert seeds_for_difference(1, effect, 0.05, 0.8) == expected
    assert seeds_for_difference(0.1, 0.1 * effect, 0.05, 0.8) == expected, "only the ratio counts"


@given(st.floats(0.3, 4), st.floats(0.001, 0.2), st.floats(0.55, 0.99))
def test_seeds_for_difference_are_the_fewest_with_that_power(
    effect: float, alpha: float, power: float
) -> None:
    def power_of(n: int) -> float:
        far = stats.t.ppf(1 - alpha / 2, n - 1)
        return float(stats.nct.sf(far, n - 1, math.sqrt(n) * effect))

    n = seeds_for_difference(1, effect, alpha, power)
    assert power_of(n) >= power - 1e-9
    assert n == 2 or power_of(n - 1) < power + 1e-9


def test_seeds_without_spread_and_beyond_the_limit() -> None:
    assert seeds_for_difference(0, 0.1, 0.05, 0.8) == 2
    normal = ((1.959964 + 0.841621) / 0.001) ** 2
    assert seeds_for_difference(1, 0.001, 0.05, 0.8) == pytest.approx(normal, rel=1e-4)
    assert seeds_for_difference(1, 0.001, 0.05, 0.8) > SEEDS_LIMIT


def test_seeds_for_equivalence_show_it_in_simulated_studies() -> None:
    n = seeds_for_equivalence(1, 1.0, 0.05, 0.8)
    draws = np.random.default_rng(2).normal(0, 1, (2000, n))
    found = np.mean([(equivalence(list(row), 1.0) or 0) < 0.05 for row in draws])
    assert 0.78 < found < 0.92


def test_more_seeds_give_a_spread_and_find_the_smallest_effect() -> None:
    assert more_seeds([], 0.1, 0.05, 0.8) == 2
    assert more_seeds([0.3], 0.1, 0.05, 0.8) == 1
    values = [1.0, -1.0, 0.0]  # a spread of exactly 1
    assert more_seeds(values, 0.5, 0.05, 0.8) == 34 - 3
    assert more_seeds(values, 0.5, 0.05, 0.9) > 34 - 3


def test_more_seeds_near_the_margin_ask_for_whichever_ends_sooner() -> None:
    def seen(mean: float) -> list[float]:
        return [mean + 0.5 * side for side in (-1, 1) * 6]

    spread = float(np.std(seen(0), ddof=1))
    assert seeds_for_difference(spread, 0.5, 0.05, 0.8) <= 12, "enough for a difference of 0.5"
    small = seeds_for_equivalence(spread, 0.5 - 0.2, 0.05, 0.8)
    assert 12 < small < seeds_for_difference(spread, 0.2, 0.05, 0.8)
    assert more_seeds(seen(0.2), 0.5, 0.05, 0.8) == small - 12
    large = seeds_for_difference(spread, 0.35, 0.05, 0.8)
    assert 12 < large < seeds_for_equivalence(spread, 0.5 - 0.35, 0.05, 0.8)
    assert more_seeds(seen(0.35), 0.5, 0.05, 0.8) == large - 12
    assert more_seeds(seen(3.0), 0.5, 0.05, 0.8) == 1, "never none"


def test_ratio_is_geometric_and_paired() -> None:
    found = ratio([(2.0, 1.0), (8.0, 1.0)], 0.95)
    assert found is not None
    assert found.interval is not None
    assert found.value == pytest.approx(4.0)
    assert found.n == 2
    logs = stats.ttest_1samp(np.log([2.0, 8.0]), 0).confidence_interval(0.95)
    assert found.interval.low == pytest.approx(math.exp(logs.low))
    assert found.interval.high == pytest.approx(math.exp(logs.high))
    # Whatever both runs of a seed share drops out.
    shared = ratio([(3.0, 1.5), (30.0, 15.0), (0.2, 0.1)], 0.95)
    assert shared is not None
    assert shared.interval is not None
    assert (shared.interval.low, shared.interval.high) == pytest.approx((2, 2))


def test_ratio_of_nothing_of_one_and_of_zero() -> None:
    assert ratio([], 0.95) is None
    assert ratio([(1.0, 0.0)], 0.95) is None
    one = ratio([(3.0, 2.0)], 0.95)
    assert one is not None
    assert one.value == pytest.approx(1.5)
    assert one.interval is None


def test_a_ratio_nobody_can_bound_is_infinite_and_no_crash() -> None:
    wild = ratio([(1e100, 1.0), (1e-100, 1.0)], 0.999)
    assert known(wild).interval == Interval(0.0, math.inf)


def test_summary() -> None:
    found = summary([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.values) == (3.0, (1.0, 2.0, 6.0))
    assert known(found.spread) == pytest.approx(math.sqrt(7))
    assert summary([]) is None
    single = summary([4.0])
    assert known(single).spread is None


@pytest.mark.parametrize("arms", [1, 6])
def test_what_is_detectable_is_the_inverse_of_the_seeds_for_it(arms: int) -> None:
    found = detectable(0.5, 7, 0.01, 0.8, arms)
    assert seeds_for_difference(0.5, found * 1.0001, 0.01, 0.8, arms) == 7
    assert seeds_for_difference(0.5, found * 0.999, 0.01, 0.8, arms) == 8
    assert detectable(0.5, 1, 0.01, 0.8) == math.inf
    assert critical_t(3, 16, 0.05) == pytest.approx(stats.t.isf(0.05 / 32, 2))
    assert critical_t(3, 6, 0.05, 6) == pytest.approx(stats.t.isf(0.05 / 12, 12))


def test_a_pooled_error_is_that_of_randomized_blocks() -> None:
    """Against least squares with an indicator of every block and treatment."""
    rng = np.random.default_rng(4)
    metrics = rng.normal(size=(5, 4))  # the baseline and four arms, over four seeds
    rows = [[float(each) for each in row - metrics[0]] for row in metrics[1:]]
    spread, p_value = pooled_spread(rows)
    treatments, blocks = np.indices(metrics.shape)
    columns = [*(treatments == at for at in range(5)), *(blocks == at for at in range(1, 4))]
    design = np.stack([each.ravel() for each in columns], axis=1).astype(float)
    left = np.linalg.lstsq(design, metrics.ravel(), rcond=None)[1]
    assert spread == pytest.approx(math.sqrt(2 * float(left[0]) / (4 * 3)))
    residuals = metrics.ravel() - design @ np.linalg.lstsq(design, metrics.ravel(), rcond=None)[0]
    squares = (residuals.reshape(5, 4) ** 2).sum(1)
    share = squares.max() / squares.sum() * 5 / 4
    assert p_value == pytest.approx(min(1, 5 * stats.beta.sf(share, 1.5, 4.5)))
    assert pooled_spread([rows[0]]) == pytest.approx((np.std(rows[0], ddof=1), 1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired([1.0, math.nan], 0.95), "differences: got nan; required: finite"),
        (lambda: paired([1.0, 2.0], 95), "confidence: got 95; required: a share"),
        (lambda: equivalence([1.0, 2.0], -1.0), "margin: got -1.0; required: a number above 0"),
        (lambda: holm([0.01, math.nan]), "p_values: got nan; required: p-values, from 0 to 1"),
        (lambda: critical_t(3, 0, 0.05), "comparisons: got 0; required: 1 or more"),
        (lambda: detectable(1.0, 3, 0.0, 0.8), "alpha: got 0.0; required: a share"),
        (lambda: detectable(math.nan, 3, 0.05, 0.8), "spread: got nan; required: a number"),
        (lambda: seeds_for_difference(1.0, 0.0, 0.05, 0.8), "effect: got 0.0; required"),
        (lambda: seeds_for_difference(1.0, -1.0, 0.05, 0.8), "effect: got -1.0; required"),
        (lambda: more_seeds([1.0, 2.0], 0.0, 0.05, 0.8), "smallest: got 0.0; required"),
    ],
)
def test_what_is_no_number_of_a_test_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        call()


def test_numbers_at_the_ends_of_their_range() -> None:
    assert known(summary([1.0, math.inf])).spread is None
    assert ratio([(math.nan, 1.0), (1.0, 2.0)], 0.95) is None
    assert known(ratio([(1e308, 1e-308)], 0.95)).n == 1
    assert seeds_for_difference(1.0, 1e-200, 0.05, 0.8) > SEEDS_LIMIT
    # With two seeds and a level of 1e-6, t is 6e5, where scipy's noncentral t is NaN. There the
    # test fails only by a spread that is small by chance: P(|V| < shift / t), V normal.
    expected = critical_t(2, 1, 1e-6) * stats.norm.ppf((1 + 0.999) / 2) / math.sqrt(2)
    assert detectable(1.0, 2, 1e-6, 0.999) == pytest.approx(expected, rel=1e-4)
