"""Rows of logits as losses and gradients, in Triton: in place, in their own dtype.

One program has one row, and walks over it in chunks of words: once for the loss, and once more for
the gradient. Arithmetic is in float32. Nothing is added across programs, so the same logits give
the same bits.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018. There a chunk has
one maximum; here each lane has its own until the row ends, so no chunk waits for a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.cross_entropy import InPlace, Loss, Rows
from tilewise.kernels.gpu import Launch, run
from tilewise.kernels.gpu.backend import device_of
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.expressions.words import tangent
from tilewise.kernels.gpu.walk.pairs import LOG2E
from tilewise.kernels.gpu.walk.tiles import launch_of

_LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)
# Of a chunk: 8 numbers a thread of each vector that is kept; 16 spill on sm_90a and sm_100a.
_MOST_WORDS, _WARPS = 2048, 8


@triton.jit
def _read(z, column, inside, cap, CAPPED: tl.constexpr):
    """Return logits after the softcap in float32, and the softcap's derivative (without one, 1)."""
    x = tl.load(z + column, mask=inside, other=float("-inf")).to(tl.float32)
    slope = 1.0
    if CAPPED:
        t = tangent(x / cap)
        x = t * cap
        slope = 1.0 - t * t
    return x, slope


@triton.jit
def _sums(z, columns, cap, BLOCK: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr):
    """Return (top, log sum_v exp(z_v - top), sum_v z_v) of a row; the last only if SMOOTHED."""
    lane = tl.arange(0, BLOCK)
    # Not -inf: its difference from a logit of -inf would be nan.
    tops = tl.full([BLOCK], _LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + lane < columns
        x, _ = _read(z, first + lane, inside, cap, CAPPED)
        if CAPPED:
            x = tl.where(inside, x, float("-inf"))  # the softcap has made -cap of it
        # One of the two exponents is 0, so one exponential rescales the sum or enters it. A nan
        # is above nothing, and enters.
        above = x > tops
        e = tl.exp2(-tl.abs(x - tops) * LOG2E)
        sums = tl.where(above, sums * e + 1.0, sums + e)
        tops = tl.where(above, x, tops)
        if SMOOTHED:
            totals += tl.where(inside, x, 0.0)
    top = tl.max(tops, 0)
    return top, tl.log(tl.sum(sums * tl.exp2((tops - top) * LOG2E), 0)), tl.sum(totals, 0)


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    scales,
    losses,
    lse,
    sizes,
    loss,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
):
    """Write the loss and the lse of a row (with ``losses``), then its gradient (with ``scales``).

    ``sizes`` are the stride of the rows, their words, the first of these, and the whole vocabulary.
    ``loss`` is a ``Loss``.
    """
    stride, columns, first, words = sizes
    ignore_index, smoothing, z_loss, cap = loss
    row = tl.program_id(0).to(tl.int64)  # times the stride it passes 2^31
    z = logits + row * stride
    target = tl.load(targets + row)
    kept = target != ignore_index
    at = target - first
    here = (at >= 0) & (at < columns)
    at = tl.where(here, at, -1).to(tl.int32)
    if losses is not None:
        # Read before the gradient overwrites it: the reductions of ``_sums`` are a barrier between.
        own, _ = _read(z, at, here, cap, CAPPED)
        top, log_sum, total = _sums(z, columns, cap, BLOCK, CAPPED, SMOOTHED)
        base = top + log_sum
        # Not ``base - own``: where the target has the top logit, that rounds a small loss to 0.
        found = (top - own) + log_sum
        if SMOOTHED:
            found += smoothing * (own - total / columns)
        found += z_loss * base * base
        found = tl.where(here, found, float("nan"))
        tl.store(losses + row, tl.where(kept, found, 0.0))
        tl.store(lse + row, base)
    else:
        base = tl.load(lse + row)
    if scales is not None:
        scale = tl.load(scales + row)
        factor = scale * (1.0 + 2.0 * z_loss * base)
        even = scale * smoothing / words
        less = scale * (1.0 - smoothing)
        lane = tl.arange(0, BLOCK)
        for begin in range(0, columns, BLOCK):
            column = begin + lane
            inside = column < columns
            x, slope = _read(z, column, inside, cap, CAPPED)
            ds = tl.exp2((x - base) * LOG2E) * factor - even
            ds = (ds - tl.where(column == at, less, 0.0)) * slope
            # A row that is ignored may have any logits, nan too.
            ds = tl.where(kept, ds, 0.0)
            tl.store(z + column, ds.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_launches(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    scales: Tensor | None,
    loss: Loss,
    first: int,
    words: int,
) -> Sequence[Launch]:
    """Return the launches of a step of ``RowKernel``.

    Args:
        logits: float32, bfloat16 or float16 [T', V'], rows with any stride; with ``scales`` they
            become their gradients.
        targets: int64 [T'].
        losses: float32 [T'], written; None where ``lse`` is known.
        lse: float32 [T'], written with ``losses``, else read.
        scales: float32 [T'], or None for no gradients.
        loss: the loss.
        first: which word the first column is.
        words: V, words of the vocabulary.
    """
    rows, columns = logits.shape
    assert logits.stride(1) == 1
    assert all(x is None or x.is_contiguous() for x in (targets, losses, lse, scales))
    arguments = {
        "logits": logits,
        "targets": targets,
        "scales": scales,
        "losses": losses,
        "lse": lse,
        "sizes": (logits.stride(0), columns, first, words),
        "loss": tuple(loss),
    }
    block = min(_MOST_WORDS, triton.next_power_of_2(columns))
    constants = {"BLOCK": block, "CAPPED": loss.softcap > 0, "SMOOTHED": loss.label_smoothing > 0}
    blocks = Blocks(1, block, _WARPS, 1)
    return [launch_of(cross_entropy_kernel, (rows,), arguments, constants, blocks)]


class InTriton(InPlace):
    """The two steps of ``RowKernel`` over tensors of a GPU."""

    def run(self, rows: Rows, losses: Tensor | None, lse: Tensor, first: int, words: int) -> None:
        """See ``InPlace``."""
        logits, targets, scales, loss = rows
        with device_of(logits):
            run(cross_entropy_launches(logits, targets, losses, lse, scales, loss, first, words))
