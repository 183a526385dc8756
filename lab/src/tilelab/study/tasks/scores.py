"""What an evaluation says of a model: metrics of its answers, statistics of its attention.

``docs/metrics.md`` defines all of them. The statistics are those of the kernels themselves. A model
whose attention is about to fail shows it here first: its logits grow without bound, and a head's
entropy falls to nothing, because all of its weight goes to one key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tilelab.models.layers import SelfAttention, products
from tilelab.study.records.events import LayerSoftmax
from tilewise import SoftmaxStats
from tilewise.nn import Attention

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
    """Return the linear correlation of the ranks; equal values share the mean of theirs."""
    from scipy.stats import rankdata  # slow to import, and few tasks need it

    finite = np.isfinite(predicted).all() and np.isfinite(true).all()
    return pearson(rankdata(predicted), rankdata(true)) if finite else math.nan


@contextmanager
def evaluating(model: nn.Module, autocast: torch.dtype | None = None) -> Iterator[torch.device]:
    """Eval mode without gradients, and the mode as it was afterwards; gives the model's device."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        narrow = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
        with torch.no_grad(), narrow, products(device, autocast or torch.float32):
            yield device
    finally:
        model.train(was_training)


@contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], list[LayerSoftmax]] | None]:
    """Forward passes of this block are noted; what it gives says what was found.

    It gives None where the model's attention has no statistics: another implementation than
    ``"tilewise"``, or layers that are neither ``tilewise.nn.Attention`` nor those of a BERT.
    """
    layers = [each for each in model.modules() if isinstance(each, (Attention, SelfAttention))]
    if not layers or any(each.implementation != "tilewise" for each in layers):
        yield None
        return
    entropies: list[list[torch.Tensor]] = [[] for _ in layers]
    largest = [-math.inf] * len(layers)

    def add(place: int, stats: SoftmaxStats) -> None:
        """Note the rows of one call, [B, Hq, M] each, or [Hq, T] of packed sequences."""
        of_heads = stats.entropy.detach().double().mean(dim=-1)
        entropies[place].append(of_heads.view(-1, of_heads.shape[-1]))
        largest[place] = max(largest[place], stats.max_logit.max().item())

    def found() -> list[LayerSoftmax]:
        means = [torch.cat(each).mean(dim=0) for each in entropies]
        return [
            LayerSoftmax(place, heads.mean().item(), heads.min().item(), largest[place])
            for place, heads in enumerate(means)
        ]

    for place, layer in enumerate(layers):
        layer.on_statistics = partial(add, place)
    try:
        yield found
    finally:
        for layer in layers:
            layer.on_statistics = None


def look(model: nn.Module, calls: Iterable[Sequence[Any]]) -> list[LayerSoftmax] | None:
    """Return the statistics of a model in eval mode on some calls; None where it keeps none."""
    with watched(model) as found:
        if found is None:
            return None
        for inputs in calls:
            model(*inputs)
        return found()
