"""The loss of a language model without the logits of a whole micro-batch.

Logits of T tokens and a vocabulary of V take 4 T V bytes in float32, and some four times that with
their gradient: 17 GB for 32,768 tokens of each. ``tilewise.linear_cross_entropy`` has the logits of
a few tokens at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

import tilewise
from tilelab.models.gpt2 import GPT2
from tilelab.study.ask.config import Training
from tilelab.study.tasks.task import NO_TARGET, dtype_of


class Features(NamedTuple):
    """What a head multiplies, and the matrix that it multiplies with."""

    hidden: Tensor  # [..., width]
    weight: Tensor  # [V, width]


class Headless(nn.Module):
    """A GPT-2 up to its head: ``chunked_losses`` does the rest."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Features:
        """Return the features of the inputs of ``GPT2.forward``."""
        return Features(self.model.features(*inputs), self.model.unembedding)


def chunked_losses(
    features: Features, targets: Tensor, training: Training
) -> tuple[Tensor, Tensor]:
    """Return what ``losses`` returns of the head's logits, to rounding.

    Logits are in the run's precision, the loss in float32, and the gradient of the head is added up
    in its own type.

    Args:
        features: of a micro-batch.
        targets: [...] as those of ``losses``; at least one that counts.
        training: ``loss_tokens`` is the number of tokens of a chunk.
    """
    hidden = features.hidden
    if hidden.dtype != torch.float64:  # as ``losses`` lets it be
        hidden = hidden.to(dtype_of(training.precision))
    objective, plain = tilewise.linear_cross_entropy(
        hidden,
        features.weight,
        targets,
        ignore_index=NO_TARGET,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
        return_nll=True,
        block_tokens=training.loss_tokens,
    )
    return objective, plain
