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
from torch.nn import functional

from tilewise.engine.key_lists import Groups, Listed, block_counts, key_counts, row_groups
from tilewise.kernels.key_lists import makes_unions, union_sizes, unions
from tilewise.problem import Problem


class _Rule(NamedTuple):
    """When rows share a list in a pass (measured: notes/performance-log.md)."""

    packing: int  # rows whose products with a key take as long as reading and packing it
    worth: float  # the part of the cost of lists for single rows that a union must stay below
    marked: int  # blocks of a sequence for each listed one of a union, at most: each has a mark
    least: int  # listed keys of an item from which on its rows may share: choosing takes time

    def cost(self, rows: int, heads: int) -> int:
        """Return what a key costs that so many rows of so many heads read together."""
        return self.packing + rows * heads


# A key is read, packed and, in the backward pass, added to: there it costs more.
_FORWARD, _BACKWARD = _Rule(32, 0.5, 8, 1 << 15), _Rule(64, 0.8, 64, 1 << 13)
MOST_ROWS = 16  # a row is a bit of ``readers``
_LOOKED_AT = 4  # groups of rows that the choice is made by
# The width of a union is a multiple of 16, and has so many bits beyond the first.
_LEAST_UNIT, _EIGHTHS = 16, 3


class Shared(NamedTuple):
    """Batch items or sequences in which R rows share a list each."""

    items: Tensor  # int64 [some], which
    rows: int  # R, rows
    groups: Groups  # the T groups of rows of these items
    listed: Listed  # as ``key_lists.Listed``, of these groups
    # int32 [T, Hk or 1, K]; bit r is set where row r of the group reads the block. None where R is
    # 1.
    readers: Tensor | None


def may_share(
    problem: Problem, rows: int, width: int, device: torch.device, backward: bool
) -> bool:
    """Return whether rows of a call may share lists; ``rows`` do already.

    On a device nobody waits to know what lists name, and the core makes the unions. ``width`` is
    how many keys a list has room for. ``backward`` is the pass: it may share where the forward pass
    does not.
    """
    if rows > 1 or problem.queries == 1 or not makes_unions(device):
        return False
    rule, heads = _BACKWARD if backward else _FORWARD, problem.heads // problem.kv_heads
    # Lists that are all alike gain the most.
    may_pay = rule.cost(MOST_ROWS, heads) < rule.worth * MOST_ROWS * rule.cost(1, heads)
    return may_pay and problem.queries * width >= rule.least


def shared(
    listed: Listed, heads: int, queries: Tensor, lengths: Tensor, block: int, backward: bool
) -> list[Shared]:
    """Return a batch in parts in which equally many rows share a list; [] if no rows should.

    A part and the width of its lists follow from what an item lists alone. So an item has the same
    bits whatever else is in the batch, and however wide the tensor of lists is.

    ``listed`` has a list for each query row, item after item. ``queries`` and ``lengths`` are the
    rows and keys of each item, int64 [B]. So many ``heads`` share a key head.
    """
    limits = block_counts(lengths, block)
    every = rows_together(listed, queries, limits, heads, block, backward)
    if max(every, default=1) == 1:
        return []
    found: list[Shared] = []
    starts = queries.cumsum(0) - queries
    for rows in sorted(set(every)):
        items = torch.tensor(
            [item for item, its in enumerate(every) if its == rows], device=queries.device
        )
        groups = row_groups(queries, lengths, rows, items)
        first = starts[groups.item] + groups.first
        if rows == 1:
            one = Listed(listed.indices[first], listed.counts[first])
            found.append(Shared(items, 1, groups, one, None))
        else:
            found += _together(listed.indices, items, groups, first, rows, block)
    return found


def rows_together(
    listed: Listed,
    queries: Tensor,
    limits: Tensor,
    heads: int,
    block: int = 1,
    backward: bool = False,
) -> list[int]:
    """Return how many neighbouring rows of each batch item should share a list: powers of two.

    It depends on what the rows of the item list, and not on how wide the tensor of lists is.
    ``queries`` [B] are the rows of each item, and ``limits`` [B] its blocks. So many ``heads``
    share a key head.
    """
    sets, rule = listed.indices, _BACKWARD if backward else _FORWARD
    ends = queries.cumsum(0)
    edges = functional.pad(listed.counts.sum(dim=1).cumsum(0), (1, 0))
    starts = (ends - queries).tolist()
    items, firsts, sizes = [], [], []
    # For each item: its rows, the keys that these would list if they listed all, and do list.
    about = list(
        zip(
            queries.tolist(),
            (queries * limits * (block * sets.shape[1])).tolist(),
            (edges[ends] - edges[ends - queries]).tolist(),
            strict=True,
        )
    )
    for number, (many, all_keys, keys) in enumerate(about):
        most = min(MOST_ROWS, 1 << max(many, 1).bit_length() - 1)
        few = keys < rule.least * sets.shape[1]
        # A union looks at a mark for each block of the sequence.
        if most == 1 or few or all_keys > rule.marked * most * keys:
            continue
        # Some groups of the most rows, evenly from all of them.
        whole = many // most
        count = min(_LOOKED_AT, whole)
        for at in range(count):
            items.append(number)
            firsts.append(starts[number] + at * (whole - 1) // max(count - 1, 1) * most)
            sizes.append(most)
    if not items or not sets.numel():
        return [1] * len(queries)
    item, first, most_rows = (
        torch.tensor(each, device=sets.device) for each in (items, firsts, sizes)
    )
    read = union_sizes(sets, first, most_rows, limits[item].long()).sum(dim=1)
    by_item = read.new_zeros(len(queries), read.shape[1]).index_add_(0, item, read)
    chosen = []
    for (_, all_keys, keys), unions_of in zip(about, by_item.tolist(), strict=True):
        costs = {1 << at: each * rule.cost(1 << at, heads) for at, each in enumerate(unions_of)}
        best = min(costs, key=lambda rows: costs[rows])
        pays = costs[best] < rule.worth * costs[1] and all_keys <= rule.marked * best * keys
        chosen.append(best if pays else 1)
    return chosen


def _together(
    sets: Tensor, items: Tensor, groups: Groups, first: Tensor, rows: int, block: int
) -> Iterator[Shared]:
    """Yield the unions of the lists of neighbours, a part for each width of them.

    Args:
        sets: int32 [all rows, Hk or 1, K] of ``Listed``.
        items: int64 [some], those in which rows share.
        groups: of these items.
        first: int64 [groups], the place of their first row in ``sets``.
        rows: of a group; the last of an item may have fewer.
        block: keys in a block.
    """
    limits = block_counts(groups.keys, block).long()
    there = (groups.queries - groups.first).clamp(max=rows)
    count = union_sizes(sets, first, there, limits)[..., -1]
    number = torch.searchsorted(items, groups.item)
    widest = count.new_zeros(len(items)).scatter_reduce(0, number, count.amax(1), "amax")
    every = [_rounded(each) for each in widest.tolist()]
    widths = torch.tensor(every, device=sets.device)
    for wide in sorted(set(every)):
        own = (widths == wide)[number]
        blocks, readers = unions(sets, first[own], there[own], limits[own], wide)
        mine = Groups(*(each[own] for each in groups))
        counts = key_counts(blocks, limits[own, None, None], block, mine.keys)
        yield Shared(items[widths == wide], rows, mine, Listed(blocks, counts), readers)


def _rounded(width: int) -> int:
    """Return a width that more batch items have: items of one width are one problem."""
    unit = max(_LEAST_UNIT, 1 << max(width.bit_length() - 1 - _EIGHTHS, 0))
    return max(-(-width // unit), 1) * unit
