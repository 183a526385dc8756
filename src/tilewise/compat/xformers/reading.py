"""What a bias says, read from xformers' classes or from those of ``attn_bias`` by their attributes.

A bias is a band of keys for each row, and perhaps sequences that rows and keys are divided into.
The first part says how: starts, lengths, and their copies in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tilewise.checks import named
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.variants import masks

_DTYPE = torch.int32


def on(device: Any = None) -> torch.device:
    """Return a device as xformers chooses it: CUDA where there is some, if None."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def moved(value: Any, device: Any) -> Any:
    """Return a value on a device, if it is something that has one."""
    return value.to(device) if hasattr(value, "to") else value


@dataclass
class _SeqLenInfo:
    """Sequences one after the other: number i has the rows seqstart[i] to seqstart[i + 1]."""

    seqstart: Tensor  # int32 [sequences + 1]
    max_seqlen: int  # the largest length
    min_seqlen: int  # the smallest
    seqstart_py: list[int]  # the starts again, as numbers

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> Self:
        """Return sequences of these lengths."""
        lengths = list(seqlens)
        starts = list(accumulate(lengths, initial=0))
        placed = torch.tensor(starts, dtype=_DTYPE, device=on(device))
        return cls(placed, max(lengths, default=-1), min(lengths, default=-1), starts)

    def to(self, device: Any) -> Self:
        """Return the same with its tensors on a device."""
        return type(self)(**{x.name: moved(getattr(self, x.name), device) for x in fields(self)})

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each sequence and the one behind its last."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return x [1, rows, ...] in pieces, each of as many sequences as a batch size says."""
        rows = self.seqstart_py[-1]
        if x.shape[0] != 1 or x.shape[1] != rows:
            raise InvalidArgument("tensor", f"shape {tuple(x.shape)}", f"[1, {rows}, ...]")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        cuts = [self.seqstart_py[at] for at in accumulate(sizes, initial=0)]
        pieces = torch.split(x, [end - start for start, end in pairwise(cuts)], dim=1)
        return [
            piece.reshape(size, -1, *x.shape[2:]) for size, piece in zip(sizes, pieces, strict=True)
        ]


@dataclass
class _Filled(_SeqLenInfo):
    """Sequences with room behind them: number i has seqlen[i] rows from seqstart[i] on."""

    seqlen: Tensor  # int32 [sequences]
    seqlen_py: list[int]  # the lengths again, as numbers

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each sequence and the one behind its last that is used."""
        for start, length in zip(self.seqstart_py[:-1], self.seqlen_py, strict=True):
            yield start, start + length


@dataclass
class _PaddedSeqLenInfo(_Filled):
    """Sequences of ``padding`` rows each, of which the first seqlen[i] are used."""

    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Any = None
    ) -> Self:
        """Return sequences of these lengths, in as many pieces of ``padding`` rows."""
        lengths, device = list(seqlens), on(device)
        if max(lengths, default=0) > padding:
            raise InvalidArgument("kv_seqlen", str(lengths), f"lengths of at most {padding}")
        starts = [padding * at for at in range(len(lengths) + 1)]
        placed = (torch.tensor(x, dtype=_DTYPE, device=device) for x in (starts, lengths))
        start, length = placed
        return cls(start, max(lengths), min(lengths), starts, length, lengths, padding)


@dataclass
class _GappySeqInfo(_Filled):
    """Sequences anywhere.

    Of pages, seqstart[i] counts within the pages of sequence i, and seqlen[i] is the place behind
    its last key.
    """

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Any = None
    ) -> Self:
        """Return sequences of these starts and lengths.

        ``seqstarts`` count within pages if ``paged``; else they end with the number of all rows.
        """
        starts, lengths, device = list(seqstarts), list(seqlens), on(device)
        if paged:
            starts.append(-1)
        if not lengths or len(starts) != len(lengths) + 1:
            required = f"a start for each of {len(lengths)} sequences"
            required += "" if paged else ", and the number of all rows"
            raise InvalidArgument("kv_seqstarts", f"{len(seqstarts)} numbers", required)
        most, least = max(lengths), min(lengths)
        if paged:
            lengths = [start + x for start, x in zip(starts[:-1], lengths, strict=True)]
        start, length = (torch.tensor(x, dtype=_DTYPE, device=device) for x in (starts, lengths))
        return cls(start, most, least, starts, length, lengths)


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
    """Where the keys of sequences lie among rows, which may be more."""

    starts: Tensor  # int32 [B]: the first key, a row or a place in pages
    lengths: Tensor  # int32 [B]: how many there are
    total: int  # the sum of the lengths, on the host
    longest: int  # the largest length
    # Integer [B, P]: place p of sequence b is row ``p % page`` of page ``table[b, p // page]``;
    # None where places are rows.
    table: Tensor | None = None
    # Rows in a page; without a table, the pieces of rows that sequences begin at, or 1.
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
    """A bias."""

    band: Band = Band()  # which keys of its sequence a row sees
    added: Tensor | None = None  # a tensor that is added to the scores, or None
    # int32 [B + 1] of the rows of sequences; None where the batch is one.
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None  # likewise of the keys; None where ``keys`` says it
    keys: Keys | None = None  # where the keys of sequences lie; None where one follows the other


_EVERYTHING, _CAUSAL, _CAUSAL_FIRST = Band(), Band(None, 0), Band(None, 0, "top_left")
# What a class means without the numbers of its window, which ``read`` takes from the object.
_BANDS = {
    "LowerTriangularMask": _CAUSAL_FIRST,
    "LowerTriangularMaskWithTensorBias": _CAUSAL_FIRST,
    "LowerTriangularFromBottomRightMask": _CAUSAL,
    "LowerTriangularFromBottomRightLocalAttentionMask": _CAUSAL,
    "LocalAttentionFromBottomRightMask": _EVERYTHING,
    "BlockDiagonalMask": _EVERYTHING,
    "BlockDiagonalCausalMask": _CAUSAL_FIRST,
    "BlockDiagonalCausalFromBottomRightMask": _CAUSAL,
    "BlockDiagonalCausalLocalAttentionMask": _CAUSAL_FIRST,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _CAUSAL,
    "BlockDiagonalPaddedKeysMask": _EVERYTHING,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _EVERYTHING,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _CAUSAL,
    "BlockDiagonalGappyKeysMask": _EVERYTHING,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL,
    "PagedBlockDiagonalPaddedKeysMask": _EVERYTHING,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL,
    "PagedBlockDiagonalGappyKeysMask": _EVERYTHING,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL,
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
    band = _BANDS[kind.__name__]
    if hasattr(bias, "_window_size"):
        band = Band(bias._window_size - 1, *band[1:])
    elif hasattr(bias, "window_left"):
        band = Band(bias.window_left, bias.window_right)
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
