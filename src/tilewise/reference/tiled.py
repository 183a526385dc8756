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
from tilewise.reference.blocks import WALK, Part, Walk, multiplied, parts
from tilewise.reference.programs import score_gradient
from tilewise.reference.tiles import (
    LN2,
    Tile,
    Totals,
    accumulators,
    base2,
    empty_in_order_of,
    exp2,
    far,
    finite_or_zero,
    inner_product,
    keep_tile,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
    row_entropy,
    sink_exponents,
    sum_group,
)
from tilewise.variants.lower import statistics_dtype


def forward(
    problem: Problem, operands: Operands, statistics: Statistics = "", walk: Walk | None = None
) -> Result:
    """Attention by tiles.

    q is ``[B, Hq, M, D]``, k ``[B, Hk, N, D]`` and v ``[B, Hk, N, Dv]`` (varlen ``[T, H, D]``), of
    any strides. ``walk`` has tile sizes, and says where accesses to slow memory are entered; None
    is ``WALK``.

    Returns:
        out in q's dtype (bfloat16 for float8) and memory order; lse (natural, with the sink) and
        stats (row maximum in base-2 units and row sum, without the sink) in the compute dtype; the
        statistics.
    """
    dtype = statistics_dtype(problem.dtype)
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
    for part in parts(problem, operands, walk):
        part_out = part_view(out, part.queries, problem)
        wanted = [None if x is None else part_rows(x, part.queries, problem) for x in whole[1:]]
        for rows in query_tiles(part):
            span = slice(rows.start, rows.stop)
            tile = forward_rows(part, rows, dtype, statistics)
            part_out[:, :, span] = tile.out.to(out.dtype)
            for to, of in zip(wanted, tile[1:], strict=True):
                if to is not None and of is not None:
                    to[..., span] = of
            if part.walk.ledger is not None:
                part.walk.ledger.result(tile, whole)
    return whole


def backward(
    problem: Problem,
    operands: Operands,
    result: Result,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
    grad_entropy: Tensor | None = None,
    walk: Walk | None = None,
) -> Grads:
    """Gradients by tiles, from the saved result.

    Arguments are as given to ``forward``, and ``result`` is what it returned. ``grad_out``,
    ``grad_lse`` and ``grad_entropy`` have the shapes of what they are the gradients of; None stands
    for zero.

    Returns:
        The wanted gradients, each in its operand's shape and dtype; None elsewhere.
    """
    dtype = statistics_dtype(problem.dtype)
    totals = accumulators(problem, operands, needs, dtype)
    for part in parts(problem, operands, walk):
        views = totals.of(part, problem)
        rows_grad = part_view(grad_out, part.queries, problem)
        rows_stats = part_rows(result.stats, part.queries, problem)
        of_lse, of_entropy = (
            None if grad is None else part_rows(grad, part.queries, problem)
            for grad in (grad_lse, grad_entropy)
        )
        for rows in query_tiles(part):
            span = slice(rows.start, rows.stop)
            tile_stats = rows_stats[..., span]
            given = rows_grad[:, :, span]
            lse_given, entropy_given = (
                None if of is None else of[..., span] for of in (of_lse, of_entropy)
            )
            if part.walk.ledger is not None:
                read = {"grad_out": given, "stats": tile_stats, "grad_lse": lse_given}
                part.walk.ledger.rows(part, rows, **read, grad_entropy=entropy_given)
            delta = None
            if needs.partial:
                out = part_view(result.out, part.queries, problem)[:, :, span].to(dtype)
                delta = (given.to(dtype) * out).sum(-1)
            state = RowState(
                given.to(dtype),
                None if lse_given is None else lse_given.to(dtype),
                *normaliser(part, tile_stats, dtype),
                None if entropy_given is None else _tilt(part, tile_stats, entropy_given),
                delta,
            )
            _backward_rows(part, rows, state, views)
    ledger = (walk or WALK).ledger
    if ledger is not None:
        ledger.totals(totals, operands)
    return totals.grads(operands)


class RowState(NamedTuple):
    """State of the backward for a tile of query rows, ``[B, Hq, m(, Dv)]``.

    * ``base``: the row maximum (0 for a dead row).
    * ``weight``: the factor that makes ``exp2(s - base)`` a probability.
    * ``sink``: the probability that went to the sink (None without one).
    * ``tilt``: the gradient of the entropy (None without one).
    * ``delta``: the row sum of grad_out * out if the rows see keys beyond these (None if not).
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    base: Tensor
    weight: Tensor
    sink: Tensor | None
    tilt: _Tilt | None
    delta: Tensor | None = None


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


def forward_rows(
    part: Part,
    rows: range,
    dtype: torch.dtype,
    statistics: Statistics,
    keys: range | None = None,
) -> Result:
    """Return the result of a query tile: out ``[B, Hq, m, Dv]``, lse ``[B, Hq, m]``, and so on.

    ``keys`` are those that it is over, from the first of a tile of keys on; None for all.
    """
    problem, ledger = part.problem, part.walk.ledger
    q = part.operands.q[:, :, rows.start : rows.stop]
    q = multiplied(q, part.operands.q_scale, dtype)
    if ledger is not None:
        ledger.rows(part, rows)
    shape = (problem.batch, problem.heads, len(rows))
    top = q.new_full(shape, -math.inf)
    top_natural = top
    total, moment = q.new_zeros(shape), q.new_zeros(shape)
    top_key = torch.full(shape, -1, device=q.device)
    out = q.new_zeros(*shape, problem.value_dim)
    for tile in key_tiles(part, rows, q, keys):
        scores = base2(tile.scores)
        new_top = torch.maximum(top, scores.amax(-1))
        base = finite_or_zero(new_top)
        exponent = scores - base[..., None]
        p = exp2(exponent)
        fade = exp2(top - base)
        if ledger is not None:
            ledger.multiplies(p, problem.value_dim)
            ledger.exponentials += p.numel() + fade.numel()
        if statistics:
            moved = (moment + far(top - base) * total) * fade
            moment = moved + (p * far(exponent)).sum(-1)
        total = total * fade + p.sum(-1)
        if statistics == "top1":
            best, place = tile.scores.max(-1)
            # The first NaN is larger than all, as for torch's argmax.
            larger = (best > top_natural) | (best.isnan() & ~top_natural.isnan())
            top_key = torch.where(larger, tile.block.keys.start + place, top_key)
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


class TileGradient(NamedTuple):
    """The backward of one tile up to the row sums.

    ``p`` and ``dropped`` are the probabilities before and after dropout. ``p`` is the power of two
    of ``exponent`` times a weight. ``dp`` is the gradient of ``p``. ``grad_out`` is the gradient
    rows, with those that see no key of the tile set to 0.
    """

    exponent: Tensor
    p: Tensor
    dropped: Tensor
    dp: Tensor
    grad_out: Tensor


def tile_gradient(part: Part, tile: Tile, state: RowState) -> TileGradient:
    """Compute one tile of the backward, up to what needs the row sums."""
    dropout_p = part.problem.dropout_p
    grad_out = state.grad_out
    if part.walk.ledger is not None:
        part.walk.ledger.multiplies(tile.scores, part.problem.value_dim)
        part.walk.ledger.exponentials += tile.scores.numel()
    exponent = base2(tile.scores) - state.base[..., None]
    p = exp2(exponent) * state.weight[..., None]
    if tile.seen is not None:
        grad_out = torch.where(tile.seen.any(-1, keepdim=True), grad_out, 0.0)
        p = torch.where(tile.seen, p, 0.0)
    dp = inner_product(grad_out, tile.v)
    if not dropout_p:
        return TileGradient(exponent, p, p, dp, grad_out)
    keep = keep_tile(part, tile.block)
    dp = torch.where(keep, dp / (1 - dropout_p), 0.0)
    dropped = torch.where(keep, p / (1 - dropout_p), 0.0)
    return TileGradient(exponent, p, dropped, dp, grad_out)


def _row_shift(part: Part, rows: range, q: Tensor, state: RowState) -> Tensor:
    """``dlse - delta`` of each row, ``[B, Hq, m]``, so that ``dS = P * (dP + shift)``.

    delta = rowsum(P * dP) equals rowsum(dO * O), which the kernels use. It is summed here from the
    very products that it is subtracted from: for a row with one key they then cancel to the bit.
    Where the row sees keys beyond these it is the latter.
    """
    shift = q.new_zeros(q.shape[:-1]) if state.grad_lse is None else state.grad_lse
    if state.delta is not None:
        return shift - state.delta
    for tile in key_tiles(part, rows, q):
        gradient = tile_gradient(part, tile, state)
        rowsum = gradient.p * gradient.dp
        if tile.seen is not None:
            rowsum = torch.where(tile.seen, rowsum, 0.0)
        shift = shift - rowsum.sum(-1)
    return shift


def _backward_rows(part: Part, rows: range, state: RowState, totals: Totals) -> None:
    """Adds the gradients that come from a tile of query rows to the totals."""
    problem, ledger = part.problem, part.walk.ledger
    span = slice(rows.start, rows.stop)
    q = part.operands.q[:, :, span].to(state.base.dtype)
    group = problem.heads // problem.kv_heads
    shift = _row_shift(part, rows, q, state)
    if totals.sinks is not None and state.sink is not None:
        by_sink = shift
        if state.tilt is not None and state.tilt.sink is not None:
            by_sink = shift - state.tilt.slope * state.tilt.sink
        totals.sinks.add_((state.sink * by_sink).sum(-1).sum(0))
    grad_q = torch.zeros_like(q)
    for tile in key_tiles(part, rows, q):
        exponent, p, dropped, dp, tile_grad = tile_gradient(part, tile, state)
        columns = slice(tile.block.keys.start, tile.block.keys.stop)
        if totals.v is not None:
            grad_v = product(dropped.transpose(-1, -2), tile_grad)
            _add_keys(part, "grad_v", totals.v[:, :, columns], sum_group(grad_v, group), p)
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
            grad_q += product(ds, tile.k)
            if ledger is not None:
                ledger.multiplies(ds, problem.head_dim)
        if totals.k is not None:
            grad_k = product(ds.transpose(-1, -2), q_used)
            _add_keys(part, "grad_k", totals.k[:, :, columns], sum_group(grad_k, group), ds)
    if totals.q is not None:
        totals.q[:, :, span] = grad_q
        if ledger is not None:
            ledger.writes(grad_q=grad_q.numel() * grad_q.element_size())


def _add_keys(part: Part, name: str, total: Tensor, share: Tensor, scores: Tensor) -> None:
    """Adds a tile's share ``[B, Hk, n, .]`` to the sum of its keys, which is in slow memory."""
    total += share
    ledger = part.walk.ledger
    if ledger is not None:
        size = share.numel() * share.element_size()
        ledger.reads(**{name: size})
        ledger.writes(**{name: size})
        ledger.multiplies(scores, share.shape[-1])
