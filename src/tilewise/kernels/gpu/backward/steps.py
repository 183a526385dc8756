"""One tile of pairs in the walks of the backward pass: what it adds to dQ, or to dK and dV."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.backward.gradients import pair_gradients
from tilewise.kernels.gpu.backward.rows import row_values
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.kernels.gpu.walk.parts import held, product_of, rows_of


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
    HEAD_DIM: tl.constexpr = FORM.HEAD_DIM
    HEAD_PADDED: tl.constexpr = FORM.HEAD_PADDED
    VALUE_DIM: tl.constexpr = FORM.VALUE_DIM
    VALUE_PADDED: tl.constexpr = FORM.VALUE_PADDED
    tiles, sides, place, row, numbers = fixed
    b, h, m, M, N = place
    k_side, v_side, low, high = sides
    n = n0 + tl.arange(0, BLOCK_N)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    k_rows = (k_side[0], k_side[1], n0, low, high, k_side[2])
    v_rows = (v_side[0], v_side[1], n0, low, high, v_side[2])
    k_tile = held(k_rows, BLOCK_N, HEAD_DIM, HEAD_PADDED, MASKED, FORM)
    v_tile = held(v_rows, BLOCK_N, VALUE_DIM, VALUE_PADDED, MASKED, FORM)
    products = product_of(tiles[0], k_tile, BLOCK_M, BLOCK_N, HEAD_DIM, FORM)
    by_value = product_of(tiles[1], v_tile, BLOCK_M, BLOCK_N, VALUE_DIM, FORM)
    pairs = (b, h, m, n, M, N)
    _, ds = pair_gradients(
        call, (products, by_value), row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM
    )
    if FORM.PART > 0:
        k_tile = rows_of(k_rows, BLOCK_N, HEAD_DIM, HEAD_PADDED, MASKED, FORM)
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
    k_tile, v_tile = tiles
    q_head, grad_head, row_head = heads
    b, h, n, M, N = place
    low, high = ends
    q_rows = (q_head, call.strides[0], m0, low, high)
    grad_rows = (grad_head, call.strides[3], m0, low, high)
    q_tile = held(q_rows, BLOCK_M, FORM.HEAD_DIM, FORM.HEAD_PADDED, MASKED, FORM)
    grad_tile = held(grad_rows, BLOCK_M, FORM.VALUE_DIM, FORM.VALUE_PADDED, MASKED, FORM)
    m = m0 + tl.arange(0, BLOCK_M)[None, :]
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    products = product_of(k_tile, q_tile, BLOCK_N, BLOCK_M, FORM.HEAD_DIM, FORM)
    by_value = product_of(v_tile, grad_tile, BLOCK_N, BLOCK_M, FORM.VALUE_DIM, FORM)
    # After the products: a thread holds these of all queries, and they need not lie beside both.
    row = row_values(row_head, plane, m, M, FORM.FOLD, FORM.ENTROPY)
    pairs = (b, h, m, n, M, N)
    p, ds = pair_gradients(
        call, (products, by_value), row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM
    )
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
