"""The online softmax of every walk over blocks of keys, and how a row's walk ends.

Scores are kept in the units that are cheapest to compare. Without a score function, that is the
bare product q.k. The scale, which must then be positive, belongs to the exponent. One fused
multiply-add per pair makes ``scale * log2(e) * (q.k - top)``. With a score function it is the
natural logit. It is subtracted before it is scaled, so even the lowest float stays finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.walk.float8 import RAISED, decoded, widened
from tilewise.kernels.gpu.walk.pairs import LOG2E, kept, shown
from tilewise.kernels.gpu.walk.parts import product_in_parts, rows_of
from tilewise.kernels.gpu.walk.tiles import load_keys, load_tile, row_scales

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def queries_at(head, strides, m0, M, FORM: tl.constexpr):
    """The tile of queries from row ``m0`` on; if the form has a PART the side of ``rows_of``.

    If it has a TAIL, two tiles: the columns before it, and those of it.
    """
    tile = (head, strides, m0, 0, M)
    if FORM.PART == 0:
        whole = rows_of(tile, FORM.BM, FORM.D - FORM.TAIL, FORM.D_PADDED, True, FORM)
        whole = decoded(whole, FORM)
        if FORM.TAIL > 0:
            after = (tail_from(head, strides, FORM), strides, m0, 0, M)
            tail = rows_of(after, FORM.BM, FORM.TAIL, FORM.TAIL_PADDED, True, FORM)
            tile = (whole, tail)  # type: ignore[assignment]
        else:
            tile = whole
    return tile


@triton.jit
def tail_from(head, strides, FORM: tl.constexpr):
    """Where the tail of a head's first row begins."""
    return head + tl.cast(strides[3], tl.int64) * FORM.D_PADDED


@triton.jit
def before_tail(q, FORM: tl.constexpr):
    """The tile of the columns before the tail, of what ``queries_at`` gives."""
    tile = q
    if FORM.TAIL > 0 and FORM.PART == 0:
        tile = q[0]
    return tile


@triton.jit
def scaled_scores(products, scale, n, place, captured, SCORE: tl.constexpr, FOLDED: tl.constexpr):
    """Scores of a tile in the units of the walk."""
    if FOLDED:
        return products
    scores = products * scale
    if SCORE is not None:
        b, h, m, M, N = place
        scores = SCORE(scores, b, h, m, n, M, N, captured[2], captured[3])
    return scores


@triton.jit
def scores_of_block(
    q,
    side,
    n0,
    low,
    high,
    place,
    scale,
    captured,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """(scores, k) of the block of keys from ``n0`` on: in the units of the walk, and its tile.

    The tile is that of the columns before the tail; without a tail it is nothing. If MASKED, pairs
    that SEEN hides have -inf. ``side``, ``low`` and ``high`` are those of ``load_keys``. If the
    form has a PART, the product is summed over so many columns at a time, and q is not a tile but a
    ``side`` of ``rows_of``.
    """
    b, h, m, M, N = place
    n = (n0 + tl.arange(0, FORM.BN))[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN)
    tile = n0
    if FORM.PART == 0:
        left = before_tail(q, FORM)
        width: tl.constexpr = FORM.D - FORM.TAIL
        k = load_keys(side, n0, low, high, FORM.BN, width, left.shape[1], MASKED, FORM)
        k = widened(k, left.dtype, FORM)
        products = tl.dot(left, tl.trans(k), input_precision=FORM.PRECISION)
        if FORM.TAIL > 0:
            tile = k
            after = (tail_from(side[0], side[1], FORM), side[1], side[2])
            k = load_keys(after, n0, low, high, FORM.BN, FORM.TAIL, FORM.TAIL_PADDED, MASKED, FORM)
            k = widened(k, left.dtype, FORM)
            products = tl.dot(q[1], tl.trans(k), products, input_precision=FORM.PRECISION)
        if FORM.STORED != "":
            scales = row_scales(side, n0, low, high, FORM.BN, MASKED, FORM.PAGE)
            products = products * scales[None, :]
    else:
        keys = (side[0], side[1], n0, low, high)
        products = product_in_parts(q, keys, m.shape[0], FORM.BN, FORM.D, FORM)
    scores = scaled_scores(products, scale, n, place, captured, SCORE, FORM.FOLDED)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    return scores, tile


@triton.jit
def nothing_seen(FORM: tl.constexpr):
    """The state of rows that ``absorb`` has met no block of: (output, maximum, sum)."""
    return (
        tl.full([FORM.BM, FORM.DV_PADDED], 0.0, tl.float32),
        tl.full([FORM.BM], float("-inf"), tl.float32),
        tl.full([FORM.BM], 0.0, tl.float32),
    )


@triton.jit
def weighed(
    scores, top, total, scale, GUARDED: tl.constexpr, RAISED: tl.constexpr, FOLDED: tl.constexpr
):
    """(p, fade, top, total) after a tile of scores: what was summed before counts ``fade`` times.

    GUARDED: a row may have seen nothing yet. Probabilities are raised by the power of two RAISED.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if GUARDED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    if FOLDED:
        unit = scale * LOG2E
        least = base * unit
        if RAISED > 0:
            least = least - RAISED
        exponent = scores * unit - least[:, None]
        moved = (top - base) * unit
    else:
        exponent = (scores - base[:, None]) * LOG2E
        if RAISED > 0:
            exponent = exponent + RAISED
        moved = (top - base) * LOG2E
    p = tl.exp2(exponent)
    fade = tl.exp2(moved)
    return p, fade, new_top, total * fade + tl.sum(p, 1)


@triton.jit
def absorb(
    call,
    state,
    fixed,
    n0,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """One block of keys in the online softmax: a ``STEP`` of ``tiles.walked``.

    ``fixed`` is (queries, sides, place, numbers). The sides are (keys, values, low, high): what
    ``load_keys`` takes.
    """
    acc, top, total = state
    q, sides, place, numbers = fixed
    k_side, v_side, low, high = sides
    b, h, m, _, _ = place
    scale, drawn, drop_below = numbers
    EIGHT: tl.constexpr = (FORM.FP8 == "short") | (FORM.FP8 == "whole")
    scores, k = scores_of_block(
        q, k_side, n0, low, high, place, scale, call.captured, SEEN, SCORE, MASKED, FORM
    )
    guarded: tl.constexpr = MASKED or SCORE is not None
    p, fade, top, total = weighed(
        scores, top, total, scale, guarded, RAISED if EIGHT else 0, FORM.FOLDED
    )
    if FORM.DROPOUT:
        n = (n0 + tl.arange(0, FORM.BN))[None, :]
        p = tl.where(kept(drawn, drop_below, b, h, m, n), p, 0.0)
    acc = acc * fade[:, None]
    if FORM.SHARED and FORM.PART == 0:
        v = k
    elif (
        FORM.TRANSPOSED
    ):  # blocks are there whole: loads that ask for every key would go byte by byte
        v = load_tile(
            v_side[0], n0, v_side[1], low, high, FORM.BN, FORM.DV, acc.shape[1], False, FORM.WIDE
        )
        if MASKED:
            row = (n0 + tl.arange(0, FORM.BN))[:, None]
            v = tl.where((row >= low) & (row < high), v, tl.zeros_like(v))
    else:
        v = load_keys(v_side, n0, low, high, FORM.BN, FORM.DV, acc.shape[1], MASKED, FORM)
        kind = before_tail(q, FORM).dtype if FORM.STORED != "" else v.dtype
        v = widened(v, kind, FORM)
        if FORM.STORED != "":
            scales = row_scales(v_side, n0, low, high, FORM.BN, MASKED, FORM.PAGE)
            if kind == tl.float16:  # a small scale would make subnormal numbers of p
                v = (v.to(tl.float32) * scales[:, None]).to(tl.float16)
            else:
                p = p * scales[None, :]
    if FORM.FP8 == "short":
        # The number only keeps the compiler from adding to acc within the matrix units after all.
        acc = acc + tl.dot(p.to(v.dtype), v, max_num_imprecise_acc=FORM.BN)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=FORM.PRECISION)
    return acc, top, total


@triton.jit
def tops(top, scale, FOLDED: tl.constexpr):
    """Row maxima in natural and in base-2 units; only those of dead rows are -inf."""
    if FOLDED:
        return top * scale, top * (scale * LOG2E)
    limited = tl.minimum(tl.maximum(top * LOG2E, LOWEST), -LOWEST)
    return top, tl.where(top == float("-inf"), top, limited)


@triton.jit
def beside_sink(base2, sink):
    """Return a row's largest exponent and its sink, each less the larger of both (0 or less)."""
    _, sink2 = tops(sink, 1.0, False)
    highest = tl.maximum(base2, sink2)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    return base2 - highest, sink2 - highest


@triton.jit
def with_sink(natural, base2, total, sink):
    """(lse, weight) of rows with a sink; the weight makes a probability of an exponential."""
    of_keys, of_sink = beside_sink(base2, sink)
    keys = tl.math.exp2(of_keys)
    whole = keys * total + tl.math.exp2(of_sink)
    weight = tl.where(whole == 0, 0.0, keys / tl.where(whole == 0, 1.0, whole))
    own = tl.where(total == 0, float("-inf"), natural + tl.log(tl.where(total == 0, 1.0, total)))
    larger = tl.maximum(own, sink)
    larger = tl.where(larger == float("-inf"), 0.0, larger)
    lse = larger + tl.log(tl.exp(own - larger) + tl.exp(sink - larger))
    return lse, weight


@triton.jit
def settled(top, total, sink, scale, keep_factor, FOLDED: tl.constexpr, DROPOUT: tl.constexpr):
    """Return what a walk comes to: (weight, (lse, row_max)).

    The output is the unfinished one times the weight.
    """
    natural, base2 = tops(top, scale, FOLDED)
    dead = total == 0
    if sink is not None:
        lse, weight = with_sink(natural, base2, total, sink)
    else:
        weight = tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, total))
        lse = natural + tl.log(tl.where(dead, 1.0, total))
        lse = tl.where(dead, float("-inf"), lse)
    if DROPOUT:
        weight = weight * keep_factor
    return weight, (lse, base2)


@triton.jit
def store_numbers(places, at, inside, row, total):
    """The numbers of rows, at (lse, row_max, row_sum): what ``settled`` gave, and their sums."""
    lse, row_max, row_sum = places
    tl.store(lse + at, row[0], mask=inside)
    tl.store(row_max + at, row[1], mask=inside)
    tl.store(row_sum + at, total, mask=inside)
