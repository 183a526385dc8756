"""The tensors of a case, and random ones without a case."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelab.cases.inputs import Inputs, build

__all__ = ["Inputs", "build", "drawn"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, the same ones for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
