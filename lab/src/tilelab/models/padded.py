"""Attention over packed sequences by implementations that need padding, which is masked.

Dimensions: B sequences, T tokens of all of them, S tokens of the longest, H heads of D channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tilelab.models.packed import Packed
from tilewise import masks
from tilewise.inspect.calls import Block, lowered, visible

__all__ = ["attend", "seen"]


def seen(packed: Packed, mask: masks.Mask | None, heads: int) -> Tensor:
    """Return who sees whom: bool [B, 1, 1, S] for padding alone, [B, H or 1, S, S] with a mask.

    Args:
        packed: the sequences, on the device of the result.
        mask: who of a sequence sees whom in it; None for everybody.
        heads: H.
    """
    batch, longest = len(packed.borders) - 1, packed.longest
    real = torch.zeros(batch * longest, dtype=torch.bool, device=packed.tokens.device)
    real = real.index_fill(0, packed.padded_rows(), True).view(batch, 1, 1, longest)
    if mask is None:
        return real
    rows = torch.empty(1, heads, longest, 1, device=real.device)
    problem, operands = lowered(rows, rows, rows, mask=mask)
    block = Block(range(longest), range(longest), longest, longest, range(1), range(heads))
    allowed = visible(problem.mask, operands.mask_tensors, block, real.device)
    # Padding as a query sees all keys: a row that saw none would be NaN, and reach the gradients.
    return real & (allowed | ~real.transpose(-2, -1))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    allowed: Tensor,
    dropout_p: float,
    implementation: str,
) -> Tensor:
    """Attention of [T, H, D] through [B, H, S, D] with padding.

    Args:
        q: [T, H, D].
        k: likewise.
        v: likewise.
        packed: the sequences.
        allowed: what ``seen`` says of them.
        dropout_p: probability of dropout.
        implementation: ``"sdpa"`` or ``"plain"``.
    """
    rows = packed.padded_rows()
    batch, longest = len(packed.borders) - 1, packed.longest

    def pad(x: Tensor) -> Tensor:
        whole = x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, rows, x)
        return whole.view(batch, longest, *x.shape[1:]).transpose(1, 2)

    q, k, v = pad(q), pad(k), pad(v)
    if implementation == "sdpa":
        out = functional.scaled_dot_product_attention(q, k, v, allowed, dropout_p)
    else:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = functional.dropout(scores.softmax(-1), dropout_p) @ v
    return out.transpose(1, 2).flatten(0, 1)[rows]
