"""The tiled algorithm in plain torch: exact attention that never holds the N x N matrix.

Forward: for each tile of queries, walk over the tiles of keys that the mask leaves, keeping a
running row maximum, row sum and output (online softmax). Backward: walk the same tiles again,
recompute the probabilities from the saved row maximum and row sum, and use

    dS = P * (dP - delta + dlse),   delta = rowsum(dO * O),   dP = dropout(dO V^T)

Memory beyond inputs and outputs: one tile of the matrix for all batch entries and heads, and in
the backward float32 accumulators of the size of k and v. Arithmetic is float32, or float64 for
float64. Keys that no query of a tile may see are taken as 0, so that what they hold cannot leak.

Sources: Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4; Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.reference.dense import LOG2E
from tilewise.reference.philox import keep_mask
from tilewise.reference.programs import (
    Block,
    Cover,
    Part,
    apply_score,
    cover,
    cut,
    parts,
    score_gradient,
    visible,
)

QUERY_TILE = 128
KEY_TILE = 128


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic for operands of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
        part_out = _part_view(out, part.queries, problem)
        part_lse = _part_rows(lse, part.queries, problem)
        part_stats = _part_rows(stats, part.queries, problem)
        for rows in _query_tiles(part.problem):
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
    totals = _Totals(
        _accumulator(operands.q, needs.q, dtype),
        _accumulator(operands.k, needs.k, dtype),
        _accumulator(operands.v, needs.v, dtype),
        tuple(
            _accumulator(tensor, need, dtype)
            for tensor, need in zip(operands.score_tensors, needs.score_tensors, strict=True)
        ),
        _accumulator(operands.sinks, needs.sinks, dtype),
    )
    for part in parts(problem, operands):
        views = totals.of(part, problem)
        rows_out = _part_view(result.out, part.queries, problem)
        rows_grad = _part_view(grad_out, part.queries, problem)
        rows_stats = _part_rows(result.stats, part.queries, problem)
        rows_grad_lse = None
        if grad_lse is not None:
            rows_grad_lse = _part_rows(grad_lse, part.queries, problem)
        for rows in _query_tiles(part.problem):
            span = slice(rows.start, rows.stop)
            row_grad = rows_grad[:, :, span].to(dtype)
            shift = -(row_grad * rows_out[:, :, span].to(dtype)).sum(-1)
            if rows_grad_lse is not None:
                shift = shift + rows_grad_lse[..., span].to(dtype)
            state = _RowState(row_grad, shift, *_normaliser(part, rows_stats[..., span], dtype))
            _backward_rows(part, rows, state, views)
    return totals.grads(operands)


class _RowState(NamedTuple):
    """What the backward holds for a tile of query rows, ``[B, Hq, m(, Dv)]``.

    ``shift`` is ``dlse - delta``, so that ``dS = P * (dP + shift)``; ``base`` is the row maximum
    (0 for a dead row), ``weight`` what ``exp2(s - base)`` is multiplied by to give a probability,
    ``sink`` the probability that went to the sink (None without one).
    """

    grad_out: Tensor
    shift: Tensor
    base: Tensor
    weight: Tensor
    sink: Tensor | None


class _Totals(NamedTuple):
    """Accumulators of the gradients in the compute dtype; None where not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    score_tensors: tuple[Tensor | None, ...]
    sinks: Tensor | None

    def of(self, part: Part, problem: Problem) -> _Totals:
        """Views of the accumulators for one part."""
        if problem.layout == "dense":
            return self
        b, m, n = part.first_batch, part.problem.queries, part.problem.keys
        q, k, v = (
            None if total is None else _part_view(total, rows, problem)
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
        return _Totals(q, k, v, scores, self.sinks)

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


def _accumulator(tensor: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or not wanted:
        return None
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def empty_in_order_of(q: Tensor, width: int) -> Tensor:
    """Uninitialised ``[*q.shape[:-1], width]``, its dimensions in the memory order of q's."""
    strides = q.stride()
    order = [*sorted(range(q.dim() - 1), key=lambda dim: -strides[dim]), q.dim() - 1]
    sizes = (*q.shape[:-1], width)
    out = torch.empty([sizes[dim] for dim in order], dtype=q.dtype, device=q.device)
    return out.permute([order.index(dim) for dim in range(q.dim())])


def _part_view(tensor: Tensor, rows: slice, problem: Problem) -> Tensor:
    """The part ``[B, H, S, D]`` of a dense or packed tensor."""
    return tensor if problem.layout == "dense" else tensor[rows].transpose(0, 1)[None]


def _part_rows(tensor: Tensor, rows: slice, problem: Problem) -> Tensor:
    """The part ``[..., B, H, M]`` of a tensor with one number per query row."""
    return tensor if problem.layout == "dense" else tensor[..., rows].unsqueeze(-3)


def _spans(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))


def _query_tiles(problem: Problem) -> Iterator[range]:
    return _spans(problem.queries if problem.batch else 0, QUERY_TILE)


class _Tile(NamedTuple):
    """A tile of the score matrix with the operands that made it, in the compute dtype."""

    k: Tensor
    v: Tensor
    scores: Tensor
    saved: list[Tensor]
    seen: Tensor | None
    block: Block


def _key_tiles(part: Part, rows: range, q: Tensor) -> Iterator[_Tile]:
    """The tiles that the mask leaves for a tile of queries, their scores in natural units.

    Hidden pairs score -inf. ``seen`` is None where the mask hides nothing.
    """
    problem, operands = part.problem, part.operands
    group = problem.heads // problem.kv_heads
    for columns in _spans(problem.keys, KEY_TILE):
        block = Block(rows, columns, problem.queries, problem.keys)
        covered = cover(problem.mask, operands.mask_tensors, block)
        if covered is Cover.EMPTY:
            continue
        span = slice(columns.start, columns.stop)
        k = operands.k[:, :, span].to(q.dtype).repeat_interleave(group, dim=1)
        v = operands.v[:, :, span].to(q.dtype).repeat_interleave(group, dim=1)
        seen = None
        if covered is Cover.PARTIAL:
            seen = visible(problem.mask, operands.mask_tensors, block, q.device)
            used = seen.any(-2)[..., None]
            k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
        scores = (q @ k.transpose(-1, -2)) * problem.scale
        scores, saved = apply_score(problem.score, operands.score_tensors, scores, block)
        if seen is not None:
            scores = torch.where(seen, scores, -math.inf)
        yield _Tile(k, v, scores, saved, seen, block)


def _base2(scores: Tensor) -> Tensor:
    """Scores in units of exp2. A finite score stays finite: only -inf means "no key"."""
    limit = torch.finfo(scores.dtype).max
    scaled = (scores * LOG2E).clamp(-limit, limit)
    return torch.where(scores.isinf(), scores, scaled)


def _finite_or_zero(top: Tensor) -> Tensor:
    return torch.where(top == -math.inf, 0.0, top)


def _forward_rows(part: Part, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, Hq, m, Dv]``, lse ``[B, Hq, m]`` and stats ``[2, B, Hq, m]`` of a query tile."""
    problem = part.problem
    q = part.operands.q[:, :, rows.start : rows.stop].to(dtype)
    shape = (problem.batch, problem.heads, len(rows))
    top = q.new_full(shape, -math.inf)
    top_natural = top
    total = q.new_zeros(shape)
    out = q.new_zeros(*shape, problem.value_dim)
    for tile in _key_tiles(part, rows, q):
        scores = _base2(tile.scores)
        new_top = torch.maximum(top, scores.amax(-1))
        base = _finite_or_zero(new_top)
        p = torch.exp2(scores - base[..., None])
        fade = torch.exp2(top - base)
        total = total * fade + p.sum(-1)
        if problem.dropout_p:
            p = torch.where(_keep(part, tile.block), p / (1 - problem.dropout_p), 0.0)
        out = out * fade[..., None] + p @ tile.v
        top, top_natural = new_top, torch.maximum(top_natural, tile.scores.amax(-1))
    stats = torch.stack([top, total])
    lse = torch.where(total == 0, -math.inf, _finite_or_zero(top_natural) + torch.log(total))
    if part.operands.sinks is not None:
        lse = torch.logaddexp(lse, part.operands.sinks.to(dtype)[:, None])
    _, weight, _ = _normaliser(part, stats, dtype)
    return out * weight[..., None], lse, stats


def _normaliser(
    part: Part, stats: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(base, weight, sink probability) of ``_RowState`` from the stats of a query tile."""
    top, total = stats[0], stats[1]
    base = _finite_or_zero(top)
    if part.operands.sinks is None:
        return base, torch.where(total == 0, 0.0, 1 / total), None
    sink = _base2(part.operands.sinks.to(dtype))[:, None]
    # Relative to the larger of the two, so that neither a huge nor a tiny sink overflows.
    highest = _finite_or_zero(torch.maximum(top, sink))
    sink_part = torch.exp2(sink - highest)
    keys_part = torch.exp2(top - highest)
    whole = keys_part * total + sink_part
    inverse = torch.where(whole == 0, 0.0, 1 / whole)
    return base, keys_part * inverse, sink_part * inverse


def _keep(part: Part, block: Block) -> Tensor:
    problem = part.problem
    return keep_mask(
        part.operands.seed,
        problem.dropout_p,
        batches=range(part.first_batch, part.first_batch + problem.batch),
        heads=range(problem.heads),
        queries=block.queries,
        keys=block.keys,
    ).to(part.operands.q.device)


def _backward_rows(part: Part, rows: range, state: _RowState, totals: _Totals) -> None:
    """Adds the gradients that come from a tile of query rows to the totals."""
    problem = part.problem
    span = slice(rows.start, rows.stop)
    q = part.operands.q[:, :, span].to(state.shift.dtype)
    group = problem.heads // problem.kv_heads
    if totals.sinks is not None and state.sink is not None:
        per_row = state.sink * state.shift
        totals.sinks.add_(per_row.sum(-1).sum(0))
    for tile in _key_tiles(part, rows, q):
        grad_out, shift, q_used = state.grad_out, state.shift[..., None], q
        p = torch.exp2(_base2(tile.scores) - state.base[..., None]) * state.weight[..., None]
        if tile.seen is not None:
            used = tile.seen.any(-1, keepdim=True)
            grad_out, q_used = torch.where(used, grad_out, 0.0), torch.where(used, q, 0.0)
            p = torch.where(tile.seen, p, 0.0)
        dp = grad_out @ tile.v.transpose(-1, -2)
        dropped = p
        if problem.dropout_p:
            keep = _keep(part, tile.block)
            dp = torch.where(keep, dp / (1 - problem.dropout_p), 0.0)
            dropped = torch.where(keep, p / (1 - problem.dropout_p), 0.0)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            grad_v = dropped.transpose(-1, -2) @ grad_out
            totals.v[:, :, columns] += _sum_group(grad_v, group)
        ds = p * (dp + shift)
        if tile.seen is not None:
            ds = torch.where(tile.seen, ds, 0.0)
        ds = score_gradient(problem.score, tile.saved, ds, tile.block, totals.score_tensors)
        ds = ds * problem.scale
        if totals.q is not None:
            totals.q[:, :, span] += ds @ tile.k
        if totals.k is not None:
            grad_k = ds.transpose(-1, -2) @ q_used
            totals.k[:, :, columns] += _sum_group(grad_k, group)


def _sum_group(grad: Tensor, group: int) -> Tensor:
    """``[B, Hk, n, D]`` from ``[B, Hq, n, D]``: each key head serves ``group`` query heads."""
    batch, heads, length, width = grad.shape
    return grad.view(batch, heads // group, group, length, width).sum(2)
