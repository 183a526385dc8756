"""The kernels that add shares to elements that any pair may name, with the same bits in every run.

The first ones do it in fixed point. Sums of integers have no order: each share is multiplied by a
power of two that keeps the sum of all below 2**62, rounded, and added atomically.

Those of a small table make one walk, in floating point. In every tile, each element gets the sum of
the shares that name it. That is a product of the tile with the one-hot matrix of the elements that
its pairs name, made one column at a time. A program keeps its own sum of each element, in double
precision. The programs' sums are folded in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.backward.gradients import key_side, numbers_of, query_side
from tilewise.kernels.gpu.backward.shares import elements_of, seen_in, step_of, terms_of, walk_from
from tilewise.kernels.gpu.walk.tiles import COUNTS, head_of, line_place

# Sums stay below 2**62, also where a logarithm is rounded to the next integer.
_BITS: tl.constexpr = tl.constexpr(60)
_LARGEST_SUM: tl.constexpr = tl.constexpr(1e38)
_LARGEST_POWER: tl.constexpr = tl.constexpr(120)


@triton.jit(do_not_specialize=COUNTS)
def element_kernel(
    call, totals, fixed, factors, lists, batch, heads, group, queries, keys, tiles, elements, plane,
    threshold, SCORE: tl.constexpr, FACTOR: tl.constexpr, SEEN: tl.constexpr, RANGE: tl.constexpr,
    INDEX: tl.constexpr, TABLE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Adds every share of a tile of rows to its element of ``fixed``.

    Without ``fixed``, puts into ``totals`` the sum of their absolute values, or with a TABLE the
    sum of each of ``elements``: float64 [programs, TABLE], TABLE a power of two.
    """
    program = tl.program_id(0)
    b, h, begin, begin_k, M, N, m0 = line_place(
        program % tiles, program // tiles, call.starts, batch, heads, queries, keys, FORM.BM, False
    )
    place = (b, h, begin, begin_k, M, N)
    numbers = numbers_of(call, threshold)
    columns = tl.arange(0, TABLE if TABLE > 0 else FORM.BM)
    total = tl.zeros_like(columns).to(tl.float64)
    if m0 < M:
        walk = walk_from(call, place, m0, lists, RANGE, FORM.BM, FORM.BN, False)
        q_side = query_side(call, plane, place, m0, FORM)
        for step in range(walk[1]):
            n0 = step_of(step, walk, lists, FORM.BN)
            pairs, visible, met = seen_in(call, place, m0, n0, SEEN, FORM.SKIPS, FORM)
            if met:
                k_side = key_side(call, group, place, n0, FORM)
                terms = terms_of(call, q_side, k_side, numbers, pairs, visible, SCORE, FACTOR, FORM)
                if fixed is None and TABLE == 0:
                    total += tl.sum(tl.abs(terms), 1).to(tl.float64)
                else:
                    named = elements_of(call, q_side, k_side, numbers, pairs, INDEX, FORM)
                    if TABLE > 0:
                        for element in range(elements):
                            found = tl.sum(tl.where(named == element, terms, 0.0), 1, True)
                            found = tl.sum(found, 0)
                            total += tl.where(columns == element, found, 0.0).to(tl.float64)
                    else:
                        whole = tl.floor(terms * tl.load(factors) + 0.5).to(tl.int64)
                        # Relaxed: no program reads here what others add.
                        tl.atomic_add(fixed + named, whole, mask=whole != 0, sem="relaxed")
    if TABLE > 0:
        tl.store(totals + program.to(tl.int64) * TABLE + columns, total)
    elif fixed is None:
        tl.store(totals + program, tl.sum(total, 0))


@triton.jit
def line_value(sums, sum_strides, b, h, begin, i, inside, diagonals, DIAGONAL: tl.constexpr):
    """Return the sums of lines ``i``; of diagonals, of which the halves of two tiles are parts."""
    if DIAGONAL == 0:
        return tl.load(head_of(sums, sum_strides, b, h, begin) + i, mask=inside, other=0.0)
    # Of line i, m - n + (columns of tiles) * DIAGONAL - 1, a diagonal t of tiles has those from
    # t * DIAGONAL on, 2 * DIAGONAL - 1 of them.
    tile = i // DIAGONAL
    rest = i % DIAGONAL
    at = head_of(sums, sum_strides, b, h, 0) + i * 0
    own = inside & (tile < diagonals)
    value = tl.load(at + tile * sum_strides[2] + rest, mask=own, other=0.0)
    before = inside & (tile > 0) & (rest < DIAGONAL - 1)
    at = at + (tile - 1) * sum_strides[2] + (rest + DIAGONAL)
    return value + tl.load(at, mask=before, other=0.0)


@triton.jit(do_not_specialize=["batch", "heads", "queries", "keys", "tiles", "origin", "diagonals"])
def spread_lines_kernel(
    sums, sum_strides, captured, totals, fixed, factors, starts, batch, heads, queries, keys, tiles,
    origin, diagonals, INDEX: tl.constexpr, BY_KEYS: tl.constexpr, DIAGONAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Do as ``element_kernel``, for the sums of rows, of columns or of diagonals.

    DIAGONAL is 0, or the size of the tiles that gave the sums; ``origin`` is then the line whose
    ``m - n`` is 0.
    """
    program = tl.program_id(0)
    b, h, begin, begin_k, M, N, first = line_place(
        program % tiles, program // tiles, starts, batch, heads, queries, keys, BLOCK, BY_KEYS
    )
    i = first + tl.arange(0, BLOCK)
    if DIAGONAL > 0:
        m = tl.maximum(i - origin, 0)
        n = tl.maximum(origin - i, 0)
        inside = (m < M) & (n < N)
    elif BY_KEYS:
        m = i * 0
        n = i
        inside = i < N
    else:
        m = i
        n = i * 0
        inside = i < M
    value = line_value(
        sums, sum_strides, b, h, begin_k if BY_KEYS else begin, i, inside, diagonals, DIAGONAL
    )
    if fixed is None:
        tl.store(totals + program, tl.sum(tl.abs(value), 0))
    else:
        m = m[:, None]
        n = n[:, None]
        whole = tl.floor(value * tl.load(factors).to(tl.float64) + 0.5).to(tl.int64)[:, None]
        none = tl.zeros([BLOCK, 1], tl.float32)
        element = INDEX(none, b, h, m, n, M, N, captured[2], captured[3])
        tl.atomic_add(fixed + element, whole, mask=(whole != 0) & inside[:, None], sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def factor_kernel(totals, factors, count, BLOCK: tl.constexpr):
    """From sums of absolute values, what turns numbers into integers, and integers into numbers."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(totals + i, mask=i < count, other=0.0)
    whole = tl.sum(total, 0)
    finite = whole < _LARGEST_SUM
    some = tl.where(finite & (whole > 0.0), whole, 1.0)
    power = _BITS - tl.ceil(tl.log2(some.to(tl.float32)))
    power = tl.minimum(power, _LARGEST_POWER).to(tl.int32)
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    tl.store(factors, tl.where(finite, factor, 0.0))
    tl.store(factors + 1, tl.where(finite, inverse, float("nan")))


@triton.jit(do_not_specialize=["count"])
def number_kernel(fixed, factors, out, count, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Integers, or (without ``factors``) float64, as the numbers of a gradient."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    value = tl.load(fixed + i, mask=inside, other=0).to(tl.float64)
    if factors is not None:
        value = value * tl.load(factors + 1).to(tl.float64)
    if ADD:
        value += tl.load(out + i, mask=inside, other=0.0).to(tl.float64)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["programs", "elements"])
def fold_table_kernel(
    sums,
    out,
    programs,
    elements,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Adds up what the programs found: every program of this kernel those of one element."""
    element = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, programs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(sums + i.to(tl.int64) * TABLE + element, mask=i < programs, other=0.0)
    whole = tl.sum(total, 0)
    if ADD:
        whole += tl.load(out + element).to(tl.float64)
    tl.store(out + element, whole.to(out.dtype.element_ty))
