"""The forward with keys outside, and with keys in parts (see the package)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.orders.ledger import Ledger
from tilewise.inspect.calls import Part, parts
from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Walk
from tilewise.reference.merge import merge_partial
from tilewise.reference.programs import Cover, cover
from tilewise.reference.tiled import forward_rows
from tilewise.reference.tiles import (
    Tile,
    base2,
    empty_in_order_of,
    exp2,
    finite_or_zero,
    keep_tile,
    key_spans,
    part_rows,
    part_view,
    product,
    query_tiles,
    score_tile,
)
from tilewise.variants.lower import statistics_dtype


class Visit(NamedTuple):
    """Whether a visit of a tile of rows is its first, and its last."""

    first: bool
    last: bool


class Visits:
    """Count the visits of each tile of rows of a part, out of its total."""

    def __init__(self, part: Part) -> None:
        problem, tensors = part.problem, part.operands.mask_tensors
        self.left = {
            rows: sum(
                cover(problem.mask, tensors, part.block(rows, columns)) is not Cover.EMPTY
                for columns in key_spans(part)
            )
            for rows in query_tiles(part)
        }
        self.untouched = [rows for rows, times in self.left.items() if times == 0]
        self.begun: set[range] = set()

    def count(self, rows: range) -> Visit:
        """Enter one more visit."""
        first = rows not in self.begun
        self.begun.add(rows)
        self.left[rows] -= 1
        return Visit(first, self.left[rows] == 0)

    def store_untouched(self, part: Part, name: str, row_bytes: int) -> None:
        """Enter the zeros of rows that no tile of keys has visited."""
        if part.walk.ledger is not None:
            each = part.problem.batch * part.problem.heads
            size = sum(len(rows) for rows in self.untouched) * row_bytes
            part.walk.ledger.writes(**{name: each * size})


_WALKED = ("k", "v", "block_table")  # what a group that walks together reads together


def forward_keys_outside(
    problem: Problem, operands: Operands, walk: Walk, partial: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention's algorithm 1: tiles of keys outside, rows rescaled at every visit.

    A tile of rows that is visited for the first time is not read: there is nothing in it yet.

    Args:
        problem: what to compute; without sinks.
        operands: with what.
        walk: tile sizes and ledger.
        partial: what the unfinished output is stored in; None for the compute dtype.

    Returns:
        out, in q's dtype and memory order, and stats as ``tiled.forward`` has them.
    """
    dtype, q = statistics_dtype(problem.dtype), operands.q
    kept, ledger = partial or dtype, walk.ledger or Ledger()
    out = empty_in_order_of(q, problem.value_dim).to(dtype).zero_()
    shape = q.shape[:-1] if problem.layout == "dense" else (problem.heads, problem.queries)
    stats = torch.zeros(2, *shape, dtype=dtype, device=q.device)
    stats[0] = -math.inf
    for part in parts(problem, operands, walk):
        views = part_view(out, part.queries, problem), part_rows(stats, part.queries, problem)
        visits = Visits(part)
        for columns in key_spans(part):
            k, v = (x[:, :, columns.start : columns.stop] for x in part.operands[1:3])
            ledger.reads(k=k.numel() * k.element_size(), v=v.numel() * v.element_size())
            for rows in query_tiles(part):
                rows_q = part.operands.q[:, :, rows.start : rows.stop].to(dtype)
                tile = score_tile(part, rows, columns, rows_q)
                if tile is not None:
                    visit = visits.count(rows)
                    _rescale(part, rows, tile, visit, kept, *views)
                    _enter_visit(ledger, part, tile, visit, kept)
        width = problem.value_dim * q.element_size()
        visits.store_untouched(part, "out", width)
        visits.store_untouched(part, "stats", 2 * dtype.itemsize)
    return out.to(q.dtype), stats


def _rescale(
    part: Part,
    rows: range,
    tile: Tile,
    visit: Visit,
    kept: torch.dtype,
    out: Tensor,
    stats: Tensor,
) -> None:
    """Lines 9 to 13 of algorithm 1: the output so far is always normalised."""
    span = slice(rows.start, rows.stop)
    scores = base2(tile.scores)
    top, total, before = stats[0][..., span], stats[1][..., span], out[:, :, span]
    new_top = torch.maximum(top, scores.amax(-1))
    base = finite_or_zero(new_top)
    p, fade = exp2(scores - base[..., None]), exp2(top - base)
    new_total = total * fade + p.sum(-1)
    dropout_p = part.problem.dropout_p
    if dropout_p:
        p = torch.where(keep_tile(part, tile.block), p / (1 - dropout_p), 0.0)
    inverse = torch.where(new_total == 0, 0.0, 1 / new_total)
    after = ((total * fade)[..., None] * before + product(p, tile.v)) * inverse[..., None]
    out[:, :, span] = after if visit.last else after.to(kept).to(after.dtype)
    stats[..., span] = torch.stack([new_top, new_total])


def _enter_visit(ledger: Ledger, part: Part, tile: Tile, visit: Visit, kept: torch.dtype) -> None:
    problem = part.problem
    count = problem.batch * problem.heads * len(tile.block.queries)
    ledger.multiplies(tile.scores, problem.value_dim)
    ledger.exponentials += tile.scores.numel() + count
    size = problem.dtype.itemsize
    row_stats = 2 * count * statistics_dtype(problem.dtype).itemsize
    ledger.reads(q=count * problem.head_dim * size)
    if not visit.first:
        ledger.reads(out=count * problem.value_dim * kept.itemsize, stats=row_stats)
    stored = size if visit.last else kept.itemsize
    ledger.writes(out=count * problem.value_dim * stored, stats=row_stats)


def forward_in_parts(
    problem: Problem, operands: Operands, walk: Walk, split_keys: int, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the forward with a sequence's keys split among programs, and merge the parts.

    Each part of the keys gives an output of its own and the maximum and sum of its rows; a second
    pass reads them all. Where one part holds all keys there is nothing to merge.

    Args:
        problem: what to compute; without sinks.
        operands: with what.
        walk: tile sizes and ledger.
        split_keys: keys of one part, a whole number of tiles.
        shared: whether the queries of a group of heads walk together, in blocks of as many rows as
            a tile has, each of which reads the keys once. A tile then holds all queries of a head.

    Returns:
        out in q's dtype and memory order, and lse.
    """
    dtype, q = statistics_dtype(problem.dtype), operands.q
    ledger = walk.ledger or Ledger()
    out = empty_in_order_of(q, problem.value_dim).to(dtype).zero_()
    shape = q.shape[:-1] if problem.layout == "dense" else (problem.heads, problem.queries)
    lse = torch.full(shape, -math.inf, dtype=dtype, device=q.device)
    group = problem.heads // problem.kv_heads
    for part in parts(problem, operands, walk):
        views = part_view(out, part.queries, problem), part_rows(lse, part.queries, problem)
        keys = part.problem.keys
        spans = [range(at, min(at + split_keys, keys)) for at in range(0, keys, split_keys)]
        for rows in query_tiles(part):
            before = [ledger.read[name] for name in _WALKED]
            found = [forward_rows(part, rows, dtype, "", span) for span in spans or [range(0)]]
            blocks = -(-group * len(rows) // walk.query_tile) if shared else group
            for name, was in zip(_WALKED, before, strict=True):
                ledger.read[name] = was + (ledger.read[name] - was) // group * blocks
            merged = merge_partial([each.out for each in found], [each.lse for each in found])
            for view, tile in zip(views, merged, strict=True):
                view[:, :, rows.start : rows.stop] = tile
            _enter_merge(ledger, part, len(rows), len(found))
    return out.to(q.dtype), lse


def _enter_merge(ledger: Ledger, part: Part, rows: int, count: int) -> None:
    """The partial results of rows, written and read again, and what becomes of them."""
    problem = part.problem
    each = problem.batch * problem.heads * rows
    size = statistics_dtype(problem.dtype).itemsize
    if count > 1:
        partial = each * count * (problem.value_dim + 2) * size
        ledger.writes(partial=partial)
        ledger.reads(partial=partial)
    ledger.writes(
        out=each * problem.value_dim * problem.dtype.itemsize,
        lse=each * size,
        stats=2 * each * size,
    )
