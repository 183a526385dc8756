"""Add shares to the elements of a small table; any pair may name any element.

The kernels make one walk, in floating point. In every tile, each element gets the sum of the shares
that name it. That is a product of the tile with the one-hot matrix of the elements that its pairs
name, made one column at a time. A program keeps its own sum of each element, in double precision.
The programs' sums are folded in a fixed order. Every run gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.backward.gradients import COUNTS, numbers_of
from tilewise.kernels.gpu.backward.shares import (
    elements_of,
    key_side,
    query_side,
    seen_in,
    step_of,
    terms_of,
    walk_from,
)
from tilewise.kernels.gpu.walk.tiles import line_place


@triton.jit(do_not_specialize=[*COUNTS, "elements"])
def table_kernel(
    call,
    sums,
    lists,
    batch,
    heads,
    group,
    queries,
    keys,
    tiles,
    elements,
    plane,
    threshold,
    SCORE: tl.constexpr,
    FACTOR: tl.constexpr,
    SEEN: tl.constexpr,
    RANGE: tl.constexpr,
    INDEX: tl.constexpr,
    SKIPS: tl.constexpr,
    TABLE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Sums of the shares of a tile of rows by the element that they name.

    ``sums`` is float64 [programs, TABLE]; TABLE is ``elements`` or more, a power of two.
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    program = tl.program_id(0)
    b, h, begin, begin_k, M, N, m0 = line_place(
        program % tiles, program // tiles, call.starts, batch, heads, queries, keys, BLOCK_M, False
    )
    place = (b, h, begin, begin_k, M, N)
    numbers = numbers_of(call, threshold)
    columns = tl.arange(0, TABLE)
    total = tl.zeros([TABLE], tl.float64)
    if m0 < M:
        walk = walk_from(call, place, m0, lists, RANGE, BLOCK_M, BLOCK_N, False)
        q_side = query_side(call, plane, place, m0, FORM)
        for step in range(walk[1]):
            n0 = step_of(step, walk, lists, BLOCK_N)
            pairs, visible, met = seen_in(call, place, m0, n0, SEEN, SKIPS, FORM)
            if met:
                k_side = key_side(call, group, place, n0, FORM)
                terms = terms_of(call, q_side, k_side, numbers, pairs, visible, SCORE, FACTOR, FORM)
                named = elements_of(call, q_side, k_side, numbers, pairs, INDEX, FORM)
                for element in range(elements):
                    found = tl.sum(tl.where(named == element, terms, 0.0), 1, keep_dims=True)
                    found = tl.sum(found, 0)
                    total += tl.where(columns == element, found, 0.0).to(tl.float64)
    tl.store(sums + program.to(tl.int64) * TABLE + columns, total)


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
