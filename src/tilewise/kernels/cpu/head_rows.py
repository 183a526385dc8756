"""Rows of heads normalised and turned by the compiled core, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.core import core
from tilewise.kernels.cpu.cross_entropy import DTYPES
from tilewise.kernels.cpu.forks import threads

KINDS = {None: 0, "rms": 1, "layer": 2}  # of norms, by their code in the core


def head_rows(
    x: Tensor,
    grad: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    *,
    kind: str | None,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Return the rows, or with ``grad`` the gradient of ``x``; those of the weights are added up.

    Args:
        x: [B, H, S, D], channels of a row one after the other in memory, as in ``grad``.
        grad: of the result, or None.
        weight: [H or 1, D] of the computing type, contiguous, as ``bias``; None for 1.
        bias: None for 0.
        cos: [B or 1, S, R/2] of the computing type, contiguous, as ``sin``.
        sin: of the same shape.
        grad_weight: float64, of weight's or bias's shape; None, as ``grad_bias``, if not wanted.
        grad_bias: of the same shape.
        kind: ``"rms"``, ``"layer"``, or None for no norm.
        eps: is added to the mean square.
        interleaved: whether pairs are neighbours; then each angle is there twice, [.., R].
    """
    # The core believes these.
    assert all(each is None or each.stride(-1) == 1 for each in (x, grad))
    ready = (weight, bias, cos, sin, grad_weight, grad_bias)
    assert all(each is None or each.is_contiguous() for each in ready)
    out = torch.empty_like(x)
    if out.stride(-1) != 1:  # of one channel, or of no element
        out = x.new_empty(x.shape)
    rotated = cos.shape[-1] * (1 if interleaved else 2)
    of_weights = weight if weight is not None else bias
    heads = 1 if of_weights is None else of_weights.shape[0]
    strides = (
        *x.stride()[:3],
        *(out if grad is None else grad).stride()[:3],
        *out.stride()[:3],
        0 if heads == 1 else x.shape[3],
        0 if cos.shape[0] == 1 else cos.stride(0),
        cos.stride(1),
    )
    arrays = (x, grad, out, weight, bias, grad_weight, grad_bias, cos, sin)
    core().head_rows(
        DTYPES[x.dtype],
        threads(),
        (*x.shape, KINDS[kind], rotated, int(interleaved)),
        strides,
        tuple(0 if each is None else each.data_ptr() for each in arrays),
        eps,
    )
    return out
