"""What a backward pass needs of a softmax, from its lse alone, which other libraries keep."""

from __future__ import annotations

import torch
from torch import Tensor


def stats_of(lse: Tensor, unit: float) -> Tensor:
    """Return the stats of rows: [2, *lse.shape], base and weight with exp(s - lse) in mind.

    The kernels compute exp(s - unit * stats[0]) / stats[1]. The weight is that of the base as it
    is stored, so the base's rounding costs nothing, and the weight's own is relative: lse costs no
    accuracy beyond its own.

    Args:
        lse: natural units, contiguous; -inf for a row that sees no key. NaN gives NaN gradients.
        unit: of ``stats[0]`` in natural units, above 0 (``kernels.base.Prepared``).
    """
    exponent = lse.double()
    base = (exponent / unit).to(lse.dtype)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(exponent - base.double() * unit))
    return torch.stack((base, weight.to(lse.dtype)))
