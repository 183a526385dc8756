"""The tiled algorithm in plain torch: exact attention that never holds the N x N matrix.

Forward: for each tile of queries, walk over the tiles of keys that the mask leaves, keeping a
running row maximum, row sum and output (online softmax). Backward: walk the same tiles again,
recompute the probabilities from the saved row maximum and row sum, and use

    dS = P * (dP - delta + dlse),   delta = rowsum(P * dP),   dP = dropout(dO V^T)

Memory beyond inputs and outputs: one tile of the matrix for all batch entries and heads, and in
the backward float32 accumulators of the size of k and v. Arithmetic is float32, or float64 for
float64. Keys that no query of a tile may see are taken as 0, so that what they hold cannot leak.

Sources: Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4; Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.reference.programs import Part, cut, parts, score_gradient
from tilewise.reference.tiles import (
    KEY_TILE,
    QUERY_TILE,
    Tile,
    base2,
    compute_dtype,
    empty_in_order_of,
    exp2,
    finite_or_zero,
    keep_tile,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
)

__all__ = [
    "KEY_TILE",
    "QUERY_TILE",
    "Totals",
    "accumulator",
    "backward",
    "forward",
    "sum_group",
]


def forward(problem: Problem, operands: Operands) -> Result:
    """Attention by tiles.

    Args:
        problem: what is asked.
        operands: q ``[B, Hq, M, D]``, k ``[B, Hk, N, D]``, v ``[B, Hk, N, Dv]`` (varlen
            ``[T, H, D]``) of any strides, captured tensors, sinks, seed.

    Returns:
        out in q's dtype and memory order; lse (natural, with the sink) and stats (row maximum in
        base-2 units and row sum, without the sink) in the compute dtype.
    """
    dtype = compute_dtype(problem.dtype)
    q = operands.q
    out = empty_in_order_of(q, problem.value_dim).zero_()
    shape = q.shape[:-1] if problem.layout == "dense" else (problem.heads, problem.queries)
    lse = torch.full(shape, -math.inf, dtype=dtype, device=q.device)
    stats = torch.zeros(2, *shape, dtype=dtype, device=q.device)
    stats[0] = -math.inf
    for part in parts(problem, operands):
        part_out = part_view(out, part.queries, problem)
        part_lse = part_rows(lse, part.queries, problem)
        part_stats = part_rows(stats, part.queries, problem)
        for rows in query_tiles(part.problem):
            span = slice(rows.start, rows.stop)
            tile_out, tile_lse, tile_stats = _forward_rows(part, rows, dtype)
            part_out[:, :, span] = tile_out.to(out.dtype)
            part_lse[..., span] = tile_lse
            part_stats[..., span] = tile_stats
    return Result(out, lse, stats)


def backward(
    problem: Problem,
    operands: Operands,
    result: Result,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
) -> Grads:
    """Gradients by tiles, from the saved result.

    Args:
        problem: as given to ``forward``.
        operands: as given to ``forward``.
        result: what ``forward`` returned.
        grad_out: gradient of out, its shape.
        grad_lse: gradient of lse, its shape; None for zero.
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
    for part in parts(problem, operands):
        views = totals.of(part, problem)
        rows_grad = part_view(grad_out, part.queries, problem)
        rows_stats = part_rows(result.stats, part.queries, problem)
        rows_grad_lse = None
        if grad_lse is not None:
            rows_grad_lse = part_rows(grad_lse, part.queries, problem)
        for rows in query_tiles(part.problem):
            span = slice(rows.start, rows.stop)
            state = _RowState(
                rows_grad[:, :, span].to(dtype),
                None if rows_grad_lse is None else rows_grad_lse[..., span].to(dtype),
                *normaliser(part, rows_stats[..., span], dtype),
            )
            _backward_rows(part, rows, state, views)
    return totals.grads(operands)


class _RowState(NamedTuple):
    """What the backward holds for a tile of query rows, ``[B, Hq, m(, Dv)]``.

    ``base`` is the row maximum (0 for a dead row), ``weight`` what ``exp2(s - base)`` is multiplied
    by to give a probability, ``sink`` the probability that went to the sink (None without one).
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    base: Tensor
    weight: Tensor
    sink: Tensor | None


class Totals(NamedTuple):
    """Accumulators of the gradients in the compute dtype; None where not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    score_tensors: tuple[Tensor | None, ...]
    sinks: Tensor | None

    def of(self, part: Part, problem: Problem) -> Totals:
        """Views of the accumulators for one part."""
        if problem.layout == "dense":
            return self
        b, m, n = part.first_batch, part.problem.queries, part.problem.keys
        q, k, v = (
            None if total is None else part_view(total, rows, problem)
            for total, rows in zip(self[:3], (part.queries, part.keys, part.keys), strict=True)
        )
        # A gradient that is not wanted has no accumulator: any tensor keeps the slots aligned.
        filled = [torch.empty(1, 1, 1, 1) if t is None else t for t in self.score_tensors]
        scores = tuple(
            None if total is None else view
            for total, view in zip(
                self.score_tensors, cut(problem.score, filled, b, m, n), strict=True
            )
        )
        return Totals(q, k, v, scores, self.sinks)

    def grads(self, operands: Operands) -> Grads:
        """The gradients in the dtypes of their operands."""
        q, k, v = (
            None if total is None else total.to(t.dtype)
            for total, t in zip(self[:3], operands[:3], strict=True)
        )
        scores = tuple(
            None if total is None else total.to(t.dtype)
            for total, t in zip(self.score_tensors, operands.score_tensors, strict=True)
        )
        sinks = None
        if self.sinks is not None and operands.sinks is not None:
            sinks = self.sinks.to(operands.sinks.dtype)
        return Grads(q, k, v, scores, sinks)


def accumulator(tensor: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor | None:
    """Zeros of the tensor's shape in ``dtype``; None where its gradient is not wanted."""
    if tensor is None or not wanted:
        return None
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def _forward_rows(part: Part, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, Hq, m, Dv]``, lse ``[B, Hq, m]`` and stats ``[2, B, Hq, m]`` of a query tile."""
    problem = part.problem
    q = part.operands.q[:, :, rows.start : rows.stop].to(dtype)
    shape = (problem.batch, problem.heads, len(rows))
    top = q.new_full(shape, -math.inf)
    top_natural = top
    total = q.new_zeros(shape)
    out = q.new_zeros(*shape, problem.value_dim)
    for tile in key_tiles(part, rows, q):
        scores = base2(tile.scores)
        new_top = torch.maximum(top, scores.amax(-1))
        base = finite_or_zero(new_top)
        p = exp2(scores - base[..., None])
        fade = exp2(top - base)
        total = total * fade + p.sum(-1)
        if problem.dropout_p:
            p = torch.where(keep_tile(part, tile.block), p / (1 - problem.dropout_p), 0.0)
        out = out * fade[..., None] + product(p, tile.v)
        top, top_natural = new_top, torch.maximum(top_natural, tile.scores.amax(-1))
    stats = torch.stack([top, total])
    lse = torch.where(total == 0, -math.inf, finite_or_zero(top_natural) + torch.log(total))
    if part.operands.sinks is not None:
        lse = _log_add_exp(lse, part.operands.sinks.to(dtype)[:, None])
    _, weight, _ = normaliser(part, stats, dtype)
    return out * weight[..., None], lse, stats


def _log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))`` of operations whose bits do not depend on the place in memory."""
    top = finite_or_zero(torch.maximum(a, b))
    return top + torch.log(torch.exp(a - top) + torch.exp(b - top))


class _TileGradient(NamedTuple):
    """The backward of one tile up to the row sums.

    ``p`` and ``dropped`` are the probabilities before and after dropout, ``dp`` the gradient of
    ``p``, ``grad_out`` the gradient rows with those that see no key of the tile set to 0.
    """

    p: Tensor
    dropped: Tensor
    dp: Tensor
    grad_out: Tensor


def _tile_gradient(part: Part, tile: Tile, state: _RowState) -> _TileGradient:
    dropout_p = part.problem.dropout_p
    grad_out = state.grad_out
    p = exp2(base2(tile.scores) - state.base[..., None]) * state.weight[..., None]
    if tile.seen is not None:
        grad_out = torch.where(tile.seen.any(-1, keepdim=True), grad_out, 0.0)
        p = torch.where(tile.seen, p, 0.0)
    dp = product(grad_out, tile.v.transpose(-1, -2))
    if not dropout_p:
        return _TileGradient(p, p, dp, grad_out)
    keep = keep_tile(part, tile.block)
    dp = torch.where(keep, dp / (1 - dropout_p), 0.0)
    return _TileGradient(p, torch.where(keep, p / (1 - dropout_p), 0.0), dp, grad_out)


def _row_shift(part: Part, rows: range, q: Tensor, state: _RowState) -> Tensor:
    """``dlse - delta`` of each row, ``[B, Hq, m]``, so that ``dS = P * (dP + shift)``.

    delta = rowsum(P * dP) equals rowsum(dO * O), which the kernels use. It is summed here from the
    very products that it is subtracted from: for a row with one key they then cancel to the bit.
    """
    shift = q.new_zeros(q.shape[:-1]) if state.grad_lse is None else state.grad_lse
    for tile in key_tiles(part, rows, q):
        gradient = _tile_gradient(part, tile, state)
        rowsum = gradient.p * gradient.dp
        if tile.seen is not None:
            rowsum = torch.where(tile.seen, rowsum, 0.0)
        shift = shift - rowsum.sum(-1)
    return shift


def _backward_rows(part: Part, rows: range, state: _RowState, totals: Totals) -> None:
    """Adds the gradients that come from a tile of query rows to the totals."""
    problem = part.problem
    span = slice(rows.start, rows.stop)
    q = part.operands.q[:, :, span].to(state.base.dtype)
    group = problem.heads // problem.kv_heads
    shift = _row_shift(part, rows, q, state)
    if totals.sinks is not None and state.sink is not None:
        totals.sinks.add_((state.sink * shift).sum(-1).sum(0))
    for tile in key_tiles(part, rows, q):
        p, dropped, dp, tile_grad = _tile_gradient(part, tile, state)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            grad_v = product(dropped.transpose(-1, -2), tile_grad)
            totals.v[:, :, columns] += sum_group(grad_v, group)
        ds = p * (dp + shift[..., None])
        q_used = q
        if tile.seen is not None:
            ds = torch.where(tile.seen, ds, 0.0)
            q_used = torch.where(tile.seen.any(-1, keepdim=True), q, 0.0)
        ds = score_gradient(problem.score, tile.saved, ds, tile.block, totals.score_tensors)
        ds = ds * problem.scale
        if totals.q is not None:
            totals.q[:, :, span] += product(ds, tile.k)
        if totals.k is not None:
            grad_k = product(ds.transpose(-1, -2), q_used)
            totals.k[:, :, columns] += sum_group(grad_k, group)


def sum_group(grad: Tensor, group: int) -> Tensor:
    """``[B, Hk, n, D]`` from ``[B, Hq, n, D]``: each key head serves ``group`` query heads."""
    batch, heads, length, width = grad.shape
    return grad.view(batch, heads // group, group, length, width).sum(2)
