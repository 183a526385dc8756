"""Tiles of rows, and products of tiles that registers cannot hold: over parts of their columns."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.walk.tiles import load_keys, load_tile, page_of


@triton.jit
def rows_of(
    side,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return what ``load_tile`` gives; ``side`` is (head, strides, first row, low, high).

    Of keys it may have the ``pages`` of ``load_keys`` too. They count if the form has a PAGE.
    """
    head, strides, first, low, high = side[0], side[1], side[2], side[3], side[4]
    if len(side) > 5 and FORM.PAGE > 0:
        keys = (head, strides, side[5])
        tile = load_keys(keys, first, low, high, BLOCK, WIDTH, PADDED, MASKED, FORM)
    else:
        tile = load_tile(head, first, strides, low, high, BLOCK, WIDTH, PADDED, MASKED, FORM.WIDE)
    return tile


@triton.jit
def _part_of(
    side,
    column,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
):
    """Columns ``column`` and on of what ``rows_of`` gives where MASKED, ``[BLOCK, PART]``."""
    head, strides, first, low, high = side[0], side[1], side[2], side[3], side[4]
    rows = tl.arange(0, BLOCK)[:, None]
    columns = column + tl.arange(0, FORM.PART)[None, :]
    inside = (first + rows >= low) & (first + rows < high)
    if len(side) > 5 and FORM.PAGE > 0:
        row = first + rows
        page = page_of(side[5], row // FORM.PAGE, inside, True)
        places = head + page * strides[0] + (row % FORM.PAGE).to(tl.int64) * strides[2]
    elif FORM.WIDE:
        places = head + tl.cast(strides[2], tl.int64) * first + rows.to(tl.int64) * strides[2]
    else:
        places = head + tl.cast(strides[2], tl.int64) * first + rows * strides[2]
    if WIDTH % FORM.PART != 0:
        inside = inside & (columns < WIDTH)
    if FORM.WIDE:
        columns = columns.to(tl.int64)
    return tl.load(places + columns * strides[3], mask=inside, other=0.0)


@triton.jit
def product_in_parts(
    own,
    other,
    OWN_BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
):
    """``own @ other^T`` of two tiles of rows, of which the form's PART are loaded at a time.

    ``own`` and ``other`` are as ``side`` of ``rows_of``: rows outside of [low, high) count as 0.
    """
    total = tl.zeros([OWN_BLOCK, OTHER_BLOCK], tl.float32)
    # What a program owns is not to be moved out of the loop, and held in registers after all. A
    # compiler that knew how often the loop goes round would unroll it first and do that then; it
    # does not know that the walk has rows to visit.
    stop = WIDTH * tl.minimum(other[4] - other[3], 1)
    for column in tl.range(0, stop, FORM.PART, num_stages=1, disable_licm=True):
        left = _part_of(own, column, OWN_BLOCK, WIDTH, FORM)
        right = _part_of(other, column, OTHER_BLOCK, WIDTH, FORM)
        total = tl.dot(left, tl.trans(right), total, input_precision=FORM.PRECISION)
    return total


@triton.jit
def held(
    side,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """The tile of ``rows_of``; if the form has a PART the side as it is, and nothing is loaded."""
    tile = side
    if FORM.PART == 0:
        tile = rows_of(side, BLOCK, WIDTH, PADDED, MASKED, FORM)
    return tile


@triton.jit
def product_of(
    own,
    other,
    OWN_BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FORM: tl.constexpr,
):
    """``own @ other^T`` of what ``held`` gave for two tiles of rows."""
    if FORM.PART == 0:
        product = tl.dot(own, tl.trans(other), input_precision=FORM.PRECISION)
    else:
        product = product_in_parts(own, other, OWN_BLOCK, OTHER_BLOCK, WIDTH, FORM)
    return product
