"""How xformers' biases divide rows and keys into sequences: starts, lengths, and their copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument

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
    """Sequences one after the other: number i has the rows seqstart[i] to seqstart[i + 1].

    Args:
        seqstart: int32 [sequences + 1].
        max_seqlen: the largest length.
        min_seqlen: the smallest.
        seqstart_py: the starts again, as numbers.
    """

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

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
        """Return x [1, rows, ...] in pieces, each of as many sequences as a batch size says.

        Raises:
            InvalidArgument: x has other rows.
        """
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
    """Sequences with room behind them: number i has seqlen[i] rows from seqstart[i] on.

    Args:
        seqlen: int32 [sequences].
        seqlen_py: the lengths again, as numbers.
    """

    seqlen: Tensor
    seqlen_py: list[int]

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
        """Return sequences of these lengths, in as many pieces of ``padding`` rows.

        Raises:
            InvalidArgument: one is longer.
        """
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

        Args:
            seqstarts: of each sequence; unless paged also the number of all rows.
            seqlens: of each sequence.
            paged: the starts count within pages.
            device: of the tensors.

        Raises:
            InvalidArgument: they differ in number.
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
