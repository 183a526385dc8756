"""Metrics of predicted classes and numbers. See ``docs/metrics.md``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUARTERS", "accuracy", "by_length", "f1", "matthews", "pearson", "ranks", "spearman"]

QUARTERS = tuple(f"accuracy_quarter_{number}" for number in (1, 2, 3, 4))
Classes = NDArray[np.int64]
Numbers = NDArray[Any]


def accuracy(predicted: Classes, true: Classes) -> float:
    """Return the share of predictions that are right."""
    return float(np.mean(predicted == true))


def by_length(predicted: Classes, true: Classes, lengths: NDArray[np.int64]) -> dict[str, float]:
    """Return the accuracy on each quarter of the examples, the shortest first; see ``QUARTERS``.

    Among equal lengths the first examples count as shorter, so quarters are as large as can be. A
    remainder of the division by four makes the first quarters larger.
    """
    quarters = np.array_split(np.argsort(lengths, kind="stable"), len(QUARTERS))
    return {
        name: accuracy(predicted[each], true[each])
        for name, each in zip(QUARTERS, quarters, strict=True)
    }


def f1(predicted: Classes, true: Classes) -> float:
    """2 TP / (2 TP + FP + FN) of class 1; 0 where nothing is, or is said to be, of class 1."""
    both = int(np.sum((predicted == 1) & (true == 1)))
    either = int(np.sum(predicted == 1) + np.sum(true == 1))
    return 2 * both / either if either else 0.0


def matthews(predicted: Classes, true: Classes) -> float:
    """Return the correlation of two classes, 0 and 1; 0 where either does not vary.

    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN))

    Source: Matthews, Biochimica et Biophysica Acta 405, 1975.
    """
    yes, true_yes = predicted == 1, true == 1
    tp, tn = int(np.sum(yes & true_yes)), int(np.sum(~yes & ~true_yes))
    fp, fn = int(np.sum(yes & ~true_yes)), int(np.sum(~yes & true_yes))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / math.sqrt(product) if product else 0.0


def pearson(predicted: Numbers, true: Numbers) -> float:
    """Return the linear correlation; 0 where either does not vary, NaN for numbers not finite."""
    x, y = (np.asarray(each, np.float64) for each in (predicted, true))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return math.nan
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.clip(x @ y, -1.0, 1.0))


def spearman(predicted: Numbers, true: Numbers) -> float:
    """Return the linear correlation of the ranks."""
    finite = np.isfinite(predicted).all() and np.isfinite(true).all()
    return pearson(ranks(predicted), ranks(true)) if finite else math.nan


def ranks(values: Numbers) -> NDArray[np.float64]:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: NDArray[np.float64] = (last - (counts - 1) / 2)[group]
    return shared
