"""Where the keys of lists lie: in a dimension of their own, packed, or in pages."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine.key_lists import Listed


class Groups(NamedTuple):
    """The row groups of a call: rows of queries that share a list; int64 [T] each.

    Args:
        item: batch item or sequence.
        first: first row, counted in its sequence.
        queries, keys: the lengths M and N of the sequence.
    """

    item: Tensor
    first: Tensor
    queries: Tensor
    keys: Tensor


class Paging(NamedTuple):
    """What finds key n of sequence b in pages: row n % size of page table[b, n // size]."""

    table: Tensor
    size: int


class Lists(NamedTuple):
    """The lists of a call, and where their keys are in k and v [outer, Hk, n, D].

    Args:
        listed: T lists, for all heads or for each.
        groups: T row groups.
        block: keys that one index stands for.
        starts: int64 [B], first key of each sequence where they are packed; None where they have a
            dimension of their own.
        paging: of a paged call, or None.
    """

    listed: Listed
    groups: Groups
    block: int
    starts: Tensor | None = None
    paging: Paging | None = None

    @property
    def width(self) -> int:
        """Return K, the keys of a list and what stands for none."""
        return self.listed.indices.shape[-1] * self.block

    def page_of(self, keys: int) -> int:
        """Return how many of the listed keys lie one after the other, of ``keys`` in all."""
        alone = self.starts is None and self.paging is None
        return self.block if alone and keys % self.block == 0 else 1

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


class Table(NamedTuple):
    """Keys or values [outer, Hk, n, D] as one row of pages, and the steps from page to page.

    Args:
        pages: [some, 1, size of a page, D], a view; pages may overlap.
        outer, head, page: the steps to the next of each.
    """

    pages: Tensor
    outer: int
    head: int
    page: int

    @staticmethod
    def of(x: Tensor, size: int = 1) -> Table:
        """Return a table with pages of so many keys, which divides all of them."""
        x = x if x.stride(3) == 1 else x.contiguous()
        counts, key = (x.shape[0], x.shape[1], x.shape[2] // size), x.stride(2)
        strides = (x.stride(0), x.stride(1), key * size)
        # Nobody takes a step along one place, whose stride may be any number.
        steps = [step if many > 1 else 0 for step, many in zip(strides, counts, strict=True)]
        unit = math.gcd(*steps) or x.shape[3]
        last = sum((count - 1) * step for count, step in zip(counts, steps, strict=True))
        many = last // unit + 1 if x.numel() else 0
        pages = x.as_strided((many, 1, size, x.shape[3]), (unit, unit, key, 1))
        return Table(pages, *(step // unit for step in steps))

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
