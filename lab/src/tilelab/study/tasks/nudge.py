"""The smallest change of a model that there is, to see what rounding alone does to training."""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["nudge"]

# With the seed alone the coin would be drawn from the same random bits as the weights themselves.
_STREAM = 0x6E756467


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down by the flip of a coin.

    Args:
        model: on the CPU; its weights are changed.
        seed: of the coin.
    """
    generator = torch.Generator().manual_seed(seed ^ _STREAM)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, math.inf, -math.inf)))
