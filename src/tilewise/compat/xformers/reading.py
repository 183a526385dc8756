"""What a bias says, read from xformers' classes or from those of ``attn_bias`` by their attributes.

A bias is a band of keys for each row, and perhaps sequences that rows and keys are divided into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import named
from tilewise.errors import InvalidType, Unsupported
from tilewise.variants import masks


class Band(NamedTuple):
    """Keys that a row sees: a + m - left to a + m + right (``masks.window``); None for no bound."""

    left: int | None = None
    right: int | None = None
    align: str = "bottom_right"

    def mask(self) -> masks.Mask | None:
        """Return it as a mask."""
        if self.left is None and self.right is None:
            return None
        return masks.window(*self)

    def pairs(self, queries: int, keys: int) -> Tensor:
        """Return it as booleans [queries, keys]."""
        apart = keys - queries if self.align == "bottom_right" else 0
        ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + apart)
        found = torch.ones_like(ahead, dtype=torch.bool)
        if self.left is not None:
            found &= ahead >= -self.left
        if self.right is not None:
            found &= ahead <= self.right
        return found


class Keys(NamedTuple):
    """Where the keys of sequences lie among rows, which may be more.

    Args:
        starts: int32 [B]: the first key, a row or a place in pages.
        lengths: int32 [B]: how many there are.
        total: the sum of the lengths, on the host.
        longest: the largest length.
        table: integer [B, P]: place p of sequence b is row ``p % page`` of page
            ``table[b, p // page]``; None where places are rows.
        page: rows in a page; without a table, the pieces of rows that sequences begin at, or 1.
    """

    starts: Tensor
    lengths: Tensor
    total: int
    longest: int
    table: Tensor | None = None
    page: int = 1

    def rows(self) -> Tensor:
        """Return the rows of all keys, one sequence after the other: int64 [total]."""
        device, count = self.lengths.device, self.lengths.shape[0]
        every = torch.arange(count, device=device)
        owner = every.repeat_interleave(self.lengths, output_size=self.total)
        first = self.lengths.cumsum(0) - self.lengths
        at = torch.arange(self.total, device=device) + (self.starts.long() - first)[owner]
        if self.table is None:
            return at
        return self.table[owner, at // self.page].long() * self.page + at % self.page


class Reading(NamedTuple):
    """A bias.

    Args:
        band: which keys of its sequence a row sees.
        added: a tensor that is added to the scores, or None.
        starts_q: int32 [B + 1] of the rows of sequences; None where the batch is one.
        starts_k: likewise of the keys; None where ``keys`` says it.
        keys: where the keys of sequences lie; None where one follows the other.
    """

    band: Band = Band()
    added: Tensor | None = None
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None
    keys: Keys | None = None


def _everything(bias: Any) -> Band:
    return Band()


def _causal(bias: Any) -> Band:
    return Band(None, 0)


def _causal_first(bias: Any) -> Band:
    return Band(None, 0, "top_left")


def _local(bias: Any) -> Band:
    return Band(bias._window_size - 1, 0)


def _local_first(bias: Any) -> Band:
    return Band(bias._window_size - 1, 0, "top_left")


def _between(bias: Any) -> Band:
    return Band(bias.window_left, bias.window_right)


_BANDS: dict[str, Callable[[Any], Band]] = {
    "LowerTriangularMask": _causal_first,
    "LowerTriangularMaskWithTensorBias": _causal_first,
    "LowerTriangularFromBottomRightMask": _causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _local,
    "LocalAttentionFromBottomRightMask": _between,
    "BlockDiagonalMask": _everything,
    "BlockDiagonalCausalMask": _causal_first,
    "BlockDiagonalCausalFromBottomRightMask": _causal,
    "BlockDiagonalCausalLocalAttentionMask": _local_first,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _local,
    "BlockDiagonalPaddedKeysMask": _everything,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _causal,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _between,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _local,
    "BlockDiagonalGappyKeysMask": _everything,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _causal,
    "PagedBlockDiagonalPaddedKeysMask": _everything,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _causal,
    "PagedBlockDiagonalGappyKeysMask": _everything,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _causal,
}
NAMES = tuple(_BANDS)


def read(bias: Any) -> Reading:
    """Return what a bias says: None, a tensor, or an object of a class of ``attn_bias``.

    Raises:
        InvalidType: it is nothing of the kind.
        Unsupported: its class is another that derives from xformers'.
    """
    if bias is None:
        return Reading()
    if isinstance(bias, Tensor):
        return Reading(added=bias)
    kind = type(bias)
    if not (_is_known(kind) and kind.__name__ in _BANDS):
        if any(_is_known(each) for each in kind.__mro__):
            fix = "pass a mask or a score to tilewise.attention"
            raise Unsupported(f"the bias {kind.__name__}: what it changes is not known", fix=fix)
        required = "None, a floating tensor, or a bias of xformers.ops.fmha.attn_bias"
        raise InvalidType("attn_bias", named(bias), required)
    band = _BANDS[kind.__name__](bias)
    if not hasattr(bias, "q_seqinfo"):
        return Reading(band, getattr(bias, "_bias", None))
    rows, keys = bias.q_seqinfo.seqstart, bias.k_seqinfo
    if not hasattr(keys, "seqlen"):
        return Reading(band, None, rows, keys.seqstart)
    return Reading(band, None, rows, None, _keys_of(bias))


def _is_known(kind: type) -> bool:
    *_, last = names = kind.__module__.split(".")
    return last == "attn_bias" and "xformers" in names


def _keys_of(bias: Any) -> Keys:
    info = bias.k_seqinfo
    table, padding = getattr(bias, "block_tables", None), getattr(info, "padding", None)
    starts, lengths, total = info.seqstart[:-1], info.seqlen, sum(info.seqlen_py)
    if table is not None and padding is not None:  # places count from the first page of each
        starts = torch.zeros_like(lengths)
    elif table is not None:
        lengths, total = lengths - starts, total - sum(info.seqstart_py[:-1])
    longest = info.max_seqlen
    if lengths.is_cpu and lengths.numel():  # somebody may have written into the tensor alone
        total, longest = int(lengths.sum()), int(lengths.max())
    page = padding or 1 if table is None else bias.page_size
    return Keys(starts, lengths, total, longest, table, page)
