"""Rows of all heads into all rows of some heads, and back: what Ulysses exchanges.

Before, a position has its rows of all heads. After, it has all rows of some heads, so attention
there is that of one process, to the bit. The number of heads need not divide: positions then have
one head more or less, or none. Key heads go to every position with a query head that reads them.

Source: Jacobs et al., DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models, 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.distributed.layout import Layout, even_bounds
from tilewise.distributed.peers import Peers, refuse_second_derivatives
from tilewise.variants.lower import statistics_dtype

Heads: TypeAlias = tuple[tuple[int, ...], ...]  # for each position, which heads it gets


class HeadShares(NamedTuple):
    """Which heads each position computes: query heads, and the key heads beside them."""

    queries: Heads
    keys: Heads

    def of(self, position: int) -> range:
        """Return the query heads of a position, which are neighbours."""
        mine = self.queries[position]
        return range(mine[0], mine[-1] + 1) if mine else range(0)


def share_heads(heads: int, kv_heads: int, positions: int) -> HeadShares:
    """Return an even share of the heads.

    Key heads are repeated where the query heads of a position do not read all of theirs equally
    often: then each of its query heads has one of its own.
    """
    bounds, group = even_bounds(heads, positions), heads // kv_heads
    queries = [tuple(range(*bounds[p : p + 2])) for p in range(positions)]
    keys = []
    for mine in queries:
        read = [head // group for head in mine]
        counts = {head: read.count(head) for head in read}
        keys.append(tuple(counts) if len(set(counts.values())) <= 1 else tuple(read))
    return HeadShares(tuple(queries), tuple(keys))


def block(layout: Layout, heads: Heads, rows_of: int, heads_of: int) -> tuple[int, int]:
    """Return how many heads and rows one position's rows of another one's heads are."""
    return len(heads[heads_of]), layout.count(rows_of)


class Exchange(NamedTuple):
    """An exchange of rows for heads: each position gets its ``heads``, of ``total`` in all."""

    peers: Peers
    layout: Layout
    heads: Heads
    total: int

    def to_heads(self, x: Tensor) -> Tensor:
        """Return all rows of this position's heads, from its rows of all heads [B, H, rows, D]."""
        found: Tensor = _Exchanged.apply(self, True, x)  # type: ignore[no-untyped-call]
        return found

    def to_rows(self, x: Tensor) -> Tensor:
        """Return this position's rows of all heads, from all rows of its heads [B, h, S, D]."""
        found: Tensor = _Exchanged.apply(self, False, x)  # type: ignore[no-untyped-call]
        return found

    def scatter_heads(self, x: Tensor) -> Tensor:
        """As ``to_heads``, without a gradient."""
        here, own = self.peers.position, self.heads
        batch, _, _, width = x.shape
        sent = {p: _heads(x, own[p]).contiguous() for p in range(self.peers.count)}
        coming = {p: x.new_empty((batch, *block(self.layout, own, p, here), width)) for p in sent}
        self.peers.start("heads", sent, coming).wait()
        whole = x.new_empty((batch, len(own[here]), self.layout.length, width))
        for p, part in coming.items():
            for chunk, at in self.layout.spans(p).items():
                rows = self.layout.rows_of(chunk)
                whole[:, :, rows.start : rows.stop] = part[:, :, at]
        return whole

    def gather_heads(self, x: Tensor) -> Tensor:
        """As ``to_rows``, without a gradient. Copies of a head are added up, by position."""
        here, own = self.peers.position, self.heads
        batch, _, _, width = x.shape
        sent = {}
        for p in range(self.peers.count):
            parts = [x[:, :, rows.start : rows.stop] for rows in self.layout.ranges(p)]
            sent[p] = torch.cat(parts, dim=2) if parts else x[:, :, :0]
        rows = self.layout.count(here)
        coming = {p: x.new_empty((batch, *block(self.layout, own, here, p), width)) for p in sent}
        self.peers.start("rows", sent, coming).wait()
        every = [head for heads in own for head in heads]
        if len(set(every)) == len(every):
            whole = x.new_zeros((batch, self.total, rows, width))
            for p, part in coming.items():
                whole[:, list(own[p])] = part
            return whole
        sums = x.new_zeros((batch, self.total, rows, width), dtype=statistics_dtype(x.dtype))
        for p, part in coming.items():
            for at, head in enumerate(own[p]):
                sums[:, head] += part[:, at]
        return sums.to(x.dtype)


def _heads(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    if not heads:
        return x[:, :0]
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x[:, heads[0] : heads[-1] + 1]
    return x[:, list(heads)]


class _Exchanged(torch.autograd.Function):
    """An exchange in one direction; its gradient takes the other one."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, to_heads: bool, x: Tensor) -> Tensor:
        ctx.given = exchange, to_heads
        return exchange.scatter_heads(x) if to_heads else exchange.gather_heads(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivatives()
        exchange, to_heads = ctx.given
        with exchange.peers.together():
            found = exchange.gather_heads(grad) if to_heads else exchange.scatter_heads(grad)
        return None, None, found
