"""The forward-mode derivative of attention by tiles: how the output moves when the operands do.

With ds the tangents of the scores (``jets.py``), and D what dropout multiplies by:

    dlse = sum_n p ds                    (a sink counts as one more key)
    dP   = P * (ds - dlse)
    dout = (D * dP) V + (D * P) dV

It takes one walk over the tiles, with an online softmax. The value of dlse is known only at the end
of the walk. So the sum of dP V is kept about the mean of ds so far, and moved to each new mean, as
variances are computed in one pass. Subtracting two large sums at the end would lose digits. Memory
beyond operands and results is one tile.

Source of the update: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Part, parts
from tilewise.reference.jets import Rows, drop, jet_tiles, rows_of
from tilewise.reference.tiles import (
    base2,
    compute_dtype,
    empty_in_order_of,
    exp2,
    finite_or_zero,
    part_rows,
    part_view,
    product,
    query_tiles,
)


def tangents(problem: Problem, operands: Operands, toward: Operands) -> tuple[Tensor, Tensor]:
    """Return the tangents of out and lse.

    Args:
        problem: what was computed.
        operands: with what.
        toward: the tangents of the operands (``jets.direction``).

    Returns:
        The tangent of out, in q's dtype and memory order, and that of lse, in the compute dtype;
        0 for dead rows.
    """
    dtype = compute_dtype(problem.dtype)
    q = operands.q
    out = empty_in_order_of(q, problem.value_dim).zero_()
    shape = q.shape[:-1] if problem.layout == "dense" else (problem.heads, problem.queries)
    lse = torch.zeros(shape, dtype=dtype, device=q.device)
    for part, part_toward in zip(parts(problem, operands), parts(problem, toward), strict=True):
        part_out = part_view(out, part.queries, problem)
        part_lse = part_rows(lse, part.queries, problem)
        for queries in query_tiles(part):
            span = slice(queries.start, queries.stop)
            rows = rows_of(part, part_toward, queries, dtype)
            tile_out, tile_lse = _tangent_rows(part, part_toward, rows)
            part_out[:, :, span] = tile_out.to(out.dtype)
            part_lse[..., span] = tile_lse
    return out, lse


def _tangent_rows(part: Part, toward: Part, rows: Rows) -> tuple[Tensor, Tensor]:
    """The tangents of out ``[B, Hq, m, Dv]`` and lse ``[B, Hq, m]`` of a tile of query rows."""
    shape = rows.q.shape[:-1]
    out = rows.q.new_zeros(*shape, part.problem.value_dim)
    out_t = out
    top, total, mean = rows.q.new_full(shape, -math.inf), rows.q.new_zeros(shape), out[..., 0]
    sinks, sinks_t = part.operands.sinks, toward.operands.sinks
    if sinks is not None and sinks_t is not None:
        # The sink is the first key: it has a probability and a tangent, but no value.
        top = base2(sinks.to(out.dtype))[:, None].expand(shape)
        total = exp2(top - finite_or_zero(top))
        mean = sinks_t.to(out.dtype)[:, None].expand(shape)
    for tile in jet_tiles(part, toward, rows):
        new_top = torch.maximum(top, tile.s.amax(-1))
        base = finite_or_zero(new_top)
        fade, top = exp2(top - base), new_top
        p = exp2(tile.s - base[..., None])
        total = total * fade + p.sum(-1)
        shift = (p * (tile.s_t - mean[..., None])).sum(-1)
        shift = torch.where(total == 0, 0.0, shift / total)
        mean = mean + shift
        p, p_t = drop(part, tile.block, [p, p * (tile.s_t - mean[..., None])])
        out_t = (out_t - shift[..., None] * out) * fade[..., None]
        out_t = out_t + product(p_t, tile.v) + product(p, tile.v_t)
        out = out * fade[..., None] + product(p, tile.v)
    # A row that sees nothing, not even a sink, has nothing that could move.
    inverse = torch.where(total == 0, 0.0, 1 / total)
    return out_t * inverse[..., None], torch.where(total == 0, 0.0, mean)
