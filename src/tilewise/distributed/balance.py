"""Layouts that share the work of a mask evenly, by the mask's own count of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.checks import check_whole
from tilewise.distributed.attention import whole_call
from tilewise.distributed.layout import Layout, assigned, even_bounds
from tilewise.distributed.parts import Starts, Whole
from tilewise.engine.call import read_keywords
from tilewise.functional import MaskLike
from tilewise.problem import Problem
from tilewise.validation import check_cu_seqlens, check_cu_tensors
from tilewise.variants.values import Mask, as_mask

_MOST_TILES = 128  # of rows, and of keys, that are looked at


def balanced_layout(
    length: int,
    positions: int,
    *,
    mask: MaskLike = None,
    cu_seqlens: Tensor | None = None,
    batch: int = 1,
    heads: int = 1,
    chunks: int = 4,
) -> Layout:
    """Return a layout in which all positions have about the same work under a mask.

    The sequence is cut into ``chunks`` runs of rows for each position. The work of a run is the
    number of pairs that its rows see, counted over at most 128 x 128 tiles; a tile of which the
    mask hides some pairs counts half. The heaviest run goes to the position with the least work so
    far that has room for it (Graham, 1969).

    Args:
        length: rows of the sequence, and keys.
        positions: how many share it.
        mask: as in ``attention``, with its tensors for the whole sequence.
        cu_seqlens: int32 or int64 [sequences + 1] of packed sequences, as in ``attention_varlen``;
            None for a dense call.
        batch: B, where the mask tells batch items apart.
        heads: Hq, where it tells heads apart.
        chunks: of each position. More of them share the work better, and make smaller calls.

    Raises:
        InvalidArgument, InvalidType: as ``attention``; counts below 1.
    """
    check_whole("length", length, 0)
    runs = check_whole("chunks", chunks, 1) * check_whole("positions", positions, 1)
    whole = _whole(length, mask, cu_seqlens, batch, heads)
    bounds = even_bounds(length, runs)
    columns = even_bounds(length, min(_MOST_TILES, max(length, 1)))
    work = []
    for run in range(runs):
        tiles = -(-_MOST_TILES // runs)
        rows = [bounds[run] + each for each in even_bounds(bounds[run + 1] - bounds[run], tiles)]
        work.append(sum(_pairs(whole, m, n) for m in _spans(rows) for n in _spans(columns)))
    return Layout(bounds, assigned(work, positions), positions)


def _spans(bounds: list[int] | tuple[int, ...]) -> list[range]:
    return [range(*bounds[at : at + 2]) for at in range(len(bounds) - 1)]


def _pairs(whole: Whole, rows: range, columns: range) -> float:
    """Return about how many pairs some rows see of some keys."""
    return sum(
        piece.problem.queries * piece.problem.keys / (2 if piece.problem.mask else 1)
        for piece in whole.pieces(rows, columns)
    )


def _whole(length: int, mask: MaskLike, cu_seqlens: Tensor | None, batch: int, heads: int) -> Whole:
    read = Mask(()) if mask is None else as_mask(mask)
    starts = None
    if cu_seqlens is not None:
        check_cu_tensors(cu_seqlens, cu_seqlens)
        found = tuple(check_cu_seqlens("cu_seqlens", cu_seqlens, length))
        starts, batch = Starts(found, found), len(found) - 1
    problem = Problem(
        *(batch, heads, 1, length, length, 1, 1, torch.float32, "cpu"),
        "dense" if starts is None else "varlen",
        *(read.program, (), 1.0, 0.0, False),
    )
    here = Mask(read.program, tuple([each.cpu() for each in read.captured]))
    keywords = read_keywords(here, None, None, 0.0, None, None)
    return whole_call(problem, keywords, starts, 0, torch.device("cpu"))
