"""Common parts of the tiled forward and backward.

The walk over tiles, row normalisation, and the accumulators of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem
from tilewise.reference.blocks import Block, Part, cut, multiplied, of_keys
from tilewise.reference.philox import keep_mask
from tilewise.reference.programs import Cover, apply_score, cover, visible
from tilewise.variants.float8 import output_dtype
from tilewise.variants.program import EXPR

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
_WHOLE = 128  # products are padded to multiples of this
_PIECE = 32  # terms of a sum that are added up before they meet the others


def empty_in_order_of(q: Tensor, width: int) -> Tensor:
    """Uninitialised ``[*q.shape[:-1], width]``, its dimensions in the memory order of q's.

    bfloat16 where q is float8, else of q's dtype.
    """
    strides = q.stride()
    order = [*sorted(range(q.dim() - 1), key=lambda dim: -strides[dim]), q.dim() - 1]
    sizes = (*q.shape[:-1], width)
    dtype = output_dtype(q.dtype)
    out = torch.empty([sizes[dim] for dim in order], dtype=dtype, device=q.device)
    return out.permute([order.index(dim) for dim in range(q.dim())])


def part_view(tensor: Tensor, rows: slice, problem: Problem) -> Tensor:
    """Return the part ``[B, H, S, D]`` of a dense or packed tensor."""
    return tensor[rows] if problem.layout == "dense" else tensor[rows].transpose(0, 1)[None]


def part_rows(tensor: Tensor, rows: slice, problem: Problem) -> Tensor:
    """Return the part ``[..., B, H, M]`` of a tensor with one number per query row."""
    if problem.layout == "dense":
        return tensor[..., rows, :, :]
    return tensor[..., rows].unsqueeze(-3)


def _spans(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(start + size, total))


def query_tiles(part: Part) -> Iterator[range]:
    """Return the rows of each tile of queries; none for an empty batch."""
    problem = part.problem
    return _spans(problem.queries if problem.batch else 0, part.walk.query_tile)


def key_spans(part: Part, keys: range | None = None) -> Iterator[range]:
    """Yield the keys of each tile of keys, or of those in ``keys``; none for an empty batch."""
    problem = part.problem
    if keys is None:
        keys = range(problem.keys if problem.batch else 0)
    for span in _spans(len(keys), part.walk.key_tile):
        yield range(keys.start + span.start, keys.start + span.stop)


class Tile(NamedTuple):
    """A tile of the score matrix with the operands that made it, in the compute dtype."""

    k: Tensor
    v: Tensor
    scores: Tensor
    saved: list[Tensor]
    seen: Tensor | None
    block: Block


def key_tiles(part: Part, rows: range, q: Tensor, keys: range | None = None) -> Iterator[Tile]:
    """Yield the tiles that the mask leaves for a tile of queries, their scores in natural units.

    Only those in ``keys``, if it is given. Hidden pairs score -inf. ``seen`` is None where the
    mask hides nothing.
    """
    for columns in key_spans(part, keys):
        tile = score_tile(part, rows, columns, q)
        if tile is None:
            continue
        if part.walk.ledger is not None:
            part.walk.ledger.keys(part, columns, tile)
        yield tile


def score_tile(part: Part, rows: range, columns: range, q: Tensor) -> Tile | None:
    """Return one tile with its scores, as ``key_tiles`` does; None if the mask keeps nothing.

    ``q`` are the queries of ``rows``, ``[B, Hq, m, D]`` in the compute dtype.
    """
    problem, operands, ledger = part.problem, part.operands, part.walk.ledger
    group = problem.heads // problem.kv_heads
    block = part.block(rows, columns)
    if ledger is not None:
        ledger.judges(part, rows, columns)
    covered = cover(problem.mask, operands.mask_tensors, block)
    if covered is Cover.EMPTY:
        return None
    span = slice(columns.start, columns.stop)
    k = multiplied(operands.k[:, :, span], of_keys(operands.k_scale, span), q.dtype)
    v = multiplied(operands.v[:, :, span], of_keys(operands.v_scale, span), q.dtype)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    seen = None
    if covered is Cover.PARTIAL:
        seen = visible(problem.mask, operands.mask_tensors, block, q.device)
        used = seen.any(-2)[..., None]
        k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
    scores = inner_product(q, k) * problem.scale
    if ledger is not None:
        ledger.scores(part, scores)
    scores, saved = apply_score(problem.score, operands.score_tensors, scores, block)
    if seen is not None:
        scores = torch.where(seen, scores, -math.inf)
    return Tile(k, v, scores, saved, seen, block)


def product(a: Tensor, b: Tensor, inner: int | None = None) -> Tensor:
    """``a @ b``, both padded with zeros to whole tiles (``inner``: the tile of what is summed).

    The library behind torch chooses its kernels, and so the rounding, by the shape of a product and
    by its threads. Whole tiles leave it no remainders to treat differently. So the bits of a row do
    not depend on the threads or on the batch.
    """
    rows, columns = a.size(-2), b.size(-1)
    pad_rows, pad_columns, pad_inner = (
        -rows % _WHOLE,
        -columns % _WHOLE,
        -a.size(-1) % (inner or _WHOLE),
    )
    a = torch.nn.functional.pad(a, (0, pad_inner, 0, pad_rows))
    b = torch.nn.functional.pad(b, (0, pad_columns, 0, pad_inner))
    return (a @ b)[..., :rows, :columns]


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.transpose(-1, -2)`` of rows, each sum cut into pieces of 32 terms.

    The error of a chain of additions grows with its length, and a softmax turns the error of a
    large score into a relative error of the output. The kernels cut these sums too.
    """
    pieces = [
        product(each, other.transpose(-1, -2), inner=_PIECE)
        for each, other in zip(torch.split(a, _PIECE, -1), torch.split(b, _PIECE, -1), strict=True)
    ]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def exp2(x: Tensor) -> Tensor:
    """``2**x``. torch's rounds an element by where it stands in memory; its ``exp`` does not."""
    return torch.exp(x * LN2)


def base2(scores: Tensor) -> Tensor:
    """Scores in units of exp2. A finite score stays finite: only -inf means "no key"."""
    limit = torch.finfo(scores.dtype).max
    scaled = (scores * LOG2E).clamp(-limit, limit)
    return torch.where(scores.isinf(), scores, scaled)


def finite_or_zero(top: Tensor) -> Tensor:
    """Return a row maximum to subtract: -inf, of a row that sees no key, becomes 0."""
    return torch.where(top == -math.inf, 0.0, top)


def far(exponent: Tensor) -> Tensor:
    """Return an exponent whose power of two may be 0, made finite: 0 times it is then 0."""
    return exponent.clamp(min=-2000.0)


def row_entropy(
    part: Part, stats: Tensor, moment: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the entropy of each row and the mean of its logits less the largest, sink included.

    With t those differences in base-2 units, entropy = log(sum of 2^t) - ln(2) * mean of t, of
    which neither term is negative.

    ``stats`` ``[2, B, Hq, m]`` are row maximum and row sum of the keys, and ``moment`` is the sum
    over the keys of 2^(score - row maximum) times that exponent.
    """
    top, total = stats[0], stats[1]
    sink, above = sink_exponents(part, top, dtype)
    whole = total * exp2(-above)
    moment = (moment - above * total) * exp2(-above)
    if sink is not None:
        whole, moment = whole + exp2(sink), moment + exp2(sink) * sink
    mean = torch.where(whole == 0, 0.0, moment / whole)
    return torch.where(whole == 0, 0.0, torch.log(whole) - LN2 * mean), mean


def sink_exponents(part: Part, top: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """Return the sink less the largest logit (0 or less), and how far that is above ``top``."""
    if part.operands.sinks is None:
        return None, torch.zeros_like(top)
    sink = base2(part.operands.sinks.to(dtype))[:, None]
    highest = finite_or_zero(torch.maximum(top, sink))
    return far(sink - highest), -far(top - highest)


def normaliser(
    part: Part, stats: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(base, weight, sink probability) of ``_RowState`` from the stats of a query tile."""
    top, total = stats[0], stats[1]
    base = finite_or_zero(top)
    if part.operands.sinks is None:
        return base, torch.where(total == 0, 0.0, 1 / total), None
    sink = base2(part.operands.sinks.to(dtype))[:, None]
    # Relative to the larger of the two, so that neither a huge nor a tiny sink overflows.
    highest = finite_or_zero(torch.maximum(top, sink))
    sink_part = exp2(sink - highest)
    keys_part = exp2(top - highest)
    whole = keys_part * total + sink_part
    inverse = torch.where(whole == 0, 0.0, 1 / whole)
    return base, keys_part * inverse, sink_part * inverse


def keep_tile(part: Part, block: Block) -> Tensor:
    """Return the dropout mask of a tile, bool ``[B, Hq, m, n]``: True where kept."""
    problem = part.problem
    batch, head, query, key = part.operands.origin
    batch += part.first_batch
    return keep_mask(
        part.operands.seed,
        problem.dropout_p,
        batches=range(batch, batch + problem.batch),
        heads=range(head, head + problem.heads),
        queries=range(query + block.queries.start, query + block.queries.stop),
        keys=range(key + block.keys.start, key + block.keys.stop),
    ).to(part.operands.q.device)


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
        """Return the gradients in the dtypes of their operands."""
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


def sum_group(grad: Tensor, group: int) -> Tensor:
    """``[B, Hk, n, D]`` from ``[B, Hq, n, D]``: each key head serves ``group`` query heads."""
    batch, heads, length, width = grad.shape
    return grad.view(batch, heads // group, group, length, width).sum(2)
