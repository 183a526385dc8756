"""Rows of heads (normalised, turned) and of logits (losses, gradients) by the compiled core."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.cpu import DTYPES, core, threads
from tilewise.kernels.cross_entropy import InPlace, Rows


class HeadRows(NamedTuple):
    """What goes in, and what is done to it."""

    x: Tensor  # [B, H, S, D]
    weight: Tensor | None  # [D] or [H, D]; None for 1
    bias: Tensor | None  # of the same shapes; None for 0
    cos: Tensor  # [B or 1, S, R/2] of the computing type, for the first R channels, as ``sin``
    sin: Tensor  # of the same shape
    centred: bool  # whether the mean is taken away first
    eps: float  # is added to the mean square
    interleaved: bool  # whether channels that turn together are neighbours, not halves of the R


def forward(of: HeadRows) -> Tensor:
    """Return the rows, in the layout of ``x``."""
    return _run(of, None, None)


def backward(of: HeadRows, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias, given that of the rows."""
    some = of.bias if of.weight is None else of.weight
    sums = None
    if some is not None:
        sums = [torch.zeros(some.shape, dtype=torch.float64, device="cpu") for _ in range(2)]
    by_x = _run(of, grad, sums)
    by_weight, by_bias = (
        None if sums is None or each is None else sums[at].to(each.dtype)
        for at, each in enumerate((of.weight, of.bias))
    )
    return by_x, by_weight, by_bias


def _run(of: HeadRows, grad: Tensor | None, sums: list[Tensor] | None) -> Tensor:
    x, wide = _near(of.x), of.cos.dtype
    grad = None if grad is None else _near(grad)
    weight, bias = (None if each is None else each.to(wide).contiguous() for each in of[1:3])
    cos, sin = of.cos.contiguous(), of.sin.contiguous()
    if of.interleaved:  # one angle for each channel
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    out = like(x)
    by_weight, by_bias = (None, None) if sums is None else sums
    arrays = (x, grad, out, weight, bias, by_weight, by_bias, cos, sin)
    some = bias if weight is None else weight
    strides = (
        *x.stride()[:3],
        *(out if grad is None else grad).stride()[:3],
        *out.stride()[:3],
        x.shape[3] if some is not None and some.dim() == 2 else 0,
        0 if cos.shape[0] == 1 else cos.stride(0),
        cos.stride(1),
    )
    core().head_rows(
        DTYPES[x.dtype],
        threads(),
        (*x.shape, int(of.centred), 2 * of.cos.shape[-1], int(of.interleaved)),
        strides,
        tuple(0 if each is None else each.data_ptr() for each in arrays),
        of.eps,
    )
    return out


def like(x: Tensor) -> Tensor:
    """Return new rows in the layout of ``x``, with the channels of a row one after the other."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else x.new_empty(x.shape)


def _near(x: Tensor) -> Tensor:
    """Return ``x`` with the channels of a row one after the other, and its sign in its numbers."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


class InCore(InPlace):
    """The two steps of ``RowKernel`` over CPU tensors."""

    def run(self, rows: Rows, losses: Tensor | None, lse: Tensor, first: int, words: int) -> None:
        """See ``InPlace``."""
        logits, targets, scales, loss = rows
        # The core believes these.
        assert logits.stride(1) == 1
        assert all(each is None or each.is_contiguous() for each in (targets, losses, lse, scales))
        sizes = (*logits.shape, logits.stride(0), first, words)
        arrays = (logits, targets, losses, lse, scales)
        addresses = tuple(0 if each is None else each.data_ptr() for each in arrays)
        core().cross_entropy(DTYPES[logits.dtype], threads(), sizes, addresses, *loss)
