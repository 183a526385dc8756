"""The forward-mode derivative of attention by tiles: how the output moves when the operands do.

With ds the tangents of the scores (``jets.py``), and D what dropout multiplies by:

    dlse = sum_n p ds                    (a sink counts as one more key)
    dP   = P * (ds - dlse)
    dout = (D * dP) V + (D * P) dV

One walk over the tiles. dlse is known only at its end, so that the sum of dP V is kept about the
mean of ds so far, and moved to each new mean (as variances are computed in one pass): subtracting
two large sums at the end would lose digits. Memory beyond operands and results: one tile.

Source of the update: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.problem import Operands, Problem
from tilewise.reference.jets import Rows, drop, jet_tiles
from tilewise.reference.programs import Part, parts
from tilewise.reference.tiles import (
    compute_dtype,
    empty_in_order_of,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
)

__all__ = ["rows_of", "tangents"]


def tangents(
    problem: Problem, operands: Operands, toward: Operands, stats: Tensor
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse.

    Args:
        problem: what was asked.
        operands: with what.
        toward: the tangents of the operands (``jets.direction``).
        stats: as the forward pass gave them.

    Returns:
        The tangent of out, in q's dtype and memory order, and that of lse, in the compute dtype;
        0 for dead rows.
    """
    out = empty_in_order_of(operands.q, problem.value_dim)
    lse = torch.zeros_like(stats[0])
    for part, part_toward in zip(parts(problem, operands), parts(problem, toward), strict=True):
        part_out = part_view(out, part.queries, problem)
        part_lse = part_rows(lse, part.queries, problem)
        part_stats = part_rows(stats, part.queries, problem)
        for queries in query_tiles(part.problem):
            span = slice(queries.start, queries.stop)
            rows = rows_of(part, part_toward, queries, part_stats[..., span])
            tile_out, tile_lse = _tangent_rows(part, part_toward, rows)
            part_out[:, :, span] = tile_out.to(out.dtype)
            part_lse[..., span] = tile_lse
    return out, lse


def rows_of(part: Part, toward: Part, queries: range, stats: Tensor) -> Rows:
    """A tile of query rows with its tangents, from the stats ``[2, B, Hq, m]`` of its rows."""
    dtype = compute_dtype(part.problem.dtype)
    span = slice(queries.start, queries.stop)
    sink_t = None
    if toward.operands.sinks is not None:
        sink_t = toward.operands.sinks.to(dtype)[:, None]
    return Rows(
        queries,
        part.operands.q[:, :, span].to(dtype),
        toward.operands.q[:, :, span].to(dtype),
        *normaliser(part, stats, dtype),
        sink_t,
    )


def _tangent_rows(part: Part, toward: Part, rows: Rows) -> tuple[Tensor, Tensor]:
    """The tangents of out ``[B, Hq, m, Dv]`` and lse ``[B, Hq, m]`` of a tile of query rows."""
    out = rows.q.new_zeros(*rows.q.shape[:-1], part.problem.value_dim)
    out_t = torch.zeros_like(out)
    mean = torch.zeros_like(rows.base)
    total = mean
    if rows.sink is not None and rows.sink_t is not None:
        # The sink is the first key: it has a probability and a tangent, but no value.
        mean, total = rows.sink_t.expand_as(rows.sink), rows.sink
    for tile in jet_tiles(part, toward, rows):
        total = total + tile.p.sum(-1)
        off = (tile.p * (tile.s_t - mean[..., None])).sum(-1)
        shift = torch.where(total == 0, 0.0, off / total)
        mean = mean + shift
        p_t = tile.p * (tile.s_t - mean[..., None])
        p, p_t = drop(part, tile.block, [tile.p, p_t])
        out_t = out_t - shift[..., None] * out + product(p_t, tile.v) + product(p, tile.v_t)
        out = out + product(p, tile.v)
    # A row that sees nothing, not even a sink, has nothing that could move.
    return out_t, torch.where(total == 0, 0.0, mean)
