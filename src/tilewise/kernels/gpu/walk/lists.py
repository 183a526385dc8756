"""List the tiles that a BlockMask keeps, on the device and without reading a value.

The input is a table of rectangles (the operations ``tiles`` and ``blocks``). For every row of a
kernel's own tiles it becomes the list of tiles to visit. The full ones, which need no mask, come
first, then the partial ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.kernels.gpu.expressions import Table
from tilewise.kernels.gpu.replay import renewed
from tilewise.problem import Operands, Problem

# By a mask's table: lists by what they depend on, and the other tables of the mask, whose ids are
# part of that. A pass has one; a few sizes of calls may share a table.
_KEPT = WeakTensorKeyDictionary()
_MOST = 16


class TileLists(NamedTuple):
    """Which tiles to visit.

    Args:
        order: int32 [B|1, Hq|1, rows, columns]: of each row of tiles the columns of the full ones,
            then of the partial ones, both rising, then the others.
        counts: int32 [B|1, Hq|1, rows, 2]: how many are full, and how many partial.
    """

    order: Tensor
    counts: Tensor

    def numbers(self) -> tuple[int, ...]:
        """Strides of batch item and head in ``order`` and ``counts`` (0 where one serves all)."""
        return tuple(
            0 if tensor.shape[dim] == 1 else tensor.stride(dim) for tensor in self for dim in (0, 1)
        )


def tile_lists(
    problem: Problem,
    operands: Operands,
    tables: Sequence[Table],
    queries: int,
    keys: int,
    by_keys: bool = False,
) -> TileLists | None:
    """Return the lists for tiles of ``queries`` x ``keys``, or None where the mask has no table.

    They are made once for a table of a dense call, and again when it is changed in place. Where
    lengths are on the device, and in a CUDA graph, which may be replayed with other values, every
    call makes its own. A tile that reaches past the last query or key is never full: kernels
    bound it as they mask it.

    Args:
        problem: with the mask.
        operands: with its tensors, and the lengths of a variable-length call.
        tables: what the emitter found (``Variant.tables``).
        queries: the rows of a tile.
        keys: its columns.
        by_keys: whether a list is wanted for each tile of keys, of tiles of queries.
    """
    if not tables:
        return None
    covers = [operands.mask_tensors[table.slot] for table in tables]
    lengths = operands.cu_seqlens_q, operands.cu_seqlens_k, operands.key_lengths
    sizes = queries, keys, by_keys
    return renewed(_kept, (*lengths, *covers), problem, tuple(tables), sizes)


def _kept(
    sources: tuple[Tensor, ...],
    problem: Problem,
    tables: tuple[Table, ...],
    sizes: tuple[int, int, bool],
) -> TileLists:
    """Return the lists that are kept, or make them; arguments are as ``tile_lists`` hands them."""
    covers = sources[3:]
    device = covers[0].device
    on_gpu = device.type == "cuda"
    changing = any(x is not None for x in sources[:3]) or any(x.is_inference() for x in covers)
    if changing or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return _made(sources, problem, tables, *sizes)
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    known = tuple([(id(each), each._version) for each in covers])
    key = (*sizes, problem.queries, problem.keys, problem.page_size, tables, known, stream)
    found = _KEPT.setdefault(covers[0], {})
    if key not in found:
        while len(found) >= _MOST:
            del found[next(iter(found))]
        found[key] = _made(sources, problem, tables, *sizes), covers[1:]
    lists: TileLists = found[key][0]
    return lists


def _made(
    sources: tuple[Tensor | None, ...],
    problem: Problem,
    tables: Sequence[Table],
    queries: int,
    keys: int,
    by_keys: bool,
) -> TileLists:
    """Make the lists of ``tile_lists``."""
    cu_seqlens_q, cu_seqlens_k, key_lengths, *covers = sources
    full = some = None
    for table, held in zip(tables, covers, strict=True):
        assert held is not None
        least, most = _coarse(problem, held, table, queries, keys)
        one_full = (least == 2) if table.whole else torch.zeros_like(least, dtype=torch.bool)
        full = one_full if full is None else full | one_full
        some = most > 0 if some is None else some & (most > 0)
    assert full is not None
    assert some is not None
    counts_q, counts_k = (None if cu is None else cu.diff() for cu in (cu_seqlens_q, cu_seqlens_k))
    if key_lengths is not None:
        counts_k = key_lengths.clamp(0, problem.keys)  # as kernels do
    past = _past(problem.queries, counts_q, queries, full, 2)
    full = full & some & ~(past | _past(problem.keys, counts_k, keys, full, 3))
    partial = some & ~full
    if by_keys:
        full, partial = full.transpose(2, 3), partial.transpose(2, 3)
    kinds = 2 - 2 * full.to(torch.int8) - partial.to(torch.int8)
    order = torch.sort(kinds, dim=3, stable=True).indices.to(torch.int32).contiguous()
    counts = torch.stack([full.sum(3), partial.sum(3)], dim=3).to(torch.int32)
    return TileLists(order, counts)


def _coarse(
    problem: Problem, covers: Tensor, table: Table, queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Return the least and the most that a table says of the rectangles that each tile touches."""
    if covers.dtype is torch.bool:  # of ``blocks``
        covers = covers.to(torch.uint8) * 2
    least = most = covers
    dense = problem.layout == "dense"
    for dim, rectangle, tile, size, exact in (
        (2, table.queries, queries, problem.queries, dense),
        (3, table.keys, keys, problem.keys, dense and not problem.page_size),
    ):
        held = covers.shape[dim]
        tiles = -(-(size if exact else held * rectangle) // tile)
        if rectangle == tile or not held:
            continue
        start = torch.arange(tiles, device=covers.device) * tile
        last = ((start + (tile - 1)) // rectangle).clamp_(max=held - 1)
        touched = 1 if rectangle % tile == 0 else (tile - 2) // rectangle + 2
        steps = torch.arange(touched, device=covers.device)
        places = torch.minimum((start // rectangle)[:, None] + steps, last[:, None])
        least = _gathered(least, dim, places).amin(dim + 1)
        most = _gathered(most, dim, places).amax(dim + 1)
    return least, most


def _gathered(covers: Tensor, dim: int, places: Tensor) -> Tensor:
    return covers.index_select(dim, places.flatten()).unflatten(dim, places.shape)


def _past(size: int, counts: Tensor | None, tile: int, like: Tensor, dim: int) -> Tensor:
    """Return which tiles reach past the end; broadcasts against ``like`` along ``dim``."""
    ends = torch.arange(1, like.shape[dim] + 1, device=like.device) * tile
    shape = [1, 1, 1, 1]
    shape[dim] = like.shape[dim]
    past = ends.view(shape)
    if counts is None:
        return past > size
    return past > counts[:, None, None, None]
