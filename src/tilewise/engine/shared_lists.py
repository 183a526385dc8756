"""Key lists of neighbouring query rows as one list, where they name the same keys.

A list for each row makes small problems of few rows, and copying and packing a key then costs more
than its products. Neighbouring rows of a trained indexer read mostly the same keys. So R rows take
the union of their lists, every key of it is read once for all of them, and a mask hides from a row
what its own list does not name.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine.key_lists import (
    Groups,
    Listed,
    Rows,
    block_counts,
    key_counts,
    row_groups,
)
from tilewise.problem import Problem

# Reading and packing a key costs as much as its products with so many rows: measured forward, and
# three to six times less than it costs backward (notes/performance-log.md).
_PACKING = 4
MOST_ROWS = 16  # a row is a bit of ``readers``
_WORTH = 0.8  # of the cost of lists for single rows: what a union must stay below
_MARKED = 8  # blocks of a sequence for each listed one of a union, at most
_LOOKED_AT = 4  # groups of rows that the choice is made by
# Listed keys of an item from which on its rows may share: making unions takes 2 to 4 ms of a call.
_LEAST_KEYS = 1 << 13
_NUMBERS = 1 << 20  # of marks at a time (one for each key of a sequence), and of listed keys
# The width of a union is a multiple of 16, and has so many bits beyond the first.
_LEAST_UNIT, _EIGHTHS = 16, 3


class Shared(NamedTuple):
    """Batch items or sequences in which R rows share a list each.

    Args:
        items: int64 [some], which.
        rows: R, rows.
        groups: the T groups of rows of these items.
        listed: as ``key_lists.Listed``, of these groups.
        readers: int32 [T, Hk or 1, K]; bit r is set where row r of the group reads the block. None
            where R is 1.
    """

    items: Tensor
    rows: int
    groups: Groups
    listed: Listed
    readers: Tensor | None


class _Union(NamedTuple):
    """What the rows of some groups read together.

    Args:
        blocks: int64 [some], of the first group and head in ascending order, then of the next.
        bits: int32 [some], a bit for each row that reads the block.
        sizes: int64 [groups, Hk or 1], how many blocks.
    """

    blocks: Tensor
    bits: Tensor
    sizes: Tensor


def may_share(problem: Problem, rows: int, width: int, device: torch.device) -> bool:
    """Return whether rows of a call may share lists; ``rows`` do already.

    On a device nobody waits to know what lists name. ``width`` is how many keys a list has room
    for.
    """
    few = problem.heads // problem.kv_heads < 2 * _PACKING
    enough = problem.queries * width >= _LEAST_KEYS
    return few and enough and rows == 1 < problem.queries and device.type == "cpu"


def shared(
    listed: Listed, heads: int, queries: Tensor, lengths: Tensor, block: int
) -> list[Shared]:
    """Return a batch in parts in which equally many rows share a list; [] if no rows should.

    A part and the width of its lists follow from the lists of an item alone. So an item has the
    same bits whatever else is in the batch.

    Args:
        listed: a list for each query row, item after item.
        heads: that share a key head.
        queries: int64 [B], rows of each batch item or sequence.
        lengths: int64 [B], its keys.
        block: keys in a block.
    """
    limits = block_counts(lengths, block)
    every = rows_together(listed.indices, queries, limits, heads, block)
    if max(every, default=1) == 1:
        return []
    found: list[Shared] = []
    for rows in sorted(set(every)):
        items = torch.tensor(
            [item for item, its in enumerate(every) if its == rows], device=queries.device
        )
        groups = row_groups(queries, lengths, rows, items)
        of_groups = Rows.of(groups, queries, rows)
        if rows == 1:
            own = of_groups.places[:, 0]
            one = Listed(listed.indices[own], listed.counts[own])
            found.append(Shared(items, 1, groups, one, None))
        else:
            found += _together(listed.indices, items, groups, of_groups, block)
    return found


def rows_together(
    sets: Tensor, queries: Tensor, limits: Tensor, heads: int, block: int = 1
) -> list[int]:
    """Return how many neighbouring rows of each batch item should share a list: powers of two.

    It depends on the lists of the item alone.

    Args:
        sets: int32 [T, Hk or 1, K] of ``Listed``, a list for each query row, item after item.
        queries: int64 [B], rows of each batch item or sequence.
        limits: int32 [B], its blocks.
        heads: that share a key head.
        block: keys in a block.
    """
    width, device = sets.shape[-1], sets.device
    items, firsts, ends = [], [], []
    for number, (many, limit) in enumerate(zip(queries.tolist(), limits.tolist(), strict=True)):
        most = min(MOST_ROWS, 1 << max(many, 1).bit_length() - 1)
        # A union looks at a mark for each block of the sequence.
        if most == 1 or limit > _MARKED * most * width or many * width * block < _LEAST_KEYS:
            continue
        # Some groups of the most rows, evenly from all of them.
        whole = many // most
        count = min(_LOOKED_AT, whole)
        for at in range(count):
            items.append(number)
            firsts.append(at * (whole - 1) // max(count - 1, 1) * most)
            ends.append(firsts[-1] + most)
    if not items or not sets.numel():
        return [1] * len(queries)
    item, first, end = (torch.tensor(each, device=device) for each in (items, firsts, ends))
    looked_at = Groups(item, first, end, limits[item])
    costs = {
        1 << power: torch.zeros(len(queries), dtype=torch.float64, device=device)
        for power in range(MOST_ROWS.bit_length())
    }
    for part, union in _unions(sets, looked_at, Rows.of(looked_at, queries, MOST_ROWS)):
        of_block = item[part].repeat_interleave(union.sizes.sum(dim=1))
        for rows, cost in costs.items():
            wanted = (1 << rows) - 1
            seen = torch.zeros_like(union.bits)
            for at in range(0, MOST_ROWS, rows):
                seen += union.bits & wanted << at != 0
            found = torch.bincount(of_block, seen, minlength=len(queries))
            cost += found * (_PACKING + rows * heads)
    by_rows = {rows: cost.tolist() for rows, cost in costs.items()}
    chosen = []
    for at, limit in enumerate(limits.tolist()):
        best = min(by_rows, key=lambda rows: by_rows[rows][at])
        pays = by_rows[best][at] < _WORTH * by_rows[1][at] and limit <= _MARKED * best * width
        chosen.append(best if pays else 1)
    return chosen


def _together(
    sets: Tensor, items: Tensor, groups: Groups, rows: Rows, block: int
) -> Iterator[Shared]:
    """Yield the unions of the lists of neighbours, a part for each width of them.

    Args:
        sets: int32 [all rows, Hk or 1, K] of ``Listed``.
        items: int64 [some], those in which rows share.
        groups: of these items.
        rows: of the groups, at most 16 of each.
        block: keys in a block.
    """
    limits = block_counts(groups.keys, block)
    unions = [union for _, union in _unions(sets, groups._replace(keys=limits), rows)]
    count = torch.cat([union.sizes for union in unions])
    number = torch.searchsorted(items, groups.item)
    widest = count.new_zeros(len(items)).scatter_reduce(0, number, count.amax(1), "amax")
    every = [_rounded(each) for each in widest.tolist()]
    widths = torch.tensor(every, device=sets.device)
    there = torch.arange(max(every), device=sets.device) < count[..., None]
    found = limits[:, None, None].expand(there.shape).clone()
    found[there] = torch.cat([union.blocks for union in unions]).to(torch.int32)
    readers = torch.zeros_like(found)
    readers[there] = torch.cat([union.bits for union in unions])
    counts = key_counts(found, limits[:, None, None], block, groups.keys)
    for wide in sorted(set(every)):
        own = (widths == wide)[number]
        of_lists = Listed(found[own][..., :wide].contiguous(), counts[own])
        mine = Groups(*(each[own] for each in groups))
        of_rows = readers[own][..., :wide]
        yield Shared(items[widths == wide], rows.there.shape[1], mine, of_lists, of_rows)


def _rounded(width: int) -> int:
    """Return a width that more batch items have: items of one width are one problem."""
    unit = max(_LEAST_UNIT, 1 << max(width.bit_length() - 1 - _EIGHTHS, 0))
    return max(-(-width // unit), 1) * unit


def _unions(sets: Tensor, groups: Groups, rows: Rows) -> Iterator[tuple[slice, _Union]]:
    """Yield which rows of groups read a block, for some groups at a time.

    Args:
        sets: int32 [all rows, Hk or 1, K], sets of blocks.
        groups: whose ``keys`` are blocks here; a number from there on is no block.
        rows: of the groups.
    """
    heads, width = sets.shape[1:]
    many = rows.there.shape[1]
    ends = (groups.keys.long().clamp(min=many * width) * heads).cumsum(0)
    start = 0
    for size in ends.div(_NUMBERS, rounding_mode="floor").bincount().tolist():
        part = slice(start, start + size)
        if size:
            yield part, _union(sets, Rows(*(each[part] for each in rows)), groups.keys[part])
        start += size


def _union(sets: Tensor, rows: Rows, limits: Tensor) -> _Union:
    """Return which rows of groups read a block, by a mark for each block of their sequences."""
    groups, many = rows.there.shape
    heads, width = sets.shape[1:]
    edges = limits.new_zeros(groups * heads + 1, dtype=torch.int64)
    torch.cumsum(limits.repeat_interleave(heads), 0, out=edges[1:])
    total = int(edges[-1])
    # Three times as fast as ``sets[rows.places]``.
    named = sets.index_select(0, rows.places.flatten()).view(groups, many, heads, width)
    read = (named < limits[:, None, None, None]) & rows.there[..., None, None]
    at = torch.where(read, named + edges[:-1].view(groups, 1, heads, 1), total)
    bits = torch.arange(many, dtype=torch.int32, device=sets.device)
    bits = torch.ones_like(bits) << bits
    marks = torch.zeros(total + 1, dtype=torch.int32, device=sets.device)
    # A set names a block once, so the sum of its bits is their union.
    every = bits[:, None, None].expand(groups, many, heads, width)
    marks.scatter_add_(0, at.flatten(), every.reshape(-1))
    marked = marks[:total].nonzero()[:, 0]
    sizes = torch.searchsorted(marked, edges).diff()
    blocks = marked - edges[:-1].repeat_interleave(sizes)
    return _Union(blocks, marks[marked], sizes.view(groups, heads))
