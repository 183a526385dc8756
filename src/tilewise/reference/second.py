"""The second derivative of attention by tiles: the gradient of a derivative in a direction.

Take a direction u of the operands x = (q, k, v, score tensors, sinks), and cotangents c = (dO, dl)
of (out, lse). The module computes the gradient by x of the number

    <c, J(x) u> = <dO, tangent of out> + <dl, tangent of lse>

Both a double backward (u is what came in for the gradients) and a tangent of the backward need it:
the Hessian is symmetric. The letters, row by row:

* ds: the tangents of the scores.
* D: what dropout multiplies by.
* A = D * (dO V^T), B = D * (dO dV^T).
* E: the mean under P; a sink counts as one more key, with A = B = 0.

The gradients are:

    G  = P * (A - E[A] + dl)                                     by the tangents of the scores
    H  = P * (X - E[X]),  X = (ds - E[ds]) (A - E[A] + dl) + B   by the scores
    dV = (D * P * (ds - E[ds]))^T dO

They then go back through the score program, and through s = scale * q k^T and its tangent. There
are four walks over the tiles: the softmax, then E[ds] and E[A], then E[X], then the gradients.
Memory beyond operands and results is one tile, and accumulators of the size of the operands in the
compute dtype.
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
    base2,
    compute_dtype,
    exp2,
    finite_or_zero,
    inner_product,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
)
from tilewise.reference.totals import Totals, accumulators, sum_group


def second(
    problem: Problem,
    operands: Operands,
    toward: Operands,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Gradients of ``<grad_out, tangent of out> + <grad_lse, tangent of lse>`` by the operands.

    Args:
        problem: what was computed.
        operands: with what.
        toward: the tangents of the operands (``jets.direction``).
        grad_out: shaped as out.
        grad_lse: shaped as lse; None for zero.
        needs: which gradients are wanted.

    Returns:
        The wanted gradients, each in its operand's shape and dtype; None elsewhere.
    """
    dtype = compute_dtype(problem.dtype)
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
    """State of a tile of query rows before its gradients.

    Args:
        rows: the rows.
        grad_out, grad_lse: the cotangents of out ``[B, Hq, m, Dv]`` and lse ``[B, Hq, m]``.
        base, weight: ``p = exp2(s - base) * weight``, ``[B, Hq, m]``.
        sink: the probability that went to the sink, ``[B, Hq, m]``; None without one.
        sink_t: tangents of the sinks, ``[Hq, 1]``; None without.
    """

    rows: Rows
    grad_out: Tensor
    grad_lse: Tensor
    base: Tensor
    weight: Tensor
    sink: Tensor | None
    sink_t: Tensor | None


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
