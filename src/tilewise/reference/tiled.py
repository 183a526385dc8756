"""The tiled algorithm in plain torch: exact attention that never holds the N x N matrix.

Forward: for each tile of queries, walk over the tiles of keys that the mask leaves, keeping a
running row maximum, row sum and output (online softmax). Backward: walk the same tiles again,
recompute the probabilities from the saved row maximum and row sum, and use

    dS = P * (dP - delta + dlse),   delta = rowsum(P * dP),   dP = dropout(dO V^T)

A gradient g of the entropy adds -g P (log P + entropy) to dS.

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

from tilewise.problem import Grads, Needs, Operands, Problem, Result, Statistics
from tilewise.reference.blocks import Part, cut, multiplied, parts
from tilewise.reference.programs import score_gradient
from tilewise.reference.tiles import (
    KEY_TILE,
    LN2,
    QUERY_TILE,
    Tile,
    base2,
    compute_dtype,
    empty_in_order_of,
    exp2,
    far,
    finite_or_zero,
    keep_tile,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
    row_entropy,
    sink_exponents,
)
from tilewise.variants.program import EXPR

__all__ = [
    "KEY_TILE",
    "QUERY_TILE",
    "Totals",
    "accumulators",
    "backward",
    "forward",
    "sum_group",
]


def forward(problem: Problem, operands: Operands, statistics: Statistics = "") -> Result:
    """Attention by tiles.

    Args:
        problem: what is asked.
        operands: q ``[B, Hq, M, D]``, k ``[B, Hk, N, D]``, v ``[B, Hk, N, Dv]`` (varlen
            ``[T, H, D]``) of any strides, captured tensors, sinks, seed.
        statistics: which of them the result has.

    Returns:
        out in q's dtype (bfloat16 for float8) and memory order; lse (natural, with the sink) and
        stats (row maximum in base-2 units and row sum, without the sink) in the compute dtype; the
        statistics.
    """
    dtype = compute_dtype(problem.dtype)
    q = operands.q
    out = empty_in_order_of(q, problem.value_dim).zero_()
    shape = q.shape[:-1] if problem.layout == "dense" else (problem.heads, problem.queries)
    lse = torch.full(shape, -math.inf, dtype=dtype, device=q.device)
    stats = torch.zeros(3 if statistics else 2, *shape, dtype=dtype, device=q.device)
    stats[0] = -math.inf
    whole = Result(out, lse, stats)
    if statistics:
        whole = whole._replace(max_logit=lse.clone(), entropy=torch.zeros_like(lse))
    if statistics == "top1":
        whole = whole._replace(top_key=torch.full(shape, -1, device=q.device))
    for part in parts(problem, operands):
        part_out = part_view(out, part.queries, problem)
        wanted = [None if x is None else part_rows(x, part.queries, problem) for x in whole[1:]]
        for rows in query_tiles(part.problem):
            span = slice(rows.start, rows.stop)
            tile = _forward_rows(part, rows, dtype, statistics)
            part_out[:, :, span] = tile.out.to(out.dtype)
            for to, of in zip(wanted, tile[1:], strict=True):
                if to is not None and of is not None:
                    to[..., span] = of
    return whole


def backward(
    problem: Problem,
    operands: Operands,
    result: Result,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
    grad_entropy: Tensor | None = None,
) -> Grads:
    """Gradients by tiles, from the saved result.

    Args:
        problem: as given to ``forward``.
        operands: as given to ``forward``.
        result: what ``forward`` returned.
        grad_out: gradient of out, its shape.
        grad_lse: gradient of lse, its shape; None for zero.
        needs: which gradients are wanted.
        grad_entropy: gradient of the entropy, its shape; None for zero.

    Returns:
        The wanted gradients, each in its operand's shape and dtype; None elsewhere.
    """
    dtype = compute_dtype(problem.dtype)
    totals = accumulators(problem, operands, needs, dtype)
    for part in parts(problem, operands):
        views = totals.of(part, problem)
        rows_grad = part_view(grad_out, part.queries, problem)
        rows_stats = part_rows(result.stats, part.queries, problem)
        of_lse, of_entropy = (
            None if grad is None else part_rows(grad, part.queries, problem)
            for grad in (grad_lse, grad_entropy)
        )
        for rows in query_tiles(part.problem):
            span = slice(rows.start, rows.stop)
            tile_stats = rows_stats[..., span]
            state = _RowState(
                rows_grad[:, :, span].to(dtype),
                None if of_lse is None else of_lse[..., span].to(dtype),
                *normaliser(part, tile_stats, dtype),
                None if of_entropy is None else _tilt(part, tile_stats, of_entropy[..., span]),
            )
            _backward_rows(part, rows, state, views)
    return totals.grads(operands)


class _RowState(NamedTuple):
    """What the backward holds for a tile of query rows, ``[B, Hq, m(, Dv)]``.

    ``base`` is the row maximum (0 for a dead row), ``weight`` what ``exp2(s - base)`` is multiplied
    by to give a probability, ``sink`` the probability that went to the sink (None without one),
    ``tilt`` the gradient of the entropy (None without one).
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    base: Tensor
    weight: Tensor
    sink: Tensor | None
    tilt: _Tilt | None


class _Tilt(NamedTuple):
    """The gradient g of the entropy, ``[B, Hq, m]``, as it enters dS.

    d entropy / dS = -P (log P + entropy) = -P ln(2) (t - mean of t), with t the logits less the
    largest of them in base-2 units: ``t - mean of t`` is a tile's exponent plus ``center``, and
    ``sink`` for the sink. ``slope`` is g ln(2).
    """

    slope: Tensor
    center: Tensor
    sink: Tensor | None


def _tilt(part: Part, stats: Tensor, grad: Tensor) -> _Tilt:
    sink, above = sink_exponents(part, stats[0], stats.dtype)
    dead = stats[1] == 0
    slope = torch.where(dead, 0.0, grad.to(stats.dtype) * LN2)
    return _Tilt(slope, -above - stats[2], None if sink is None else sink - stats[2])


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


def accumulators(problem: Problem, operands: Operands, needs: Needs, dtype: torch.dtype) -> Totals:
    """Zeros in the operands' shapes; in double precision for what expressions load.

    An element of that may sum over all pairs.
    """

    def zeros(tensor: Tensor | None, wanted: bool, of: torch.dtype = dtype) -> Tensor | None:
        if tensor is None or not wanted:
            return None
        return torch.zeros(tensor.shape, dtype=of, device=tensor.device)

    loaded = {slot for instr in problem.score if instr.op == EXPR for slot in instr.slots}
    pairs = zip(operands.score_tensors, needs.score_tensors, strict=True)
    return Totals(
        zeros(operands.q, needs.q),
        zeros(operands.k, needs.k),
        zeros(operands.v, needs.v),
        tuple(
            zeros(tensor, need, torch.float64 if slot in loaded else dtype)
            for slot, (tensor, need) in enumerate(pairs)
        ),
        zeros(operands.sinks, needs.sinks),
    )


def _forward_rows(part: Part, rows: range, dtype: torch.dtype, statistics: Statistics) -> Result:
    """The result of a query tile: out ``[B, Hq, m, Dv]``, lse ``[B, Hq, m]``, and so on."""
    problem = part.problem
    q = part.operands.q[:, :, rows.start : rows.stop]
    q = multiplied(q, part.operands.q_scale, dtype)
    shape = (problem.batch, problem.heads, len(rows))
    top = q.new_full(shape, -math.inf)
    top_natural = top
    total, moment = q.new_zeros(shape), q.new_zeros(shape)
    top_key = torch.full(shape, -1, device=q.device)
    out = q.new_zeros(*shape, problem.value_dim)
    for tile in key_tiles(part, rows, q):
        scores = base2(tile.scores)
        new_top = torch.maximum(top, scores.amax(-1))
        base = finite_or_zero(new_top)
        exponent = scores - base[..., None]
        p = exp2(exponent)
        fade = exp2(top - base)
        if statistics:
            moved = (moment + far(top - base) * total) * fade
            moment = moved + (p * far(exponent)).sum(-1)
        total = total * fade + p.sum(-1)
        if statistics == "top1":
            best, place = tile.scores.max(-1)
            top_key = torch.where(best > top_natural, tile.block.keys.start + place, top_key)
        if problem.dropout_p:
            p = torch.where(keep_tile(part, tile.block), p / (1 - problem.dropout_p), 0.0)
        out = out * fade[..., None] + product(p, tile.v)
        top, top_natural = new_top, torch.maximum(top_natural, tile.scores.amax(-1))
    stats = torch.stack([top, total])
    lse = torch.where(total == 0, -math.inf, finite_or_zero(top_natural) + torch.log(total))
    if part.operands.sinks is not None:
        lse = _log_add_exp(lse, part.operands.sinks.to(dtype)[:, None])
    _, weight, _ = normaliser(part, stats, dtype)
    result = Result(out * weight[..., None], lse, stats)
    if not statistics:
        return result
    entropy, mean = row_entropy(part, stats, moment, dtype)
    return Result(*result[:2], torch.cat([stats, mean[None]]), top_natural, entropy, top_key)


def _log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))`` of operations whose bits do not depend on the place in memory."""
    top = finite_or_zero(torch.maximum(a, b))
    return top + torch.log(torch.exp(a - top) + torch.exp(b - top))


class _TileGradient(NamedTuple):
    """The backward of one tile up to the row sums.

    ``p`` and ``dropped`` are the probabilities before and after dropout, ``p`` being the power
    of two of ``exponent`` times a weight; ``dp`` is the gradient of ``p``, ``grad_out`` the
    gradient rows with those that see no key of the tile set to 0.
    """

    exponent: Tensor
    p: Tensor
    dropped: Tensor
    dp: Tensor
    grad_out: Tensor


def _tile_gradient(part: Part, tile: Tile, state: _RowState) -> _TileGradient:
    dropout_p = part.problem.dropout_p
    grad_out = state.grad_out
    exponent = base2(tile.scores) - state.base[..., None]
    p = exp2(exponent) * state.weight[..., None]
    if tile.seen is not None:
        grad_out = torch.where(tile.seen.any(-1, keepdim=True), grad_out, 0.0)
        p = torch.where(tile.seen, p, 0.0)
    dp = product(grad_out, tile.v.transpose(-1, -2))
    if not dropout_p:
        return _TileGradient(exponent, p, p, dp, grad_out)
    keep = keep_tile(part, tile.block)
    dp = torch.where(keep, dp / (1 - dropout_p), 0.0)
    dropped = torch.where(keep, p / (1 - dropout_p), 0.0)
    return _TileGradient(exponent, p, dropped, dp, grad_out)


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
        by_sink = shift
        if state.tilt is not None and state.tilt.sink is not None:
            by_sink = shift - state.tilt.slope * state.tilt.sink
        totals.sinks.add_((state.sink * by_sink).sum(-1).sum(0))
    for tile in key_tiles(part, rows, q):
        exponent, p, dropped, dp, tile_grad = _tile_gradient(part, tile, state)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            grad_v = product(dropped.transpose(-1, -2), tile_grad)
            totals.v[:, :, columns] += sum_group(grad_v, group)
        moved = dp + shift[..., None]
        if state.tilt is not None:
            away = far(exponent) + state.tilt.center[..., None]
            moved = moved - state.tilt.slope[..., None] * away
        ds = p * moved
        q_used = q
        if tile.seen is not None:
            ds = torch.where(tile.seen, ds, 0.0)
            q_used = torch.where(tile.seen.any(-1, keepdim=True), q, 0.0)
        ds = score_gradient(
            problem.score,
            part.operands.score_tensors,
            tile.saved,
            ds,
            tile.block,
            totals.score_tensors,
        )
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
