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

from tilewise.engine.key_lists import Listed, block_counts, key_counts
from tilewise.problem import Problem

# Reading and packing a key costs as much as its products with so many rows: measured forward, and
# three to six times less than it costs backward (notes/performance-log.md).
_PACKING = 4
MOST_ROWS = 16  # a row is a bit of ``readers``
_WORTH = 0.8  # of the cost of lists for single rows: what a union must stay below
_MARKED = 8  # blocks of a sequence for each listed one of a union, at most
_LOOKED_AT = 4  # groups of rows that the choice is made by
_NUMBERS = 1 << 20  # of marks at a time (one for each key of a sequence), and of listed keys
# The width of a union is a multiple of 16, and has so many bits beyond the first.
_LEAST_UNIT, _EIGHTHS = 16, 3


class Shared(NamedTuple):
    """Batch items in which R rows share a list each.

    Args:
        items: int64 [some], which.
        rows: R.
        listed: as ``key_lists.Listed``, of the T groups of rows of these items.
        readers: int32 [T, Hk or 1, K]; bit r is set where row r of the group reads the block. None
            where R is 1.
    """

    items: Tensor
    rows: int
    listed: Listed
    readers: Tensor | None


def may_share(problem: Problem, rows: int, device: torch.device) -> bool:
    """Return whether rows of a call may share lists; ``rows`` do already.

    On a device nobody waits to know what lists name. Packed rows lie in sequences of any length.
    """
    few = problem.heads // problem.kv_heads < 2 * _PACKING
    return (
        few and rows == 1 < problem.queries and problem.layout == "dense" and device.type == "cpu"
    )


def shared(listed: Listed, problem: Problem, lengths: Tensor, block: int) -> list[Shared]:
    """Return a batch in parts in which equally many rows share a list; [] if no rows should.

    A part and the width of its lists follow from the lists of an item alone. So an item has the
    same bits whatever else is in the batch.

    Args:
        listed: a list for each of the B M query rows.
        problem: of a call whose rows may share lists.
        lengths: int64 [B], keys of each sequence.
        block: keys in a block.
    """
    limits = block_counts(lengths, block)
    sets = listed.indices.view(-1, problem.queries, *listed.indices.shape[1:])
    every = rows_together(sets, limits, problem.heads // problem.kv_heads)
    if max(every, default=1) == 1:
        return []
    found: list[Shared] = []
    for rows in sorted(set(every)):
        items = torch.tensor([item for item, its in enumerate(every) if its == rows])
        if rows == 1:
            counts = listed.counts.view(*sets.shape[:3])[items]
            own = Listed(sets[items].flatten(0, 1), counts.flatten(0, 1))
            found.append(Shared(items, 1, own, None))
        else:
            found += _together(sets, items, limits, rows, block, lengths)
    return found


def rows_together(sets: Tensor, limits: Tensor, heads: int) -> list[int]:
    """Return how many neighbouring rows of each batch item should share a list: powers of two.

    It depends on the lists of the item alone.

    Args:
        sets: int32 [B, M, Hk or 1, K] of ``Listed``.
        limits: int32 [B], blocks of each sequence.
        heads: that share a key head.
    """
    batch, many, _, width = sets.shape
    most = min(MOST_ROWS, 1 << max(many, 1).bit_length() - 1)
    # A union looks at a mark for each block of the sequence.
    if not sets.numel() or bool((limits > _MARKED * most * width).all()):
        return [1] * batch
    # Some groups of the most rows, evenly from all of them.
    whole = many // most
    count = min(_LOOKED_AT, whole)
    some = [at * (whole - 1) // max(count - 1, 1) for at in range(count)]
    groups = sets[:, : whole * most].reshape(batch, whole, most, *sets.shape[2:])
    groups = groups[:, some].flatten(0, 1)
    marks = _marks(groups, limits.repeat_interleave(count), int(limits.max()))
    read = marks != 0
    item, marks = read.nonzero()[:, 0].div(count, rounding_mode="floor"), marks[read]
    costs: dict[int, list[float]] = {}
    rows = 1
    while rows <= most:
        wanted = (1 << rows) - 1
        seen = torch.zeros_like(marks)
        for at in range(0, most, rows):
            seen += marks & wanted << at != 0
        found = torch.bincount(item, seen, minlength=batch) * (_PACKING + rows * heads)
        costs[rows] = found.tolist()
        rows *= 2
    chosen = []
    for at, limit in enumerate(limits.tolist()):
        best = min(costs, key=lambda rows: costs[rows][at])
        pays = costs[best][at] < _WORTH * costs[1][at] and limit <= _MARKED * best * width
        chosen.append(best if pays else 1)
    return chosen


def _together(
    sets: Tensor, items: Tensor, limits: Tensor, rows: int, block: int, lengths: Tensor
) -> Iterator[Shared]:
    """Yield the unions of the lists of ``rows`` neighbours, a part for each width of them.

    Args:
        sets: int32 [B, M, Hk or 1, K] of ``Listed``.
        items: int64 [some], those in which rows share.
        limits: int32 [B], blocks of each sequence.
        rows: at most 16; the last group of an item may have fewer.
        block: keys in a block.
        lengths: int64 [B], keys of each sequence.
    """
    sets, limits, lengths = sets[items], limits[items], lengths[items]
    batch, many, heads, width = sets.shape
    groups = -(-many // rows)
    if short := groups * rows - many:
        none = limits[:, None, None, None].expand(batch, short, heads, width)
        sets = torch.cat((sets, none), dim=1)
    sets = sets.view(batch * groups, rows, heads, width)
    limits, lengths = (x.repeat_interleave(groups) for x in (limits, lengths))
    most = int(limits.max())
    size = max(1, _NUMBERS // (heads * max(most, rows * width)))
    keys, bits, sizes = [], [], []
    for start in range(0, len(sets), size):
        part = slice(start, start + size)
        marks = _marks(sets[part], limits[part], most)
        read = marks != 0
        keys.append(read.nonzero()[:, 2])
        bits.append(marks[read])
        sizes.append(read.sum(dim=-1))
    count = torch.cat(sizes)
    widths = [_rounded(each) for each in count.view(batch, -1).amax(1).tolist()]
    there = torch.arange(max(widths)) < count[..., None]
    found = limits[:, None, None].expand(there.shape).clone()
    found[there] = torch.cat(keys).to(torch.int32)
    readers = torch.zeros_like(found)
    readers[there] = torch.cat(bits)
    counts = key_counts(found, limits[:, None, None], block, lengths)
    for wide in sorted(set(widths)):
        mine = torch.tensor([each == wide for each in widths])
        own = mine.repeat_interleave(groups)
        of_lists = Listed(found[own][..., :wide].contiguous(), counts[own])
        yield Shared(items[mine], rows, of_lists, readers[own][..., :wide])


def _rounded(width: int) -> int:
    """Return a width that more batch items have: items of one width are one problem."""
    unit = max(_LEAST_UNIT, 1 << max(width.bit_length() - 1 - _EIGHTHS, 0))
    return max(-(-width // unit), 1) * unit


def _marks(groups: Tensor, limits: Tensor, most: int) -> Tensor:
    """Return which rows read a block: int32 [some, Hk or 1, most], a bit for a row.

    Args:
        groups: int32 [some, rows, Hk or 1, K], sets of blocks.
        limits: int32 [some]; a number from there on is no block.
        most: blocks of the longest sequence.
    """
    some, rows, heads, _ = groups.shape
    named = torch.where(groups < limits[:, None, None, None], groups, most)
    bits = torch.ones((), dtype=torch.int32) << torch.arange(rows, dtype=torch.int32)
    marks = torch.zeros(some, heads, most + 1, dtype=torch.int32)
    # A set names a block once, so the sum of its bits is their union.
    bits = bits[:, None, None].expand(groups.shape[1:])
    marks.scatter_add_(
        2,
        named.transpose(1, 2).flatten(2).long(),
        bits.transpose(0, 1).flatten(1).expand(some, -1, -1),
    )
    return marks[..., :most]
