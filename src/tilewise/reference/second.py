"""The second derivative of attention by tiles: the gradient of a derivative in a direction.

For a direction u of the operands x = (q, k, v, score tensors, sinks) and cotangents c = (dO, dl)
of (out, lse), this is the gradient by x of the number

    <c, J(x) u> = <dO, tangent of out> + <dl, tangent of lse>

which is both what a double backward (u is what came in for the gradients) and what a tangent of the
backward needs: the Hessian is symmetric. With ds the tangents of the scores, D what dropout
multiplies by, A = D * (dO V^T), B = D * (dO dV^T), and E the mean under P (a sink counts as one
more key, with A = B = 0), row by row:

    G  = P * (A - E[A] + dl)                                     by the tangents of the scores
    H  = P * (X - E[X]),  X = (ds - E[ds]) (A - E[A] + dl) + B   by the scores
    dV = (D * P * (ds - E[ds]))^T dO

and then back through the score program, and through s = scale * q k^T and its tangent. Three walks
over the tiles: E[ds] and E[A], then E[X], then the gradients. Memory beyond operands and results is
one tile, and accumulators of the size of the operands in the compute dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem
from tilewise.reference.jets import JetTile, Rows, drop, jet_tiles, pull_score
from tilewise.reference.programs import Part, parts
from tilewise.reference.tangents import rows_of
from tilewise.reference.tiled import Totals, accumulator, sum_group
from tilewise.reference.tiles import compute_dtype, part_rows, part_view, product, query_tiles

__all__ = ["second"]


def second(
    problem: Problem,
    operands: Operands,
    toward: Operands,
    stats: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Gradients of ``<grad_out, tangent of out> + <grad_lse, tangent of lse>`` by the operands.

    Args:
        problem: what was asked.
        operands: with what.
        toward: the tangents of the operands (``jets.direction``).
        stats: as the forward pass gave them.
        grad_out: shaped as out.
        grad_lse: shaped as lse; None for zero.
        needs: which gradients are wanted.

    Returns:
        The wanted gradients, each in its operand's shape and dtype; None elsewhere.
    """
    dtype = compute_dtype(problem.dtype)
    totals = Totals(
        accumulator(operands.q, needs.q, dtype),
        accumulator(operands.k, needs.k, dtype),
        accumulator(operands.v, needs.v, dtype),
        tuple(
            accumulator(tensor, need, dtype)
            for tensor, need in zip(operands.score_tensors, needs.score_tensors, strict=True)
        ),
        accumulator(operands.sinks, needs.sinks, dtype),
    )
    for part, part_toward in zip(parts(problem, operands), parts(problem, toward), strict=True):
        views = totals.of(part, problem)
        part_grad = part_view(grad_out, part.queries, problem)
        part_stats = part_rows(stats, part.queries, problem)
        for queries in query_tiles(part.problem):
            span = slice(queries.start, queries.stop)
            rows = rows_of(part, part_toward, queries, part_stats[..., span])
            rows_grad_lse = torch.zeros_like(rows.base)
            if grad_lse is not None:
                rows_grad_lse = part_rows(grad_lse, part.queries, problem)[..., span].to(dtype)
            state = _State(rows, part_grad[:, :, span].to(dtype), rows_grad_lse)
            _second_rows(part, part_toward, state, views)
    return totals.grads(operands)


class _State(NamedTuple):
    """A tile of query rows and the cotangents of its out ``[B, Hq, m, Dv]`` and lse."""

    rows: Rows
    grad_out: Tensor
    grad_lse: Tensor


class _Means(NamedTuple):
    """Of each row, ``[B, Hq, m]``: E[ds], ``dl - E[A]``, and E[X] (0 until it is known)."""

    s_t: Tensor
    shift: Tensor
    x: Tensor


class _TileTerms(NamedTuple):
    """A and B of a tile, 0 where hidden, and dO with rows that see none of its keys set to 0."""

    a: Tensor
    b: Tensor
    grad_out: Tensor


def _terms(part: Part, tile: JetTile, grad_out: Tensor) -> _TileTerms:
    if tile.seen is not None:
        grad_out = torch.where(tile.seen.any(-1, keepdim=True), grad_out, 0.0)
    a = product(grad_out, tile.v.transpose(-1, -2))
    b = product(grad_out, tile.v_t.transpose(-1, -2))
    a, b = drop(part, tile.block, [a, b])
    if tile.seen is not None:
        a, b = torch.where(tile.seen, a, 0.0), torch.where(tile.seen, b, 0.0)
    return _TileTerms(a, b, grad_out)


def _x(tile: JetTile, terms: _TileTerms, means: _Means) -> Tensor:
    moved = tile.s_t - means.s_t[..., None]
    return moved * (terms.a + means.shift[..., None]) + terms.b


def _means(part: Part, toward: Part, state: _State) -> _Means:
    """The row means, in two walks."""
    rows = state.rows
    mean, shift = torch.zeros_like(rows.base), state.grad_lse
    if rows.sink is not None and rows.sink_t is not None:
        mean = rows.sink * rows.sink_t
    for tile in jet_tiles(part, toward, rows):
        mean = mean + (tile.p * tile.s_t).sum(-1)
        shift = shift - (tile.p * _terms(part, tile, state.grad_out).a).sum(-1)
    means = _Means(mean, shift, torch.zeros_like(mean))
    x = means.x
    if rows.sink is not None:
        x = rows.sink * _sink_x(rows, means)
    for tile in jet_tiles(part, toward, rows):
        x = x + (tile.p * _x(tile, _terms(part, tile, state.grad_out), means)).sum(-1)
    return means._replace(x=x)


def _sink_x(rows: Rows, means: _Means) -> Tensor:
    """X of the sink, for which A and B are 0."""
    assert rows.sink_t is not None
    return (rows.sink_t - means.s_t) * means.shift


def _second_rows(part: Part, toward: Part, state: _State, totals: Totals) -> None:
    """Adds the gradients that come from a tile of query rows to the totals."""
    rows, problem = state.rows, part.problem
    group = problem.heads // problem.kv_heads
    means = _means(part, toward, state)
    if totals.sinks is not None and rows.sink is not None:
        totals.sinks.add_((rows.sink * (_sink_x(rows, means) - means.x)).sum(-1).sum(0))
    for tile in jet_tiles(part, toward, rows):
        terms = _terms(part, tile, state.grad_out)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            (p_t,) = drop(part, tile.block, [tile.p * (tile.s_t - means.s_t[..., None])])
            grad_v = product(p_t.transpose(-1, -2), terms.grad_out)
            totals.v[:, :, columns] += sum_group(grad_v, group)
        grads = (
            tile.p * (_x(tile, terms, means) - means.x[..., None]),
            tile.p * (terms.a + means.shift[..., None]),
        )
        grad_s, grad_s_t = pull_score(part, toward, tile, grads, totals.score_tensors)
        grad_s, grad_s_t = grad_s * problem.scale, grad_s_t * problem.scale
        if totals.q is not None:
            span = slice(rows.queries.start, rows.queries.stop)
            totals.q[:, :, span] += product(grad_s, tile.k) + product(grad_s_t, tile.k_t)
        if totals.k is not None:
            q, q_t = rows.q, rows.q_t
            if tile.seen is not None:
                used = tile.seen.any(-1, keepdim=True)
                q, q_t = torch.where(used, q, 0.0), torch.where(used, q_t, 0.0)
            grad_k = product(grad_s.transpose(-1, -2), q)
            grad_k = grad_k + product(grad_s_t.transpose(-1, -2), q_t)
            totals.k[:, :, columns] += sum_group(grad_k, group)
