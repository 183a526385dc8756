"""The kernels that add up shares of pairs in a fixed order: see ``captured``."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.backward.gradients import (
    key_side,
    numbers_of,
    pair_gradients,
    products_of,
    query_side,
    whole_gradients,
)
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.kernels.gpu.walk.parts import product_of
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    head_of,
    lengths_of,
    line_place,
    list_of,
    range_of,
)


@triton.jit
def seen_in(call, place, m0, n0, SEEN: tl.constexpr, SKIPS: tl.constexpr, FORM: tl.constexpr):
    """(pairs, visible, met): the pairs of a tile, which of them attend, and whether any does.

    ``pairs`` are (b, h, m, n, M, N). Without SKIPS every tile is met.
    """
    b, h, _, _, M, N = place
    m = m0 + tl.arange(0, FORM.BM)[:, None]
    n = n0 + tl.arange(0, FORM.BN)[None, :]
    visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    met = True
    if SKIPS:
        met = tl.max(visible.to(tl.int32)) > 0
    return (b, h, m, n, M, N), visible, met


@triton.jit
def terms_of(
    call,
    q_side,
    k_side,
    numbers,
    pairs,
    visible,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the shares of a tile of pairs, ``[BM, BN]``; 0 for those that do not attend.

    ``call`` is a ``Call``, ``q_side`` of ``query_side``, ``k_side`` of
    ``key_side``, ``numbers`` of ``numbers_of``, ``pairs`` of ``seen_in``.
    """
    products = products_of(q_side, k_side, FORM.BM, FORM.BN, FORM)
    _, terms = pair_gradients(
        call, products, q_side[2], numbers, pairs, visible, SCORE, FACTOR, True, FORM
    )
    return terms


@triton.jit
def elements_of(call, q_side, k_side, numbers, pairs, INDEX: tl.constexpr, FORM: tl.constexpr):
    """Return which element of the captured tensor each pair of a tile names."""
    # A load may be indexed by the score; where none is, this product is left out.
    scores = product_of(q_side[0], k_side[0], FORM.BM, FORM.BN, FORM.D, FORM)
    b, h, m, n, M, N = pairs
    return INDEX(scores * numbers[0], b, h, m, n, M, N, call.captured[2], call.captured[3])


@triton.jit
def compensated(total, lost, terms):
    """Return (total, lost) after ``terms``; ``lost`` is what the float32 total lost so far."""
    more = terms - lost
    larger = total + more
    return larger, (larger - total) - more


@triton.jit
def walk_from(call, place, first, lists, RANGE: tl.constexpr, BLOCK, OTHER, BY_KEYS: tl.constexpr):
    """(start, count, listed) of the walk of a tile of queries over keys, or of keys over queries.

    ``lists`` are (order, counts, numbers), or None three times; without them ``listed`` is nothing.
    """
    b, h, _, _, M, N = place
    start = first * 0
    listed = start
    if lists[0] is not None:
        listed, whole, partial = list_of(lists, b, h, first // BLOCK)
        count = whole + partial
    else:
        low, _, _, high = range_of(b, first, M, N, call.captured, RANGE, BLOCK, BY_KEYS)
        start = (tl.maximum(low, 0) // OTHER * OTHER).to(tl.int32)
        count = tl.cast((tl.maximum(high - start, 0) + OTHER - 1) // OTHER, tl.int32)
    return start, count, listed


@triton.jit
def step_of(i, walk, lists, OTHER):
    """Return where tile ``i`` of a walk begins."""
    at = walk[0] + i * OTHER
    if lists[0] is not None:
        at = tl.load(walk[2] + i) * OTHER
    return at


@triton.jit(do_not_specialize=COUNTS)
def line_kernel(
    call, sums, sum_strides, lists, batch, heads, group, queries, keys, tiles, plane, threshold,
    SCORE: tl.constexpr, FACTOR: tl.constexpr, SEEN: tl.constexpr, RANGE: tl.constexpr,
    FORM: tl.constexpr, BY_KEYS: tl.constexpr, DUE: tl.constexpr,
):  # fmt: skip
    """Sum the shares of each row of pairs, or (BY_KEYS) of each column, in float64.

    Row sums are corrected for the rounding of the row's shift. DUE is the plane of ``rows`` with
    the sum of the gradients of its scores; 0 where it is not known, and nothing is corrected.
    """
    program = tl.program_id(0)
    BLOCK: tl.constexpr = FORM.BN if BY_KEYS else FORM.BM
    OTHER: tl.constexpr = FORM.BM if BY_KEYS else FORM.BN
    b, h, begin, begin_k, M, N, first = line_place(
        program % tiles, program // tiles, call.starts, batch, heads, queries, keys, BLOCK, BY_KEYS
    )
    place = (b, h, begin, begin_k, M, N)
    length = N if BY_KEYS else M
    if first >= length:
        return
    numbers = numbers_of(call, threshold)
    walk = walk_from(call, place, first, lists, RANGE, BLOCK, OTHER, BY_KEYS)
    i = first + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    if BY_KEYS:
        k_side = key_side(call, group, place, first, FORM)
        for step in range(walk[1]):
            m0 = step_of(step, walk, lists, OTHER)
            pairs, visible, met = seen_in(call, place, m0, first, SEEN, FORM.SKIPS, FORM)
            if met:
                q_side = query_side(call, plane, place, m0, FORM)
                terms = terms_of(call, q_side, k_side, numbers, pairs, visible, SCORE, FACTOR, FORM)
                total += tl.sum(terms, 0).to(tl.float64)
    else:
        q_side = query_side(call, plane, place, first, FORM)
        gathered = tl.zeros([BLOCK], tl.float64)
        weight = tl.zeros([BLOCK], tl.float64)
        for step in range(walk[1]):
            n0 = step_of(step, walk, lists, OTHER)
            pairs, visible, met = seen_in(call, place, first, n0, SEEN, FORM.SKIPS, FORM)
            if met:
                k_side = key_side(call, group, place, n0, FORM)
                products = products_of(q_side, k_side, BLOCK, OTHER, FORM)
                scores, p, ds, _, factor = whole_gradients(
                    call, products, q_side[2], numbers, pairs, visible, SCORE, FACTOR, True, FORM
                )
                hidden = scores == float("-inf")
                total += tl.sum(tl.where(hidden, 0.0, ds * factor), 1).to(tl.float64)
                gathered += tl.sum(tl.where(hidden, 0.0, ds), 1).to(tl.float64)
                weight += tl.sum(tl.where(hidden, 0.0, p * factor), 1).to(tl.float64)
        if DUE > 0:
            values = head_of(call.inputs[4], call.strides[4], b, h, begin) + DUE * plane
            over = (gathered - tl.load(values + i, mask=i < length, other=0.0)) * weight
            # What is infinite or NaN in a row stays what it is.
            total = total - tl.where(tl.abs(over) < float("inf"), over, 0.0)
    at = head_of(sums, sum_strides, b, h, begin_k if BY_KEYS else begin)
    tl.store(at + i, total, mask=i < length)


@triton.jit(do_not_specialize=["batch", "heads", "length", "out_length", "blocks"])
def fold_kernel(
    sums, sum_strides, out, out_strides, cu, batch, heads, length, out_length, blocks,
    KEEP_B: tl.constexpr, KEEP_H: tl.constexpr, KEEP_I: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Adds up the sums of lines over the batch items, heads and lines that are not kept.

    ``out_strides`` are along (b, h, line); ADD adds to what is there.
    """
    program = tl.program_id(0)
    block = program % blocks
    kept_h = (program // blocks) % heads if KEEP_H else 0
    kept_b = program // blocks // heads if KEEP_H else program // blocks
    first_b = kept_b if KEEP_B else 0
    last_b = kept_b + 1 if KEEP_B else batch
    first_h = kept_h
    last_h = kept_h + 1 if KEEP_H else heads
    i = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for batch_item in range(first_b, last_b):
        b = program * 0 + batch_item
        begin = 0
        count = length
        if cu is not None:
            begin = tl.load(cu + b)
            count = (tl.load(cu + b + 1) - begin).to(tl.int32)
        for head in range(first_h, last_h):
            h = program * 0 + head
            at = head_of(sums, sum_strides, b, h, begin)
            if KEEP_I:
                total += tl.load(at + i, mask=i < count, other=0.0)
            else:
                for start in range(0, count, BLOCK):
                    j = start + tl.arange(0, BLOCK)
                    total += tl.load(at + j, mask=j < count, other=0.0)
    to = out + tl.cast(out_strides[0], tl.int64) * kept_b
    to = to + tl.cast(out_strides[1], tl.int64) * kept_h
    if KEEP_I:
        to = to + i.to(tl.int64) * out_strides[2]
        inside = i < out_length
        if ADD:
            total += tl.load(to, mask=inside, other=0.0).to(tl.float64)
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)
    else:
        whole = tl.sum(total, 0)
        if ADD:
            whole += tl.load(to).to(tl.float64)
        tl.store(to, whole.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=[*COUNTS, "rows", "columns"])
def pair_kernel(
    call, out, out_strides, batch, heads, group, queries, keys, rows, columns, row_tiles,
    column_tiles, plane, threshold, SCORE: tl.constexpr, FACTOR: tl.constexpr, SEEN: tl.constexpr,
    FORM: tl.constexpr, KEEP_B: tl.constexpr, KEEP_H: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The shares of a tile of pairs, summed over the batch items and heads that are not kept.

    The sum is compensated: what a float32 loses is carried along. ``out_strides`` are along
    (b, h, m, n); ``rows`` and ``columns`` are the sizes of ``out`` along m and n.
    """
    program = tl.program_id(0)
    n0 = program % column_tiles * FORM.BN
    m0 = program // column_tiles % row_tiles * FORM.BM
    line = program // column_tiles // row_tiles
    kept_h = line % heads if KEEP_H else 0
    kept_b = line // heads if KEEP_H else line
    first_b = kept_b if KEEP_B else 0
    last_b = kept_b + 1 if KEEP_B else batch
    first_h = kept_h
    last_h = kept_h + 1 if KEEP_H else heads
    numbers = numbers_of(call, threshold)
    total = tl.full([FORM.BM, FORM.BN], 0.0, tl.float32)
    lost = tl.full([FORM.BM, FORM.BN], 0.0, tl.float32)
    for batch_item in range(first_b, last_b):
        b = program * 0 + batch_item
        begin, begin_k, M, N = lengths_of(b, call.starts, queries, keys)
        for head in range(first_h, last_h):
            h = program * 0 + head
            place = (b, h, begin, begin_k, M, N)
            pairs, visible, met = seen_in(call, place, m0, n0, SEEN, True, FORM)
            if met:
                q_side = query_side(call, plane, place, m0, FORM)
                k_side = key_side(call, group, place, n0, FORM)
                terms = terms_of(call, q_side, k_side, numbers, pairs, visible, SCORE, FACTOR, FORM)
                total, lost = compensated(total, lost, terms)
    m = m0 + tl.arange(0, FORM.BM)
    n = n0 + tl.arange(0, FORM.BN)
    to = out + tl.cast(out_strides[0], tl.int64) * kept_b
    to = to + tl.cast(out_strides[1], tl.int64) * kept_h
    to = to + m[:, None].to(tl.int64) * out_strides[2]
    to = to + n[None, :].to(tl.int64) * out_strides[3]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    if ADD:
        whole = tl.load(to, mask=inside, other=0.0).to(tl.float64) + total.to(tl.float64)
        tl.store(to, whole.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def diagonal_kernel(
    call, sums, batch, heads, group, queries, keys, tiles, row_tiles, plane, threshold,
    SCORE: tl.constexpr, FACTOR: tl.constexpr, SEEN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Sums of shares along diagonals: a program adds up the tiles of one diagonal of tiles.

    ``sums`` is float64 [B, Hq, tiles, 2 * BLOCK]: of a diagonal of tiles its ``m - n`` from
    ``1 - BLOCK`` to ``BLOCK - 1``, counted from that of the tiles' first pairs. Tiles are square.
    """
    BLOCK: tl.constexpr = FORM.BM
    program = tl.program_id(0)
    column_tiles = tiles + 1 - row_tiles
    offset = program % tiles - (column_tiles - 1)
    line = program // tiles
    place = (line // heads, line % heads, 0, 0, queries, keys)
    numbers = numbers_of(call, threshold)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    lost = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(tl.maximum(offset, 0), tl.minimum(row_tiles, column_tiles + offset)):
        m0 = i * BLOCK
        n0 = (i - offset) * BLOCK
        pairs, visible, met = seen_in(call, place, m0, n0, SEEN, True, FORM)
        if met:
            q_side = query_side(call, plane, place, m0, FORM)
            k_side = key_side(call, group, place, n0, FORM)
            terms = terms_of(call, q_side, k_side, numbers, pairs, visible, SCORE, FACTOR, FORM)
            total, lost = compensated(total, lost, terms)
    wide = total.to(tl.float64) - lost.to(tl.float64)
    i = tl.arange(0, BLOCK)
    distance = i[:, None] - i[None, :]
    at = sums + program.to(tl.int64) * (2 * BLOCK)
    for d in range(2 * BLOCK - 1):
        tl.store(at + d, tl.sum(tl.where(distance == d + 1 - BLOCK, wide, 0.0)))
