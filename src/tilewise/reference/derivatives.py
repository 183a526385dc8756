"""Two derivatives of attention by tiles: forward mode, and the gradient of a derivative.

With ds the tangents of the scores (``jets.py``), and D what dropout multiplies by, ``tangents`` are

    dlse = sum_n p ds                    (a sink counts as one more key)
    dP   = P * (ds - dlse)
    dout = (D * dP) V + (D * P) dV

They take one walk over the tiles, with an online softmax. The value of dlse is known only at the
end of the walk. So the sum of dP V is kept about the mean of ds so far, and moved to each new mean,
as variances are computed in one pass. Subtracting two large sums at the end would lose digits.

``second`` takes a direction u of the operands x = (q, k, v, score tensors, sinks), and cotangents
c = (dO, dl) of (out, lse). It computes the gradient by x of the number

    <c, J(x) u> = <dO, tangent of out> + <dl, tangent of lse>

Both a double backward (u is what came in for the gradients) and a tangent of the backward need it:
the Hessian is symmetric. Row by row, let A = D * (dO V^T), B = D * (dO dV^T), and E the mean under
P; a sink counts as one more key, with A = B = 0. The gradients are

    G  = P * (A - E[A] + dl)                                     by the tangents of the scores
    H  = P * (X - E[X]),  X = (ds - E[ds]) (A - E[A] + dl) + B   by the scores
    dV = (D * P * (ds - E[ds]))^T dO

They then go back through the score program, and through s = scale * q k^T and its tangent. There
are four walks over the tiles: the softmax, then E[ds] and E[A], then E[X], then the gradients.

Memory beyond operands and results is one tile, and for ``second`` accumulators of the size of the
operands in the compute dtype.

Source of the update of means: Chan, Golub, LeVeque, "Algorithms for computing the sample variance",
1983.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem
from tilewise.reference.blocks import Part, parts
from tilewise.reference.jets import JetTile, Rows, drop, jet_tiles, pull_score, rows_of
from tilewise.reference.tiles import (
    Totals,
    accumulators,
    base2,
    empty_in_order_of,
    exp2,
    finite_or_zero,
    inner_product,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
    sum_group,
)
from tilewise.variants.lower import statistics_dtype


def tangents(problem: Problem, operands: Operands, toward: Operands) -> tuple[Tensor, Tensor]:
    """Return the tangents of out and lse.

    ``toward`` are the tangents of the operands (``jets.direction``).

    Returns:
        The tangent of out, in q's dtype and memory order, and that of lse, in the compute dtype;
        0 for dead rows.
    """
    dtype = statistics_dtype(problem.dtype)
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


def second(
    problem: Problem,
    operands: Operands,
    toward: Operands,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Gradients of ``<grad_out, tangent of out> + <grad_lse, tangent of lse>`` by the operands.

    ``toward`` are the tangents of the operands (``jets.direction``). ``grad_lse`` None stands for
    zero.

    Returns:
        The wanted gradients, each in its operand's shape and dtype; None elsewhere.
    """
    dtype = statistics_dtype(problem.dtype)
    totals = accumulators(problem, operands, needs, dtype)
    for part, part_toward in zip(parts(problem, operands), parts(problem, toward), strict=True):
        views = totals.of(part, problem)
        part_grad = part_view(grad_out, part.queries, problem)
        for queries in query_tiles(part):
            span = slice(queries.start, queries.stop)
            rows = rows_of(part, part_toward, queries, dtype)
            rows_grad_lse = rows.q.new_zeros(rows.q.shape[:-1])
            if grad_lse is not None:
                rows_grad_lse = part_rows(grad_lse, part.queries, problem)[..., span].to(dtype)
            state = _State(
                rows,
                part_grad[:, :, span].to(dtype),
                rows_grad_lse,
                *normaliser(part, _stats(part, rows), dtype),
                None if toward.sinks is None else toward.sinks.to(dtype)[:, None],
            )
            _second_rows(part, part_toward, state, views)
    return totals.grads(operands)


class _State(NamedTuple):
    """State of a tile of query rows before its gradients."""

    rows: Rows
    # Both: the cotangents of out ``[B, Hq, m, Dv]`` and lse ``[B, Hq, m]``.
    grad_out: Tensor
    grad_lse: Tensor
    # Both: ``p = exp2(s - base) * weight``, ``[B, Hq, m]``.
    base: Tensor
    weight: Tensor
    sink: Tensor | None  # the probability that went to the sink, ``[B, Hq, m]``; None without one
    sink_t: Tensor | None  # tangents of the sinks, ``[Hq, 1]``; None without


def _stats(part: Part, rows: Rows) -> Tensor:
    """Row maxima and sums ``[2, B, Hq, m]``, as ``tiled.forward`` has them.

    Not the forward kernel's, which rounds scores in another way: the probabilities of a row must
    sum to 1 for what cancels to cancel.
    """
    top = rows.q.new_full(rows.q.shape[:-1], -math.inf)
    total = torch.zeros_like(top)
    for tile in key_tiles(part, rows.queries, rows.q):
        scores = base2(tile.scores)
        new_top = torch.maximum(top, scores.amax(-1))
        base = finite_or_zero(new_top)
        total = total * exp2(top - base) + exp2(scores - base[..., None]).sum(-1)
        top = new_top
    return torch.stack([top, total])


class _Means(NamedTuple):
    """E[ds], E[A], and E[X] (0 until it is known) of each row, ``[B, Hq, m]``."""

    s_t: Tensor
    a: Tensor
    x: Tensor


class _TileTerms(NamedTuple):
    """P, A and B of a tile, 0 where hidden, and dO with rows that see none of its keys set to 0."""

    p: Tensor
    a: Tensor
    b: Tensor
    grad_out: Tensor


def _terms(part: Part, tile: JetTile, state: _State) -> _TileTerms:
    grad_out = state.grad_out
    p = exp2(tile.s - state.base[..., None]) * state.weight[..., None]
    if tile.seen is not None:
        grad_out = torch.where(tile.seen.any(-1, keepdim=True), grad_out, 0.0)
    a = inner_product(grad_out, tile.v)
    b = inner_product(grad_out, tile.v_t)
    a, b = drop(part, tile.block, [a, b])
    if tile.seen is not None:
        p, a, b = (torch.where(tile.seen, each, 0.0) for each in (p, a, b))
    return _TileTerms(p, a, b, grad_out)


def _pulled(terms: _TileTerms, means: _Means, state: _State) -> Tensor:
    """``A - E[A] + dl``; the means first, so that a row with one key keeps dl to the bit."""
    return (terms.a - means.a[..., None]) + state.grad_lse[..., None]


def _x(tile: JetTile, terms: _TileTerms, means: _Means, state: _State) -> Tensor:
    return (tile.s_t - means.s_t[..., None]) * _pulled(terms, means, state) + terms.b


def _means(part: Part, toward: Part, state: _State) -> _Means:
    """The row means, in two walks."""
    mean = mean_a = torch.zeros_like(state.base)
    if state.sink is not None and state.sink_t is not None:
        mean = state.sink * state.sink_t
    for tile in jet_tiles(part, toward, state.rows):
        terms = _terms(part, tile, state)
        mean = mean + (terms.p * tile.s_t).sum(-1)
        mean_a = mean_a + (terms.p * terms.a).sum(-1)
    means = _Means(mean, mean_a, torch.zeros_like(mean))
    x = means.x if state.sink is None else state.sink * _sink_x(state, means)
    for tile in jet_tiles(part, toward, state.rows):
        terms = _terms(part, tile, state)
        x = x + (terms.p * _x(tile, terms, means, state)).sum(-1)
    return means._replace(x=x)


def _sink_x(state: _State, means: _Means) -> Tensor:
    """X of the sink, for which A and B are 0."""
    assert state.sink_t is not None
    return (state.sink_t - means.s_t) * (state.grad_lse - means.a)


def _second_rows(part: Part, toward: Part, state: _State, totals: Totals) -> None:
    """Adds the gradients that come from a tile of query rows to the totals."""
    rows, problem = state.rows, part.problem
    group = problem.heads // problem.kv_heads
    means = _means(part, toward, state)
    if totals.sinks is not None and state.sink is not None:
        totals.sinks.add_((state.sink * (_sink_x(state, means) - means.x)).sum(-1).sum(0))
    for tile in jet_tiles(part, toward, rows):
        terms = _terms(part, tile, state)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            (p_t,) = drop(part, tile.block, [terms.p * (tile.s_t - means.s_t[..., None])])
            grad_v = product(p_t.transpose(-1, -2), terms.grad_out)
            totals.v[:, :, columns] += sum_group(grad_v, group)
        grads = (
            terms.p * (_x(tile, terms, means, state) - means.x[..., None]),
            terms.p * _pulled(terms, means, state),
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
