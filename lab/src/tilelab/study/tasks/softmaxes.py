"""Statistics of the softmax of every attention layer, from the kernels' own statistics.

A model whose attention is about to fail shows it here first. Its logits grow without bound, and a
head's entropy falls to nothing, because all of its weight goes to one key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from tilelab.models.bert import SelfAttention
from tilelab.study.data.order import Windows
from tilelab.study.records.events import LayerSoftmax
from tilewise import SoftmaxStats
from tilewise.nn import Attention

__all__ = ["Softmaxes", "look", "look_at", "watched"]

_ROWS = 8  # windows of a forward pass


class Softmaxes:
    """Collects what the layers of a model say in forward passes."""

    def __init__(self, layers: int) -> None:
        self._entropies: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._largest = [-math.inf] * layers

    def add(self, layer: int, stats: SoftmaxStats) -> None:
        """Note the rows of one call, [B, Hq, M] each, or [Hq, T] of packed sequences."""
        of_heads = stats.entropy.detach().double().mean(dim=-1)
        self._entropies[layer].append(of_heads.view(-1, of_heads.shape[-1]))
        self._largest[layer] = max(self._largest[layer], stats.max_logit.max().item())

    def found(self) -> list[LayerSoftmax]:
        """Return the statistics of every layer, over all that was noted."""
        layers = []
        for layer, (entropies, largest) in enumerate(
            zip(self._entropies, self._largest, strict=True)
        ):
            of_heads = torch.cat(entropies).mean(dim=0)
            mean, lowest = of_heads.mean().item(), of_heads.min().item()
            layers.append(LayerSoftmax(layer, mean, lowest, largest))
        return layers


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
    softmaxes = Softmaxes(len(layers))
    for place, layer in enumerate(layers):
        layer.on_statistics = partial(softmaxes.add, place)
    try:
        yield softmaxes.found
    finally:
        for layer in layers:
            layer.on_statistics = None


def look_at(model: nn.Module, *inputs: Any) -> list[LayerSoftmax] | None:
    """Return the softmax statistics of a model's layers on one call.

    Args:
        model: as it is to be looked at, in eval mode.
        inputs: of the call.

    Returns:
        None where the model keeps no statistics.
    """
    with watched(model) as found:
        if found is None:
            return None
        model(*inputs)
        return found()


@torch.no_grad()
def look(
    model: nn.Module, windows: Windows, autocast: torch.dtype | None = None
) -> list[LayerSoftmax] | None:
    """Return the softmax statistics of a model's layers on windows.

    The mode of the model and the random state stay as they are.

    Args:
        model: tokens [B, S] -> anything.
        windows: to look at; None of them for nothing.
        autocast: the dtype of matrix multiplications; None for that of the weights.

    Returns:
        None where the model keeps no statistics, or there is no window.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with watched(model) as found:
            if found is None or not len(windows):
                return None
            for part in windows.parts(_ROWS):
                with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                    model(*(each.to(device) for each in part.model_inputs))
            return found()
    finally:
        model.train(was_training)
