"""What all walks of the backward pass over the pairs share: inputs, and the work on one tile.

That is the gradients of its pairs, and what it adds to dQ, or to dK and dV.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu.backward.rows import FAR, Upstream, folds, row_values
from tilewise.kernels.gpu.config import Blocks, Config, Pass, padded
from tilewise.kernels.gpu.expressions import Variant, captures
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.pairs import LOG2E, drawing, kept, shown
from tilewise.kernels.gpu.walk.parts import held, product_of, rows_of
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    head_strides,
    knows_whole_tiles,
    lists_of,
    meets_empty_tiles,
    number_strides,
    seed_memory,
    wide,
    word,
)
from tilewise.problem import Operands, Problem
from tilewise.reference.philox import threshold as dropout_threshold

_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
_ANY_PAGE = 2**31 - 1  # the engine makes these tables itself: no entry is to be clamped
COUNTS = ["batch", "heads", "group", "queries", "keys", "tiles", "plane", "threshold"]


@triton.jit
def numbers_of(call, threshold):
    """The ``numbers`` of ``pair_gradients`` from those of a launch."""
    scale, inverse_keep, seed = call.numbers
    return scale, inverse_keep, drawing(seed), threshold


@triton.jit
def keys_of_head(call, which: tl.constexpr, b, h, begin_k, FORM: tl.constexpr):
    """(head, strides, pages) of the keys (``which`` is 1) or values (2) of key head ``h``.

    As ``side`` of ``walk.tiles.load_keys``.
    """
    b_k, pages = b, 0
    if FORM.PAGE > 0:
        entries, slots, last = call.pages
        b_k, pages = b * 0, (entries + tl.cast(slots, tl.int64) * b, last)  # type: ignore
    strides = call.strides[which]
    return head_of(call.inputs[which], strides, b_k, h, begin_k), strides, pages


@triton.jit
def held_pair(sides, BLOCK: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Tiles of queries and incoming gradients, or of keys and values: as ``held``, of both."""
    first = held(sides[0], BLOCK, FORM.HEAD_DIM, FORM.HEAD_PADDED, MASKED, FORM)
    return first, held(sides[1], BLOCK, FORM.VALUE_DIM, FORM.VALUE_PADDED, MASKED, FORM)


@triton.jit
def products_of(own, other, OWN_BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr, FORM: tl.constexpr):
    """(q.k, grad_out.v) of a tile of pairs, from what ``held_pair`` gives for both sides."""
    products = product_of(own[0], other[0], OWN_BLOCK, OTHER_BLOCK, FORM.HEAD_DIM, FORM)
    return products, product_of(own[1], other[1], OWN_BLOCK, OTHER_BLOCK, FORM.VALUE_DIM, FORM)


@triton.jit
def _gradients(
    call,
    products,
    row,
    numbers,
    pairs,
    visible,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """(scores, p, ds, keep, factor) of a tile of pairs: as ``pair_gradients``, before dropout.

    Scores are in base-2 units, infinitely low where a pair does not attend. There ds may be NaN.
    ``keep`` says what dropout keeps, if there is any; ``factor`` is not in ds yet, and p without
    FACTOR.
    """
    products, dp = products
    base, shift, weight, slope, center = row
    scale, inverse_keep, drawn, threshold = numbers
    b, h, m, n, M, N = pairs
    _, _, tensors, shapes = call.captured
    if SCORE is None:
        scores = products * (scale * LOG2E)
    else:
        natural = SCORE(products * scale, b, h, m, n, M, N, tensors, shapes)
        # The lowest float, by which some hide pairs, stays one; a NaN stays, too.
        scores = natural * LOG2E
        scores = tl.where((scores < _LOWEST) & (natural >= _LOWEST), _LOWEST, scores)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    exponent = scores - base
    p = tl.exp2(exponent)
    if not FORM.FOLD:
        p = p * weight
    keep = p
    if FORM.DROPOUT:
        keep = kept(drawn, threshold, b, h, m, n)
        dp = tl.where(keep, dp * inverse_keep, 0.0)
    moved = dp - shift
    if FORM.ENTROPY:
        moved = moved - slope * (tl.maximum(exponent, FAR) + center)
    factor = p
    if FACTOR is not None:  # here, where the compiler finds what SCORE has computed already
        factor = FACTOR(products * scale, b, h, m, n, M, N, tensors, shapes)
    return scores, p, p * moved, keep, factor


@triton.jit
def pair_gradients(
    call,
    products,
    row,
    numbers,
    pairs,
    visible,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return (p, ds) of a tile of pairs from its products (q.k, grad_out.v).

    Where dropout drops, p is 0. It is not divided by the share that dropout keeps. The gradient of
    the score is ds, times ``FACTOR`` (arguments as SCORE) if there is one. If MASKED, ``visible``
    says which pairs attend; otherwise all of them do.

    ``call`` is a ``Call``, ``row`` from ``row_values``. ``numbers`` are (scale,
    1 / (1 - dropout_p), the two halves of the seed, the threshold). ``pairs`` are (b, h, m, n, M,
    N).
    """
    scores, p, ds, keep, factor = _gradients(
        call, products, row, numbers, pairs, visible, SCORE, FACTOR, MASKED, FORM
    )
    if FACTOR is not None:
        ds = ds * factor
    if MASKED:
        ds = tl.where(scores == float("-inf"), 0.0, ds)
    if FORM.DROPOUT:
        p = tl.where(keep, p, 0.0)
    return p, ds


@triton.jit
def row_gradients(
    call,
    products,
    row,
    numbers,
    pairs,
    visible,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Sums along the rows of a tile, ``[BLOCK_M]`` each, of (ds * FACTOR, ds, p * FACTOR).

    Arguments as for ``pair_gradients``; p is that without dropout.
    """
    scores, p, ds, _, factor = _gradients(
        call, products, row, numbers, pairs, visible, SCORE, FACTOR, True, FORM
    )
    hidden = scores == float("-inf")
    shares = tl.sum(tl.where(hidden, 0.0, ds * factor), 1)
    weights = tl.sum(tl.where(hidden, 0.0, p * factor), 1)
    return shares, tl.sum(tl.where(hidden, 0.0, ds), 1), weights


class Call(NamedTuple):
    """What all walks of the backward are given: one argument, whose members kernels read by name.

    Counts are not among them: Triton would specialize those in a tuple.

    Args:
        inputs: q, k, v, grad_out, and the values of rows (``row_values``).
        strides: of each.
        starts: the cu_seqlens of queries and keys, and the lengths of keys in pages; each may be
            None.
        captured: tensors and shape numbers of the mask, and of the score.
        numbers: (scale, 1 / (1 - dropout_p), the seed's memory).
        pages: (block table, its entries for an item, the last page), or None.
    """

    inputs: tuple[Tensor, ...]
    strides: tuple[tuple[int, ...], ...]
    starts: tuple[Tensor | None, ...]
    captured: tuple[Any, ...]
    numbers: tuple[Any, ...]
    pages: tuple[Any, ...] | None


class Form(NamedTuple):
    """The constants of a walk of the backward: one constexpr, whose members kernels read by name.

    Functions are not among them: see ``forward.Form``.

    Args:
        BLOCK_M, BLOCK_N: queries and keys of a tile.
        HEAD_DIM, VALUE_DIM: D and Dv; HEAD_PADDED and VALUE_PADDED are the blocks that hold them.
        DROPOUT: some pairs are dropped.
        FOLD: the row sum is in the exponent, see ``rows.folds``.
        ENTROPY: the entropy has a gradient.
        PRECISION: of products of float32.
        WIDE: offsets within a tile take 64 bits.
        PART: columns that products are summed over at a time, or 0 for all of them.
        PAGE: keys of a page, or 0.
        BLIND: no tile is known to be shown whole.
        SKIPS: tiles of which no pair attends may be met.
    """

    BLOCK_M: int
    BLOCK_N: int
    HEAD_DIM: int
    HEAD_PADDED: int
    VALUE_DIM: int
    VALUE_PADDED: int
    DROPOUT: bool
    FOLD: bool
    ENTROPY: bool
    PRECISION: str
    WIDE: bool
    PART: int
    PAGE: int
    BLIND: bool
    SKIPS: bool


class Backward(NamedTuple):
    """One backward pass: what its walks over the pairs share.

    Args:
        problem, operands, config, variant: as ``backward_launches`` takes them.
        upstream: the gradients that come in.
        rows: float32 [planes, *lse.shape], see ``row_values`` and ``planes_of``.
    """

    problem: Problem
    operands: Operands
    upstream: Upstream
    config: Config
    variant: Variant
    rows: Tensor

    def captured(self) -> tuple[Any, ...]:
        """Tensors and shape numbers of the mask, and of the score."""
        operands = self.operands
        return (*captures(operands.mask_tensors), *captures(operands.score_tensors))

    def starts(self) -> tuple[Tensor | None, ...]:
        """Return where sequences lie, as ``Call`` has it."""
        operands = self.operands
        return operands.cu_seqlens_q, operands.cu_seqlens_k, operands.key_lengths

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of all walks."""
        problem, operands = self.problem, self.operands
        table = operands.block_table
        tensors = (*operands[:3], self.upstream.out)
        strides = [head_strides(tensor, problem) for tensor in tensors]
        return {
            "call": Call(
                (*tensors, self.rows),
                (*strides, number_strides(self.rows[0], problem)),
                self.starts(),
                self.captured(),
                (problem.scale, 1 / (1 - problem.dropout_p), seed_memory(problem, operands)),
                None if table is None else (table, table.shape[1], _ANY_PAGE),
            ),
            "batch": problem.batch,
            "heads": problem.heads,
            "group": problem.heads // problem.kv_heads,
            "queries": problem.queries,
            "keys": problem.keys,
            "plane": self.rows[0].numel(),
            "threshold": word(dropout_threshold(problem.dropout_p)),
        }

    def form(self, name: Pass, blocks: Blocks) -> Form:
        """Return the form of a walk that multiplies as a pass does, in blocks."""
        problem = self.problem
        return Form(
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            HEAD_DIM=problem.head_dim,
            HEAD_PADDED=padded(problem.head_dim),
            VALUE_DIM=problem.value_dim,
            VALUE_PADDED=padded(problem.value_dim),
            DROPOUT=problem.dropout_p > 0,
            FOLD=folds(problem),
            ENTROPY=self.upstream.entropy is not None,
            PRECISION=self.config.precision,
            WIDE=wide((*self.operands[:3], self.upstream.out), problem, blocks),
            PART=self.config.part(name, problem),
            PAGE=problem.page_size,
            BLIND=not knows_whole_tiles(problem, self.variant),
            SKIPS=meets_empty_tiles(problem, self.variant),
        )

    def walk(self, name: Pass, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any], Blocks]:
        """(arguments, constants, blocks) of a walk in the blocks of a pass."""
        problem, variant = self.problem, self.variant
        blocks = self.config.blocks(name, problem)
        sides = blocks.queries, blocks.keys
        lists = tile_lists(problem, self.operands, variant.tables, *sides, name == "dkdv")
        constants = {
            "SCORE": variant.score,
            "GAIN": variant.gain,
            "SEEN": variant.seen,
            "FORM": self.form(name, blocks),
        }
        return self.arguments() | {"lists": lists_of(lists)} | arguments, constants, blocks


@triton.jit
def query_step(
    call,
    total,
    fixed,
    n0,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the sum of a tile of queries, dQ not yet scaled, after the tile of keys from ``n0``.

    ``fixed`` is (tiles of queries and gradients (``held``), (keys, values, low, high): see
    ``load_keys``, (b, h, m, M, N), values of rows, numbers). If MASKED, SEEN says which pairs
    attend.
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    tiles, sides, place, row, numbers = fixed
    b, h, m, M, N = place
    k_side, v_side, low, high = sides
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    k_rows = (k_side[0], k_side[1], n0, low, high, k_side[2])
    v_rows = (v_side[0], v_side[1], n0, low, high, v_side[2])
    keys = held_pair((k_rows, v_rows), BLOCK_N, MASKED, FORM)
    products = products_of(tiles, keys, BLOCK_M, BLOCK_N, FORM)
    pairs = (b, h, m, n, M, N)
    _, ds = pair_gradients(call, products, row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM)
    k_tile = keys[0]
    if FORM.PART > 0:
        k_tile = rows_of(k_rows, BLOCK_N, FORM.HEAD_DIM, FORM.HEAD_PADDED, MASKED, FORM)
    return tl.dot(ds.to(k_tile.dtype), k_tile, total, input_precision=FORM.PRECISION)


@triton.jit
def key_step(
    call,
    totals,
    fixed,
    m0,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the sums of a tile of keys after the tile of queries from ``m0``: (dK, dV).

    dK is not yet scaled. ``fixed`` is (gradients, tiles of keys and values (``held``), where
    queries, gradients and values of rows of a head begin, (b, h, n, M, N), (low, high): see
    ``rows_of``, numbers, plane). One gradient may be None: its sum then stays what it is.
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    grads, tiles, heads, place, ends, numbers, plane = fixed
    total_k, total_v = totals
    grad_k, grad_v = grads
    q_head, grad_head, row_head = heads
    b, h, n, M, N = place
    low, high = ends
    q_rows = (q_head, call.strides[0], m0, low, high)
    grad_rows = (grad_head, call.strides[3], m0, low, high)
    q_tile, grad_tile = held_pair((q_rows, grad_rows), BLOCK_M, MASKED, FORM)
    m = m0 + tl.arange(0, BLOCK_M)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    products = products_of(tiles, (q_tile, grad_tile), BLOCK_N, BLOCK_M, FORM)
    # After the products: a thread holds these of all queries, and they need not lie beside both.
    row = row_values(row_head, plane, m, M, FORM.FOLD, FORM.ENTROPY)
    pairs = (b, h, m, n, M, N)
    p, ds = pair_gradients(call, products, row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM)
    if grad_v is not None:
        if FORM.PART > 0:
            grad_tile = rows_of(grad_rows, BLOCK_M, FORM.VALUE_DIM, FORM.VALUE_PADDED, MASKED, FORM)
        p = p.to(grad_tile.dtype)
        total_v = tl.dot(p, grad_tile, total_v, input_precision=FORM.PRECISION)
    if grad_k is not None:
        if FORM.PART > 0:
            q_tile = rows_of(q_rows, BLOCK_M, FORM.HEAD_DIM, FORM.HEAD_PADDED, MASKED, FORM)
        ds = ds.to(q_tile.dtype)
        total_k = tl.dot(ds, q_tile, total_k, input_precision=FORM.PRECISION)
    return total_k, total_v
