"""float8: numbers quantised head by head, and what the references make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelab.oracles.dense import dense
from tilewise.inspect.calls import lowered
from tilewise.problem import Result
from tilewise.variants.float8 import FLOAT8, Scales
from tilewise.variants.values import Mask

__all__ = ["quantised", "references"]


def quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] as float8, and scales [H] by which the largest number of each head is 448."""
    largest = numbers.detach().float().abs().amax((0, 2, 3)).clamp(min=1e-12)
    scale = largest / torch.finfo(FLOAT8).max
    return (numbers.detach().float() / scale[:, None, None]).to(FLOAT8), scale


def references(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, mask: Mask | None = None
) -> tuple[Result, Result]:
    """Return the results of the plain implementation in float8 and of float64."""
    of_q, of_k, of_v = scales
    problem, operands = lowered(q, k, v, mask=mask, q_scale=of_q, k_scale=of_k, v_scale=of_v)
    return dense(problem, operands, dtype=FLOAT8), dense(problem, operands)
