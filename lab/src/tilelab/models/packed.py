"""Sequences of different lengths as one, and attention over them where padding is needed.

Dimensions: B sequences, T tokens of all of them, S tokens of the longest, H heads of D channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.inspect.calls import Block, lowered, visible


class Packed(NamedTuple):
    """Sequences of different lengths, one after the other.

    Args:
        tokens: int64 [T].
        kinds: token types, int64 [T].
        places: the position of each token in its sequence, int64 [T].
        borders: int32 [B + 1]: sequence i has the tokens borders[i] to borders[i + 1].
        longest: tokens of the longest sequence.
    """

    tokens: Tensor
    kinds: Tensor
    places: Tensor
    borders: Tensor
    longest: int

    def to(self, device: torch.device) -> Packed:
        """Return the same on a device."""
        tokens, kinds, places, borders = (each.to(device) for each in self[:4])
        return Packed(tokens, kinds, places, borders, self.longest)

    def padded_rows(self) -> Tensor:
        """Return where each token lies in [B * longest], int64 [T]."""
        at = torch.arange(len(self.tokens), device=self.tokens.device, dtype=self.borders.dtype)
        sequence = torch.bucketize(at, self.borders[1:], right=True)
        return sequence * self.longest + self.places


def pack(rows: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]] | None = None) -> Packed:
    """Sequences as one.

    Args:
        rows: token ids of each sequence, one or more.
        kinds: token types likewise; None for 0.

    Raises:
        InvalidArgument: no sequence, an empty one, or types of other lengths.
    """
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) < 1:
        required = "one sequence or more, each of one token or more"
        raise InvalidArgument("rows", f"lengths {lengths}", required)
    if kinds is not None and [len(row) for row in kinds] != lengths:
        came = f"lengths {[len(row) for row in kinds]}"
        raise InvalidArgument("kinds", came, f"those of rows, {lengths}")
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    types = torch.zeros_like(tokens)
    if kinds is not None:
        types = torch.tensor([kind for row in kinds for kind in row], dtype=torch.int64)
    places = torch.cat([torch.arange(length) for length in lengths])
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Packed(tokens, types, places, borders, max(lengths))


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


def attend_padded(
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
