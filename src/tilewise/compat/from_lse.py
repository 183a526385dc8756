"""What a backward pass needs of a softmax, from its lse alone, which other libraries keep."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["stats_of"]


def stats_of(lse: Tensor) -> Tensor:
    """Return the stats of rows: [2, *lse.shape], base and weight with exp(s - lse) in mind.

    The kernels compute exp2(s log2(e) - stats[0]) / stats[1]. A whole number as base leaves the
    rest of lse log2(e) to the weight, where a rounding is relative: lse costs no accuracy beyond
    its own.

    Args:
        lse: natural units, contiguous; -inf for a row that sees no key. NaN gives NaN gradients.
    """
    exponent = lse.double() * math.log2(math.e)
    base = exponent.round()
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp2(exponent - base))
    return torch.stack((base, weight)).to(lse.dtype)
