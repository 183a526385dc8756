"""What all walks of the backward pass over the pairs share: inputs, and the work on one tile.

That is the gradients of its pairs, and what it adds to dQ, or to dK and dV.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.backward.rows import FAR, row_values
from tilewise.kernels.gpu.walk.pairs import LOG2E, drawing, kept, shown
from tilewise.kernels.gpu.walk.parts import held, product_of, rows_of
from tilewise.kernels.gpu.walk.tiles import head_of, load_tile, store_tile

_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


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
    first = held(sides[0], BLOCK, FORM.D, FORM.D_PADDED, MASKED, FORM)
    return first, held(sides[1], BLOCK, FORM.DV, FORM.DV_PADDED, MASKED, FORM)


@triton.jit
def heads_at(call, b, h, begin):
    """Where queries, incoming gradients and values of rows of a head begin."""
    inputs, strides = call.inputs, call.strides
    q = head_of(inputs[0], strides[0], b, h, begin)
    grad_out = head_of(inputs[3], strides[3], b, h, begin)
    return q, grad_out, head_of(inputs[4], strides[4], b, h, begin)


@triton.jit
def query_side(call, plane, place, m0, FORM: tl.constexpr):
    """Return (q, grad_out, values of rows) of a tile of queries.

    ``place`` is (b, h, begin, begin_k, M, N), see ``line_place``. Operands multiplied in parts are
    not loaded here: see ``held``.
    """
    b, h, begin, _, M, _ = place
    q, grad_out, rows = heads_at(call, b, h, begin)
    sides = (q, call.strides[0], m0, 0, M), (grad_out, call.strides[3], m0, 0, M)
    m = m0 + tl.arange(0, FORM.BM)[:, None]
    own = held_pair(sides, FORM.BM, True, FORM)
    return own[0], own[1], row_values(rows, plane, m, M, FORM.FOLD, FORM.ENTROPY)


@triton.jit
def key_side(call, group, place, n0, FORM: tl.constexpr):
    """(k, v) of a tile of keys, as those of ``query_side``; with a ``group`` of 1, h is theirs."""
    b, h, _, begin_k, _, N = place
    k_head, k_strides, pages = keys_of_head(call, 1, b, h // group, begin_k, FORM)
    v_head, v_strides, pages = keys_of_head(call, 2, b, h // group, begin_k, FORM)
    k = (k_head, k_strides, n0, 0, N, pages)
    v = (v_head, v_strides, n0, 0, N, pages)
    return held_pair((k, v), FORM.BN, True, FORM)


@triton.jit
def products_of(own, other, OWN_BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr, FORM: tl.constexpr):
    """(q.k, grad_out.v) of a tile of pairs, from what ``held_pair`` gives for both sides."""
    products = product_of(own[0], other[0], OWN_BLOCK, OTHER_BLOCK, FORM.D, FORM)
    return products, product_of(own[1], other[1], OWN_BLOCK, OTHER_BLOCK, FORM.DV, FORM)


@triton.jit
def whole_gradients(
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
    scores, p, ds, keep, factor = whole_gradients(
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
    tiles, sides, place, row, numbers = fixed
    b, h, m, M, N = place
    k_side, v_side, low, high = sides
    n = n0 + tl.arange(0, FORM.BN)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    k_rows = (k_side[0], k_side[1], n0, low, high, k_side[2])
    v_rows = (v_side[0], v_side[1], n0, low, high, v_side[2])
    keys = held_pair((k_rows, v_rows), FORM.BN, MASKED, FORM)
    products = products_of(tiles, keys, FORM.BM, FORM.BN, FORM)
    pairs = (b, h, m, n, M, N)
    _, ds = pair_gradients(call, products, row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM)
    k_tile = keys[0]
    if FORM.PART > 0:
        k_tile = rows_of(k_rows, FORM.BN, FORM.D, FORM.D_PADDED, MASKED, FORM)
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
    grads, tiles, heads, place, ends, numbers, plane = fixed
    total_k, total_v = totals
    grad_k, grad_v = grads
    q_head, grad_head, row_head = heads
    b, h, n, M, N = place
    low, high = ends
    q_rows = (q_head, call.strides[0], m0, low, high)
    grad_rows = (grad_head, call.strides[3], m0, low, high)
    q_tile, grad_tile = held_pair((q_rows, grad_rows), FORM.BM, MASKED, FORM)
    m = m0 + tl.arange(0, FORM.BM)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    products = products_of(tiles, (q_tile, grad_tile), FORM.BN, FORM.BM, FORM)
    # After the products: a thread holds these of all queries, and they need not lie beside both.
    row = row_values(row_head, plane, m, M, FORM.FOLD, FORM.ENTROPY)
    pairs = (b, h, m, n, M, N)
    p, ds = pair_gradients(call, products, row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM)
    if grad_v is not None:
        if FORM.PART > 0:
            grad_tile = rows_of(grad_rows, FORM.BM, FORM.DV, FORM.DV_PADDED, MASKED, FORM)
        p = p.to(grad_tile.dtype)
        total_v = tl.dot(p, grad_tile, total_v, input_precision=FORM.PRECISION)
    if grad_k is not None:
        if FORM.PART > 0:
            q_tile = rows_of(q_rows, FORM.BM, FORM.D, FORM.D_PADDED, MASKED, FORM)
        ds = ds.to(q_tile.dtype)
        total_k = tl.dot(ds, q_tile, total_k, input_precision=FORM.PRECISION)
    return total_k, total_v


@triton.jit
def store_sums(
    totals, grads, strides, place, n0, N, numbers, ADD: tl.constexpr, FORM: tl.constexpr
):
    """Write the gradients of a tile of keys of a head, or ADD to them; one may be None.

    ``totals`` are of ``key_step``, ``place`` is (b, h, begin), ``N`` where the keys end.
    """
    b, h, begin = place
    total_k, total_v = totals
    if grads[0] is not None:
        to = head_of(grads[0], strides[0], b, h, begin)
        total_k = total_k * numbers[0]
        if ADD:
            total_k = total_k + load_tile(
                to, n0, strides[0], 0, N, FORM.BN, FORM.D, FORM.D_PADDED, True, True
            )
        store_tile(to, n0, strides[0], N, total_k, FORM.BN, FORM.D, FORM.D_PADDED)
    if grads[1] is not None:
        to = head_of(grads[1], strides[1], b, h, begin)
        if FORM.DROPOUT:
            total_v = total_v * numbers[1]
        if ADD:
            total_v = total_v + load_tile(
                to, n0, strides[1], 0, N, FORM.BN, FORM.DV, FORM.DV_PADDED, True, True
            )
        store_tile(to, n0, strides[1], N, total_v, FORM.BN, FORM.DV, FORM.DV_PADDED)
