"""Key lists: which keys each query row reads, checked, in one form, and where they lie."""

from __future__ import annotations

import math
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor, check_whole
from tilewise.errors import InvalidArgument
from tilewise.kernels.key_lists import Located, by_core, key_pages, key_sets
from tilewise.problem import Problem


class KeyBlocks(NamedTuple):
    """Lists of blocks of keys: block i holds the keys i * block to (i + 1) * block - 1.

    Args:
        indices: int32 or int64 [B, Hk or 1, ceil(M / query_block), K], the blocks that each block
            of query rows reads; in a variable-length call [Hk or 1, Tq, K]. -1 stands for none.
        block: keys in a block; the last block of a sequence may have fewer.
        query_block: query rows that share a list; 1 in a variable-length call.
    """

    indices: Tensor
    block: int
    query_block: int = 1


KeyLists: TypeAlias = Tensor | KeyBlocks


class Listed(NamedTuple):
    """Key lists as sets, one for each row group (the query rows that share a list) and head."""

    # int32 [T, Hk or 1, K], T row groups: blocks in ascending order, each once; then the number of
    # blocks of the sequence, which stands for none.
    indices: Tensor
    counts: Tensor  # int64 [T, Hk or 1], how many keys that is


def read_key_lists(keys: object) -> KeyBlocks:
    """Return key lists as blocks: single keys are blocks of one."""
    if not isinstance(keys, KeyBlocks):
        required = "an int32 or int64 tensor [B, Hk or 1, M, K] of keys, or tilewise.KeyBlocks"
        return KeyBlocks(check_tensor("keys", keys, required, INDICES), 1)
    required = "an int32 or int64 tensor of blocks"
    check_tensor("keys (indices)", keys.indices, required, INDICES)
    check_whole("keys (block)", keys.block, 1)
    check_whole("keys (query_block)", keys.query_block, 1)
    return keys


def checked_key_lists(lists: KeyBlocks, problem: Problem, device: torch.device) -> KeyBlocks:
    """Return key lists with blocks no longer than the call."""
    indices, block, rows = lists
    if problem.layout == "varlen":
        required = f"[Hk or 1, Tq, K] with Hk = {problem.kv_heads}, Tq = {problem.queries}"
        shape: tuple[int, ...] = (problem.queries,)
        if rows > 1:
            fix = "Repeat each list for the rows that share it."
            raise InvalidArgument("keys (query_block)", str(rows), "1 for packed sequences", fix)
    else:
        groups = -(-problem.queries // rows)
        required = f"[B, Hk or 1, {'M' if rows == 1 else 'blocks of rows'}, K] with "
        required += f"B = {problem.batch}, Hk = {problem.kv_heads}, {groups} rows of lists"
        shape = (problem.batch, groups)
    came = tuple(indices.shape)
    fits = len(came) == len(shape) + 2 and (*came[:-3], came[-2]) == shape
    # torch.compile, whose sizes may be symbols, gets `came[-3] not in (...)` wrong.
    if not fits or not (came[-3] == 1 or came[-3] == problem.kv_heads):
        raise InvalidArgument("keys", f"shape {came}", f"a tensor {required}")
    if indices.device != device:
        raise InvalidArgument("keys", f"a tensor on {indices.device}", f"on q's device, {device}")
    if block > problem.keys:
        block = max(problem.keys, 1)
    if rows > problem.queries:
        rows = max(problem.queries, 1)
    return KeyBlocks(indices, block, rows)


def listed(lists: KeyBlocks, lengths: Tensor) -> Listed:
    """Return key lists as sets.

    ``lengths`` are int64 [T], the keys of each row group's sequence. On the CPU an index that names
    no key or block is refused. On a device values are not looked at: an index beyond the sequence's
    keys counts as none there.
    """
    indices, block, _ = lists
    if by_core(indices):
        sets, counts, wrong = key_sets(indices, block, lengths)
        if wrong >= 0:
            _refuse_index(_by_group(indices), block_counts(lengths, block), block, wrong)
        return Listed(sets, counts)
    rows = _by_group(indices)
    limits = block_counts(lengths, block)
    bounds = limits[:, None, None]
    if rows.is_cpu:
        _check_values(rows, limits, block)
    none = (rows < 0) | (rows >= bounds)
    found = torch.where(none, bounds, rows.to(torch.int32)).sort(dim=-1).values
    again = torch.zeros_like(found, dtype=torch.bool)
    torch.eq(found[..., 1:], found[..., :-1], out=again[..., 1:])
    again &= found != bounds
    found = torch.where(again, bounds, found).sort(dim=-1).values
    return Listed(found.contiguous(), key_counts(found, bounds, block, lengths))


def _by_group(indices: Tensor) -> Tensor:
    """Return lists [B, heads, M, K] or [heads, T, K] by row groups: [T, heads, K]."""
    if indices.dim() == 4:
        return indices.movedim(-3, -2).flatten(0, -3)
    return indices.movedim(0, 1)


def key_counts(sets: Tensor, limits: Tensor, block: int, lengths: Tensor) -> Tensor:
    """Return the keys of sets of blocks, int64 [T, Hk or 1]; the last block may have fewer."""
    counts = (sets < limits).sum(dim=-1) * block
    if block > 1:
        missing = limits * block - lengths[:, None, None]
        counts = counts - torch.where(sets == limits - 1, missing, 0).sum(dim=-1)
    return counts


def block_counts(lengths: Tensor, block: int) -> Tensor:
    """Return the blocks of sequences of so many keys, int32."""
    return (lengths + (block - 1)).div(block, rounding_mode="floor").to(torch.int32)


def _check_values(rows: Tensor, limits: Tensor, block: int) -> None:
    wrong = (rows < -1) | (rows >= limits[:, None, None])
    if bool(wrong.any()):
        _refuse_index(rows, limits, block, int(wrong.flatten().nonzero()[0]))


def _refuse_index(rows: Tensor, limits: Tensor, block: int, place: int) -> NoReturn:
    """Refuse the index at a place in the flat rows [T, heads, K]."""
    heads, width = rows.shape[1:]
    group, head, at = place // (heads * width), place // width % heads, place % width
    what = "key" if block == 1 else "block"
    raise InvalidArgument(
        "keys",
        f"{int(rows[group, head, at])} in list {group} of head {head}",
        f"a {what} below {int(limits[group])}, or -1 for none",
    )


class Groups(NamedTuple):
    """The row groups of a call: rows of queries that share a list; int64 [T] each."""

    item: Tensor  # batch item or sequence
    first: Tensor  # first row, counted in its sequence
    # Both: the lengths M and N of the sequence.
    queries: Tensor
    keys: Tensor

    def positions(self, heads: int, step: int) -> Tensor:
        """Return what programs read of a list and key head (``variants.graphs.gathered``).

        That is int64 [T * heads, 5]: item, first query head (each key head has ``step`` of them),
        first row, and the lengths M and N.
        """
        columns = (self.item, torch.zeros_like(self.item), self.first, self.queries, self.keys)
        of_lists = torch.stack(columns, dim=-1)
        if heads == 1:
            return of_lists
        of_heads = of_lists[:, None].repeat(1, heads, 1)
        of_heads[..., 1] = torch.arange(heads, device=self.item.device) * step
        return of_heads.flatten(0, 1)

    def of(self, part: slice) -> Groups:
        """Return some of the groups."""
        return Groups(*(each[part] for each in self))


def row_groups(
    queries: Tensor, keys: Tensor, rows: int, items: Tensor | None = None, total: int | None = None
) -> Groups:
    """Return the groups of so many rows, item after item; the last of an item may have fewer.

    ``queries`` and ``keys`` are the numbers of each item, int64 [B]. ``items`` [some] says which
    are wanted; None for all. If ``total``, the number of groups, is known, nobody waits for a
    device.
    """
    many = queries if items is None else queries[items]
    if items is None:
        items = torch.arange(len(queries), device=queries.device)
    if rows > 1:
        many = (many + (rows - 1)).div(rows, rounding_mode="floor")
    item, before = (
        each.repeat_interleave(many, output_size=total) for each in (items, many.cumsum(0) - many)
    )
    first = (torch.arange(len(item), device=item.device) - before) * rows
    return Groups(item, first, queries[item], keys[item])


class Rows(NamedTuple):
    """The query rows of groups, of all that lie item after item; [T, rows] each."""

    places: Tensor  # int64, which row; any where there is none
    there: Tensor  # bool, whether the item has that row

    @staticmethod
    def of(groups: Groups, queries: Tensor, rows: int) -> Rows:
        """Return the rows of groups of so many; ``queries`` [B] are the lengths of all items."""
        at = groups.first[:, None] + torch.arange(rows, device=queries.device)
        there = at < groups.queries[:, None]
        starts = queries.cumsum(0) - queries
        return Rows(torch.where(there, at + starts[groups.item, None], 0), there)


class Paging(NamedTuple):
    """What finds key n of sequence b in pages: row n % size of page table[b, n // size]."""

    table: Tensor
    size: int


def page_size(block: int, keys: int, alone: bool) -> int:
    """Return the keys of a page: all of a block's, where no block is shorter.

    ``alone``: keys have a dimension of their own, neither packed nor in pages already.
    """
    return block if alone and keys % block == 0 else 1


class Lists(NamedTuple):
    """The lists of a call, and where their keys are in k and v [outer, Hk, n, D]."""

    listed: Listed  # T lists, for all heads or for each
    groups: Groups  # T row groups
    block: int  # keys that one index stands for
    # int64 [B], first key of each sequence where they are packed; None where they have a dimension
    # of their own.
    starts: Tensor | None = None
    paging: Paging | None = None  # of a paged call, or None
    # int32 [T, Hk or 1, K] where rows with lists of their own are one group: bit r is set where row
    # r of the group reads the block. None where all rows read all of a list.
    readers: Tensor | None = None
    # Of all groups, where they were made before (``Groups.positions``).
    positions: Tensor | None = None

    @property
    def width(self) -> int:
        """Return K, the keys of a list and what stands for none."""
        return self.listed.indices.shape[-1] * self.block

    def page_of(self, keys: int) -> int:
        """Return how many of the listed keys lie one after the other, of ``keys`` in all."""
        return page_size(self.block, keys, self.starts is None and self.paging is None)

    def located(
        self, part: slice, tables: tuple[Table, ...], total: int, heads: int, with_keys: bool
    ) -> Located:
        """Return where the keys of some lists lie in tables with pages of the same numbers.

        Of the tables of keys and values, only the first is read. A head has ``total`` keys.
        """
        table, size = tables[0], tables[0].pages.shape[2]
        sets, counts = self.listed
        if by_core(sets):
            groups, paging = self.groups, self.paging
            item, lengths = groups.item, groups.keys
            if part != slice(0, sets.shape[0]):
                sets, counts, item, lengths = (x[part] for x in (sets, counts, item, lengths))
            paged_by, rows = paging or (None, size)
            return key_pages(
                sets,
                counts,
                heads,
                (self.block, size, total, rows),
                table.steps,
                item,
                lengths,
                self.starts,
                paged_by,
                with_keys,
            )
        keys = self.keys(part)
        # The first key of a page says where it is.
        outer, inner = self.places(part, keys[..., ::size], total)
        numbers = table.numbers(outer, inner.div(size, rounding_mode="floor"), heads)
        own = of_heads(counts[part], heads).to(torch.int32)
        flat = of_heads(keys, heads) if with_keys else None
        return Located(numbers.flatten(0, 1).to(torch.int32), own, flat)

    def keys(self, part: slice) -> Tensor:
        """Return the keys of some lists, int64 [lists, Hk or 1, K].

        Beyond its count a list names what is not there. Some key stands there, which nobody reads.
        """
        keys = self.listed.indices[part].long()
        if self.block > 1:
            keys = keys[..., None] * self.block + torch.arange(self.block, device=keys.device)
            keys = keys.flatten(-2)
        last = self.groups.keys[part, None, None] - 1
        return torch.minimum(keys, last).clamp_(min=0)

    def places(self, part: slice, keys: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Return the first and third index of keys in k and v, which have ``total`` keys a head."""
        item = self.groups.item[part, None, None]
        if self.paging is not None:
            slot = keys.div(self.paging.size, rounding_mode="floor")
            return self.paging.table[item, slot].long(), keys % self.paging.size
        if self.starts is None:
            return item.expand_as(keys), keys
        # A sequence without keys may come last: then there is no row after the one before it.
        found = (keys + self.starts[item]).clamp_(max=total - 1)
        return torch.zeros_like(found), found


def of_heads(x: Tensor, heads: int) -> Tensor:
    """Return something of lists [lists, 1 or heads, ...] for each problem: [lists * heads, ...]."""
    rest = (-1,) * (x.dim() - 2)
    return x.expand(-1, heads, *rest).flatten(0, 1).contiguous()


class Table(NamedTuple):
    """Keys or values [outer, Hk, n, D] as one row of pages, and the steps from page to page."""

    pages: Tensor  # [some, 1, size of a page, D], a view; pages may overlap
    # All three: the steps to the next of each.
    outer: int
    head: int
    page: int

    @staticmethod
    def of(x: Tensor, size: int = 1) -> Table:
        """Return a table with pages of so many keys, which divides all of them."""
        x = x if x.stride(3) == 1 else x.contiguous()
        many_outer, heads, keys, width = x.shape
        outer, head, key, _ = x.stride()
        of_head, page = keys // size, key * size
        # Nobody takes a step along one place, whose stride may be any number.
        outer = outer if many_outer > 1 else 0
        head = head if heads > 1 else 0
        page = page if of_head > 1 else 0
        unit = math.gcd(outer, head, page) or width
        last = (many_outer - 1) * outer + (heads - 1) * head + (of_head - 1) * page
        many = last // unit + 1 if x.numel() else 0
        pages = x.as_strided((many, 1, size, width), (unit, unit, key, 1))
        return Table(pages, outer // unit, head // unit, page // unit)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Return all steps: tables that share them find a key by the same number."""
        return self.outer, self.head, self.page

    @property
    def rows(self) -> Tensor:
        """Return pages of one key as rows, [some, D]."""
        return self.pages[:, 0, 0]

    def numbers(self, outer: Tensor, page: Tensor, heads: int) -> Tensor:
        """Return the pages [lists, Hk, some] of what lies at (outer, page) [lists, Hk or 1, some].

        ``heads`` is Hk: lists without heads of their own are those of all heads.
        """
        steps = torch.arange(heads, device=page.device)[:, None] * self.head
        return outer * self.outer + page * self.page + steps
