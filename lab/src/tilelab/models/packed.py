"""Sequences of different lengths as one, so that no layer computes padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument

__all__ = ["Packed", "pack"]


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
