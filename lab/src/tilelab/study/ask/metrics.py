"""Every metric that a held-out evaluation can have: its name, its unit, and which way is better.

A task says which of them its evaluations have (``tasks/task.py``); an experiment decides by one.
A script's metric has a name of its own, and says which way is better: ``lower:val_loss``,
``higher:val_accuracy``.
Formulas and sources: ``docs/metrics.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Metric:
    """A number that says how good the weights of a run are."""

    name: str
    unit: str  # behind a number, in a sentence
    higher_is_better: bool = False
    replaces_loss: bool = False  # is the evaluation's own ``loss``


_OWN = re.compile(r"(lower|higher):(\S+)")


class _Metrics(dict[str, Metric]):
    """The metrics of tasks by name, and any that says its direction itself."""

    def __missing__(self, name: str) -> Metric:
        found = _OWN.fullmatch(name)
        if found is None:
            raise KeyError(name)
        return Metric(name, found[2], found[1] == "higher")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or bool(isinstance(name, str) and _OWN.fullmatch(name))


METRICS: Mapping[str, Metric] = _Metrics(
    (each.name, each)
    for each in (
        Metric("loss", "nats per token"),
        Metric("bits_per_byte", "bits per byte"),
        Metric("cross_entropy", "nats per example", replaces_loss=True),
        Metric("squared_error", "squared error", replaces_loss=True),
        Metric("accuracy", "accuracy", True),
        Metric("accuracy_quarter_1", "accuracy on the shortest quarter", True),
        Metric("accuracy_quarter_2", "accuracy on the second quarter by length", True),
        Metric("accuracy_quarter_3", "accuracy on the third quarter by length", True),
        Metric("accuracy_quarter_4", "accuracy on the longest quarter", True),
        Metric("accuracy_mismatched", "accuracy on mismatched genres", True),
        Metric("f1", "F1", True),
        Metric("f1_accuracy", "mean of F1 and accuracy", True),
        Metric("matthews", "Matthews correlation", True),
        Metric("pearson", "Pearson correlation", True),
        Metric("spearman", "Spearman correlation", True),
        Metric("pearson_spearman", "mean of Pearson and Spearman correlation", True),
    )
)


def undirected(metric: str) -> str:
    """Return the name of a metric without the direction that a script's has before it."""
    return metric.rpartition(":")[2]


def ahead(metric: str, effect: float) -> bool:
    """Return whether a difference of a metric is an improvement."""
    return effect > 0 if METRICS[metric].higher_is_better else effect < 0


def rank(metric: str, value: float) -> float:
    """Return a sort key for values of a metric, the best first."""
    return -value if METRICS[metric].higher_is_better else value


def reached(metric: str, value: float, target: float) -> bool:
    """Return whether a value is at the target, or better."""
    return rank(metric, value) <= rank(metric, target)


def value_in(evaluation: Mapping[str, Any], metric: str) -> float | None:
    """Return the metric in an evaluation's fields; None where it is not finite or not there."""
    own: float | None = evaluation.get(metric)
    return own if metric in evaluation else (evaluation.get("metrics") or {}).get(metric)


@dataclass(frozen=True)
class Floor:
    """What something much simpler than a model scores on the same held-out data."""

    name: str  # e.g. ``"byte table of order 4"``
    text: Literal["none", "seen", "all"]  # that it learnt from; "seen": by the baseline's first run
    bytes_seen: int  # of that text; 0 for what needs none, and for data that is no text
    value: float  # of the metric
    metric: str = "bits_per_byte"
    word_perplexity: float | None = None  # the same per original word, for WikiText


BYTE_TABLE, TOKEN_TABLE = "byte table of order", "token table of order"  # then the order
