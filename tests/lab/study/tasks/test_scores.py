"""The metrics of classes and numbers against scipy's, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tilelab.study.tasks import scores

CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
NUMBERS = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(-5, 5)).map(lambda pair: (pair[0] / 2, pair[1] / 2)),
    min_size=3,
    max_size=40,
)


def test_by_hand() -> None:
    true = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    predicted = np.array([1, 1, 0, 1, 0, 0, 0, 0])  # TP 2, FN 1, FP 1, TN 4
    assert scores.accuracy(predicted, true) == 6 / 8
    assert scores.f1(predicted, true) == 4 / 6
    assert scores.matthews(predicted, true) == pytest.approx(7 / 15)
    assert list(scores.ranks(np.array([3.0, 1.0, 3.0, 2.0]))) == [3.5, 1.0, 3.5, 2.0]


@settings(deadline=None)
@given(CLASSES)
def test_matthews_is_the_correlation_of_the_classes(pairs: list[tuple[int, int]]) -> None:
    predicted, true = np.array(pairs).T
    found = scores.matthews(predicted, true)
    if len(set(predicted)) > 1 and len(set(true)) > 1:
        assert found == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-12)
    else:
        assert found == 0.0


@settings(deadline=None)
@given(NUMBERS)
def test_correlations_are_scipys(pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs).T
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert scores.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
        assert scores.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    else:
        assert scores.pearson(x, y) == scores.spearman(x, y) == 0.0


@given(CLASSES)
def test_f1_is_the_harmonic_mean(pairs: list[tuple[int, int]]) -> None:
    predicted, true = np.array(pairs).T
    both = np.sum((predicted == 1) & (true == 1))
    if both:
        precision, recall = both / predicted.sum(), both / true.sum()
        expected = 2 * precision * recall / (precision + recall)
        assert scores.f1(predicted, true) == pytest.approx(expected)
    else:
        assert scores.f1(predicted, true) == 0.0


def test_what_is_not_finite_stays_so() -> None:
    x, y = np.array([1.0, math.nan, 2.0]), np.array([1.0, 2.0, 3.0])
    assert math.isnan(scores.pearson(x, y))
    assert math.isnan(scores.spearman(x, y))
