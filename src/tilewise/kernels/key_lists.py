"""Key lists by the compiled core, in one pass each: as sets, and where the keys of sets lie.

And rows of a table that lie anywhere, copied together or added to, by the core or by torch: a
backward pass by copies reads lists so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.cpu import DTYPES, absence, core, threads


class Located(NamedTuple):
    """Where the keys of lists lie, as a paged call is told."""

    table: Tensor  # int32 [problems, pages of a list]
    lengths: Tensor  # int32 [problems], the keys of each list
    # int64 [problems, K], which keys these are; None if nobody asked, or for pages of more than one
    # key.
    keys: Tensor | None


def by_core(x: Tensor) -> bool:
    """Return whether the core can read a tensor: it is in memory, and the core is there."""
    return x.is_cpu and absence() is None


def makes_unions(device: torch.device) -> bool:
    """Return whether unions of lists are made there: the core makes them, in memory."""
    return device.type == "cpu" and absence() is None


def key_sets(indices: Tensor, block: int, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return sets and counts, as ``engine.key_lists.Listed``, and where the first mistake is.

    Args:
        indices: int32 or int64 [B, heads, M, K], or packed [heads, T, K]; any strides.
        block: keys of a block.
        lengths: int64 [T], T = B * M, the keys of the sequence of each list.

    Returns:
        int32 [T, heads, K]; int64 [T, heads]; and the place in the flat sets of the first index
        that names nothing and is not -1, or -1.
    """
    many, heads, width = lengths.shape[0], indices.shape[-3], indices.shape[-1]
    sets = torch.empty((many, heads, width), dtype=torch.int32, device="cpu")
    counts = torch.empty((many, heads), dtype=torch.int64, device="cpu")
    if indices.is_neg():  # the core does not see this flag
        indices = indices.resolve_neg()
    wrong = core().key_sets(threads(), block, indices, lengths.contiguous(), sets, counts)
    return sets, counts, wrong


def key_pages(
    sets: Tensor,
    counts: Tensor,
    heads: int,
    sizes: tuple[int, int, int, int],
    steps: tuple[int, int, int],
    item: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    table: Tensor | None,
    with_keys: bool,
) -> Located:
    """Return where the keys of sets lie, for each list and key head.

    Args:
        sets: int32 [T, 1 or heads, K], contiguous; of ``key_sets``.
        counts: int64 [T, 1 or heads], contiguous.
        heads: key heads.
        sizes: keys of a block, of a page, of a head in all, and of a page of ``table``.
        steps: numbers from page to page: outer, head, page.
        item: int64 [T], contiguous as the next three: the batch item or sequence of each list.
        lengths: int64 [T], its keys.
        starts: int64 [items], where packed sequences start; or None.
        table: int32 [items, pages], where keys lie in pages already; or None.
        with_keys: whether to return the keys too, if pages have one key.
    """
    lists, _, width = sets.shape
    block, size, *_ = sizes
    shape = (lists, heads, width * (block // size))
    numbers = torch.empty(shape, dtype=torch.int32, device="cpu")
    own = torch.empty(lists * heads, dtype=torch.int32, device="cpu")
    keys = None
    if with_keys and size == 1:
        keys = torch.empty(shape, dtype=torch.int64, device="cpu")
    where = (item, lengths, starts, table)
    core().key_pages(threads(), sizes, steps, sets, counts, *where, numbers, own, keys)
    flat = (lists * heads, shape[2])
    return Located(numbers.view(flat), own, None if keys is None else keys.view(flat))


def union_sizes(sets: Tensor, first: Tensor, rows: Tensor, limits: Tensor) -> Tensor:
    """Return how many blocks neighbours read together, int64 [groups, heads, 5].

    The unions are those of 1, 2, 4, 8 and 16 rows of a group, added up over the group.

    Args:
        sets: int32 [all rows, heads, K], contiguous; of ``key_sets``.
        first: int64 [groups], where the first row of each group is.
        rows: int64 [groups], how many rows a group has: at most 16.
        limits: int64 [groups], the blocks of its sequence; a number from there on is no block.
    """
    sizes = torch.empty((len(first), sets.shape[1], 5), dtype=torch.int64, device="cpu")
    core().key_unions(threads(), sets, first, rows, limits, sizes, None, None)
    return sizes


def unions(
    sets: Tensor, first: Tensor, rows: Tensor, limits: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return what the rows of groups read together, and who reads it; as ``union_sizes``.

    Returns:
        int32 [groups, heads, width], blocks in ascending order and then the limit; and of the same
        shape the readers: bit r is set where row r of the group reads the block.
    """
    blocks = torch.empty((len(first), sets.shape[1], width), dtype=torch.int32, device="cpu")
    readers = torch.empty_like(blocks)
    core().key_unions(threads(), sets, first, rows, limits, None, blocks, readers)
    return blocks, readers


# Of a table: new memory of fewer bytes is mostly memory that the process had before.
_LARGE_BYTES = 1 << 22


def zero_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape, in large pages where they are many and the system has some.

    A table that large is new memory in each call. By pages of 4 KB the system takes as long to make
    67 MB of it as for three times as much in pages of 2 MB.
    """
    made = torch.empty(like.shape, dtype=dtype, device=like.device)
    if made.nbytes >= _LARGE_BYTES and _rows_by_core(made):
        core().large_pages(made.data_ptr(), made.nbytes)
    return made.zero_()


def copied_rows(table: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows [count, D] of a table [some, D], whose own rows may overlap.

    The numbers of a row are neighbours in memory. ``places`` are int64 [count], and ``out`` is
    contiguous memory for the rows, or None.
    """
    if not _rows_by_core(table):
        if out is None:
            return table.index_select(0, places)
        return torch.index_select(table, 0, places, out=out)
    if out is None:
        out = table.new_empty((len(places), table.shape[1]))
    _run(table, places, out, add=False)
    return out


def add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows [count, D] to those of a table, in their order where several go to one place.

    The table is [some, D] in the dtype of statistics, of rows that do not overlap; ``places`` are
    int64 [count].
    """
    if _rows_by_core(rows):
        _run(table, places, rows.contiguous(), add=True)
    elif table.is_cpu:
        table.index_add_(0, places, rows.to(table.dtype))
    else:  # index_add_ takes atomics there; this sorts
        table.index_put_((places,), rows.to(table.dtype), accumulate=True)


def _rows_by_core(x: Tensor) -> bool:
    return by_core(x) and x.dtype in DTYPES


def _run(table: Tensor, places: Tensor, rows: Tensor, *, add: bool) -> None:
    places = places.contiguous()
    # The core believes these.
    assert table.stride(1) == 1 or table.shape[1] == 1
    assert rows.is_contiguous()
    assert places.dtype == torch.int64
    assert rows.shape == (len(places), table.shape[1])
    arrays = (table.data_ptr(), places.data_ptr(), rows.data_ptr())
    sizes = (len(table), table.stride(0), *rows.shape)
    core().gathered_rows(DTYPES[rows.dtype], threads(), add, sizes, arrays)
