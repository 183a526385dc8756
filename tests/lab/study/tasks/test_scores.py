"""Scores against scipy and by hand; the objective against torch's, z-loss by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.nn import functional

from tilelab.study.tasks import scores
from tilelab.study.tasks.task import losses

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


LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))


def test_without_options_the_objective_is_the_cross_entropy() -> None:
    logits = LOGITS.clone().requires_grad_()
    objective, plain = losses(logits, TARGETS)
    expected = functional.cross_entropy(LOGITS.flatten(0, 1), TARGETS.flatten())
    assert objective.item() == plain.item() == expected.item()
    assert objective.requires_grad
    assert not plain.requires_grad


def test_label_smoothing_is_that_of_torch_and_the_record_stays_plain() -> None:
    objective, plain = losses(LOGITS, TARGETS, label_smoothing=0.2)
    rows, flat = LOGITS.flatten(0, 1), TARGETS.flatten()
    smoothed = functional.cross_entropy(rows, flat, label_smoothing=0.2)
    assert objective.item() == pytest.approx(smoothed.item(), rel=1e-12)
    assert plain.item() == pytest.approx(functional.cross_entropy(rows, flat).item(), rel=1e-12)


def test_z_loss_adds_the_mean_squared_log_of_the_partition_sum() -> None:
    objective, plain = losses(LOGITS, TARGETS, z_loss=0.5)
    sums = LOGITS.exp().sum(dim=-1).log()
    assert objective.item() == pytest.approx(
        plain.item() + 0.5 * (sums**2).mean().item(), rel=1e-12
    )
    _, without = losses(LOGITS, TARGETS)
    assert plain.item() == pytest.approx(without.item(), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_half_types_are_summed_in_float32(options: dict[str, float]) -> None:
    narrow = LOGITS.bfloat16()
    objective, plain = losses(narrow, TARGETS, **options)
    wide, _ = losses(narrow.float(), TARGETS, **options)
    assert objective.dtype == plain.dtype == torch.float32
    assert objective.item() == wide.item()


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "z_loss": 1}],
)
def test_tokens_without_a_target_do_not_count(options: dict[str, float]) -> None:
    targets = TARGETS.clone()
    targets[0, 1:4] = -100
    targets[1, 4] = -100
    found, expected = (
        losses(LOGITS, targets, **options),
        losses(LOGITS[targets >= 0][None], targets[targets >= 0][None], **options),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-12)
