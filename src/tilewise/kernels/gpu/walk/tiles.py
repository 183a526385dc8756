"""Find the way of every walk over the pairs: tiles in memory, their ranges, packed sequences.

Grids are along one axis: all tiles of a head, then the next head, then the next batch item, so that
programs that run together share their keys. Offsets from the beginning of a head take 64 bits,
those within a tile 32 unless the strides are extraordinary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.walk.lists import TileLists
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.problem import START, Operands, Problem
from tilewise.reference.philox import seed_tensor

# What is counted, by name: no kernel is compiled anew for a count of 1, or a multiple of 16.
COUNTS = [
    *("batch", "heads", "kv_heads", "group", "queries", "keys", "tiles", "section", "lines"),
    *("last_page", "row_tiles", "column_tiles", "slots", "blocks", "plane", "stored", "units"),
    *("elements", "threshold", "drop_below"),
]
MET: tl.constexpr = tl.constexpr(32)  # tiles looked at together: one for each lane of a warp


@triton.jit
def slot_of(program, tiles, section, lines, REVERSED: tl.constexpr):
    """Return the tile and the line (a head of a batch item) of a program.

    Programs are numbered by sections of ``section`` lines, within these by tiles, and then by
    lines. So those that run together find their keys in the cache. REVERSED: the last tiles come
    first.
    """
    first = program // (section * tiles) * section
    within = program % (section * tiles)
    here = tl.minimum(section, lines - first)
    tile = within // here
    if REVERSED:
        tile = tiles - 1 - tile
    return tile, first + within % here


@triton.jit
def place_of(tile, cu, batch, BLOCK: tl.constexpr):
    """Map a tile slot of a packed call to its sequence, first row and the sequence's offset.

    Sequence ``b`` has the slots from ``cu[b] // BLOCK + b`` on, at least as many as it has tiles.
    Extra slots lie beyond its end. No slot count depends on the values of ``cu``.
    """
    low = tile * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu + middle) // BLOCK + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(cu + low)
    first = (tile - (begin // BLOCK + low)) * BLOCK
    return low, first.to(tl.int32), begin


@triton.jit
def lengths_of(b, starts, queries, keys):
    """(begin, begin_k, M, N) of a batch item, or of a sequence: offsets in memory and lengths.

    ``starts`` are the cu_seqlens of queries and keys, None if dense, for keys also with pages, and
    the lengths of keys in pages, or None.
    """
    cu_q, cu_k = starts[0], starts[1]
    begin = b * 0
    begin_k = b * 0
    M = queries
    N = keys
    if cu_q is not None:
        begin = tl.load(cu_q + b)
        M = (tl.load(cu_q + b + 1) - begin).to(tl.int32)
    if cu_k is not None:
        begin_k = tl.load(cu_k + b)
        N = (tl.load(cu_k + b + 1) - begin_k).to(tl.int32)
    if starts[2] is not None:
        N = keys_in(starts[2], b, keys)
    return begin, begin_k, M, N


@triton.jit
def line_place(
    tile,
    line,
    starts,
    batch,
    heads,
    queries,
    keys,
    BLOCK: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """(b, h, begin, begin_k, M, N, first): tile ``tile`` of rows, or of keys, begins at the last.

    ``line`` counts heads and batch items, or heads in a packed call.
    """
    if starts[0] is None:
        b = line // heads
        h = line % heads
        first = tile * BLOCK
    else:
        h = line
        b, first, _ = place_of(tile, starts[1] if BY_KEYS else starts[0], batch, BLOCK)
    begin, begin_k, M, N = lengths_of(b, starts, queries, keys)
    return b, h, begin, begin_k, M, N, first


@triton.jit
def load_tile(
    base,
    first,
    strides,
    low,
    high,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rows ``first`` and on of a matrix, ``[BLOCK, PADDED]``; 0 beyond WIDTH.

    Where MASKED, rows outside of [low, high) are 0 too. WIDE: offsets in a tile take 64 bits.
    """
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, PADDED)
    places = base + tl.cast(strides[2], tl.int64) * first
    if WIDE:
        places = places + rows[:, None].to(tl.int64) * strides[2]
        places = places + columns[None, :].to(tl.int64) * strides[3]
    else:
        places = places + rows[:, None] * strides[2] + columns[None, :] * strides[3]
    if MASKED:
        inside = ((first + rows >= low) & (first + rows < high))[:, None]
        if WIDTH != PADDED:
            inside = inside & (columns < WIDTH)[None, :]
        return tl.load(places, mask=inside, other=0.0)
    if WIDTH != PADDED:
        return tl.load(places, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def load_keys(
    side,
    first,
    low,
    high,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Load rows ``first`` and on of the keys or the values of a head, as ``load_tile`` does.

    ``side`` is (head, strides, pages). If FORM.PAGE is 0, rows follow one another from ``head`` on,
    and ``pages`` is unused. Otherwise ``pages`` (made by ``keys_at``) gives the page of PAGE rows
    that holds a row. Pages are ``strides[0]`` apart; ``head`` is where those of page 0 begin. If
    MASKED, entries for rows outside of [low, high) are not read. ``first`` is a multiple of BLOCK.
    ``pages`` with a descriptor (``described_pages``) are read by it.
    ``side`` may have one more part: scales, see ``row_scales``.
    """
    head, strides = side[0], side[1]
    if FORM.PAGE == 0:
        tile = load_tile(head, first, strides, low, high, BLOCK, WIDTH, PADDED, MASKED, FORM.WIDE)
    elif FORM.PAGE % BLOCK == 0:  # one page has all of the tile
        within = first % FORM.PAGE
        before = first - within
        page = page_of(side[2], first // FORM.PAGE, first < high, MASKED)
        head += page * strides[0]
        low -= before
        high -= before
        if len(side[2]) > 2:
            tile = side[2][2].load([page.to(tl.int32), side[2][3], within, 0])
            tile = tile.reshape(BLOCK, PADDED)
        else:
            tile = load_tile(
                head, within, strides, low, high, BLOCK, WIDTH, PADDED, MASKED, FORM.WIDE
            )
    else:
        rows = first + tl.arange(0, BLOCK)
        columns = tl.arange(0, PADDED)
        inside = (rows >= low) & (rows < high)
        page = page_of(side[2], rows // FORM.PAGE, inside, MASKED)
        places = head + (page * strides[0] + (rows % FORM.PAGE).to(tl.int64) * strides[2])[:, None]
        if FORM.WIDE:
            places = places + columns[None, :].to(tl.int64) * strides[3]
        else:
            places = places + columns[None, :] * strides[3]
        known = (columns < WIDTH)[None, :]
        if MASKED:
            tile = tl.load(places, mask=inside[:, None] & known, other=0.0)
        elif WIDTH != PADDED:
            tile = tl.load(places, mask=known, other=0.0)
        else:
            tile = tl.load(places)
    return tile


@triton.jit
def scaled_side(head, strides, pages, scales, h):
    """The ``side`` of ``load_keys``; ``scales`` is (pointer, strides) for pages of 8 bits, or None.

    A fourth part is where the scales of the head's rows begin, and their strides (page, h, row).
    """
    if scales is None:
        side = head, strides, pages
    else:
        of_head = scales[0] + tl.cast(scales[1][1], tl.int64) * h
        side = head, strides, pages, (of_head, scales[1])  # type: ignore[assignment]
    return side


@triton.jit
def row_scales(
    side, first, low, high, BLOCK: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr
):
    """The scales of the rows that ``load_keys`` loads from a ``scaled_side``, ``[BLOCK]``."""
    of_head, strides = side[3]
    rows = first + tl.arange(0, BLOCK)
    inside = (rows >= low) & (rows < high)
    page = page_of(side[2], rows // PAGE, inside, MASKED)
    places = of_head + (page * strides[0] + (rows % PAGE).to(tl.int64) * strides[2])
    return tl.load(places, mask=inside, other=0.0) if MASKED else tl.load(places)


@triton.jit
def page_of(pages, slot, inside, MASKED: tl.constexpr):
    """Return the page number in each slot of a sequence's row of the block table, as int64.

    If MASKED, slots that are not ``inside`` are not read. The caller is responsible for valid
    entries, which are not checked on a device. They are clamped to the existing pages.
    """
    entries, last = pages[0], pages[1]
    page = tl.load(entries + slot, mask=inside, other=0) if MASKED else tl.load(entries + slot)
    return tl.minimum(tl.maximum(page, 0), last).to(tl.int64)


@triton.jit
def keys_at(block_table, key_lengths, b, N, keys, last_page, PAGE: tl.constexpr):
    """(b_k, pages, N): of the keys their batch index, ``pages`` for ``load_keys``, and count.

    With pages no sequence has a place of its own, and its length is clamped to what its row of the
    block table holds. ``keys`` is the most that a sequence may have, so many entries has a row.
    """
    if PAGE == 0:
        found = b, 0, N
    else:
        table = block_table + tl.cast(b, tl.int64) * (keys // PAGE)
        found = b * 0, (table, last_page), keys_in(key_lengths, b, keys)  # type: ignore[assignment]
    return found


@triton.jit
def described_pages(pages, rows, h):
    """``pages`` for ``load_keys``, with the descriptor of their rows and a head; None adds nothing.

    A descriptor copies tiles that lie in one page, of which every key counts: see
    ``descriptors.page_rows``.
    """
    found = pages
    if rows is not None:
        found = (pages[0], pages[1], rows, h)
    return found


@triton.jit
def keys_in(key_lengths, b, keys):
    """Return how many keys sequence ``b`` has, clamped to what its row of the block table holds."""
    return tl.minimum(tl.maximum(tl.load(key_lengths + b), 0), keys)


@triton.jit
def store_tile(
    base,
    first,
    strides,
    high,
    values,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rows ``first`` up to ``high`` of a matrix from ``values [BLOCK, PADDED]``."""
    rows = first + tl.arange(0, BLOCK).to(tl.int64)
    columns = tl.arange(0, PADDED).to(tl.int64)
    places = base + rows[:, None] * strides[2] + columns[None, :] * strides[3]
    inside = (rows < high)[:, None] & (columns < WIDTH)[None, :]
    tl.store(places, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def head_of(base, strides, b, h, begin):
    """Where the rows of one head of one batch item, or sequence, begin."""
    offset = tl.cast(strides[0], tl.int64) * b + tl.cast(strides[1], tl.int64) * h
    return base + (offset + tl.cast(strides[2], tl.int64) * begin)


@triton.jit
def range_of(
    b, first, M, N, captured, RANGE: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr
):
    """(low, full_low, full_high, high): the keys that a mask leaves a tile of queries.

    The tile begins at ``first``. BY_KEYS: the queries that a tile of keys is left. ``RANGE`` is
    ``keys_of`` or ``queries_of`` of a ``Variant``; without a mask all are left.
    """
    low, full_low = first * 0, first * 0
    high = low + (M if BY_KEYS else N)
    full_high = high
    if RANGE is not None:
        last = tl.minimum(first + BLOCK, N if BY_KEYS else M)
        low, full_low, full_high, high = RANGE(b, first, last, M, N, captured[0], captured[1])
    return low, full_low, full_high, high


@triton.jit
def split_range(low, full_low, full_high, high, end, BLOCK: tl.constexpr):
    """Split a range into tiles: (first, full, beyond, last); tiles of [full, beyond) need no mask.

    Tiles of [first, full) and [beyond, last) need one. All but the last are multiples of BLOCK; the
    full part lies within [full_low, full_high), and no tile of it goes beyond ``end``.
    """
    high = tl.minimum(high, end).to(tl.int32)
    first = (tl.maximum(low, 0) // BLOCK * BLOCK).to(tl.int32)
    last = tl.maximum(high, first)
    full = tl.maximum((full_low + BLOCK - 1) // BLOCK * BLOCK, first).to(tl.int32)
    beyond = (tl.minimum(tl.minimum(full_high, end), last) // BLOCK * BLOCK).to(tl.int32)
    stop = (last + BLOCK - 1) // BLOCK * BLOCK
    none = beyond <= full
    return first, tl.where(none, stop, full), tl.where(none, stop, beyond), last


@triton.jit
def counts_in(spans, BLOCK: tl.constexpr):
    """Return how many tiles of a split range need no mask, and how many do."""
    first, full, beyond, last = spans
    left = (full - first) // BLOCK
    right = (tl.maximum(last - beyond, 0) + BLOCK - 1) // BLOCK
    return (beyond - full) // BLOCK, left + right


@triton.jit
def tile_in(i, spans, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return where tile ``i`` of those that need a mask begins, or of those that need none."""
    first, full, beyond, _ = spans
    if MASKED:
        start = first + i * BLOCK
        return tl.where(start >= full, start + (beyond - full), start)
    return full + i * BLOCK


@triton.jit
def list_of(lists, b, h, tile):
    """(list, whole, partial): the tiles to visit from a tile, whole ones before partial ones.

    ``lists`` are (order, counts, numbers). The numbers are the strides of batch item and head in
    ``order`` and in ``counts``, and the length of a list.
    """
    order, counts, numbers = lists
    at = tl.cast(numbers[0], tl.int64) * b + tl.cast(numbers[1], tl.int64) * h
    counted = tl.cast(numbers[2], tl.int64) * b + tl.cast(numbers[3], tl.int64) * h
    place = counts + (counted + 2 * tile)
    listed = order + (at + tl.cast(numbers[4], tl.int64) * tile)
    return listed, tl.load(place), tl.load(place + 1)


@triton.jit
def walks_of(spans, lists, b, h, tile, BLOCK: tl.constexpr):
    """(whole, partial): the walks over tiles that need no mask, and over those that need one.

    A walk is (spans, count), with a list of tiles (spans, count, listed): the first ``count`` tiles
    that are listed, or without a list those of ``spans``. There is no None for a list, because
    Triton 3.6 returns none. ``lists`` are those of ``list_of``.
    """
    if lists[0] is None:
        whole, partial = counts_in(spans, BLOCK)
        walks = (spans, whole), (spans, partial)
    else:
        listed, whole, partial = list_of(lists, b, h, tile)
        walks = (spans, whole, listed), (spans, partial, listed + whole)  # type: ignore[assignment]
    return walks


@triton.jit
def block_start(i, walk, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return where tile ``i`` of a walk begins."""
    first = tl.load(walk[2] + i) * BLOCK if len(walk) > 2 else tile_in(i, walk[0], BLOCK, MASKED)
    return tl.multiple_of(first, BLOCK)


@triton.jit
def met_from(
    base,
    walk,
    own,
    place,
    captured,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """(tiles, count): of MET tiles of a walk from ``base`` on those in which some pair attends.

    Empty tiles are sorted out before a walk, whose loop then has no branch: only such loops does
    Triton pipeline. ``own`` are the queries of the program as a column, or (BY_KEYS) its keys;
    ``place`` is (b, h, M, N).
    """
    b, h, M, N = place
    lanes = tl.arange(0, MET)
    tiles = lanes * 0
    count = base * 0
    end = tl.minimum(base + MET, walk[1])
    for i in tl.range(base, end, num_stages=1, disable_licm=True):
        other = (block_start(i, walk, True, BLOCK) + tl.arange(0, BLOCK))[None, :]
        if BY_KEYS:
            visible = shown(b, h, other, own, M, N, captured[0], captured[1], SEEN)
        else:
            visible = shown(b, h, own, other, M, N, captured[0], captured[1], SEEN)
        met = tl.max(tl.max(visible.to(tl.int32), 1), 0)
        tiles = tl.where((lanes == count) & (met > 0), i, tiles)
        count += met
    return tiles, count


@triton.jit
def met_at(tiles, j):
    """Return number ``j`` of the tiles that ``met_from`` gives."""
    return tl.sum(tl.where(tl.arange(0, MET) == j, tiles, 0), 0)


@triton.jit
def walked(
    call, state, fixed, walks, own, place, STEP: tl.constexpr, SCORE: tl.constexpr,
    GAIN: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """The state of a program after the tiles of both walks of ``walks_of``, one STEP for each.

    ``STEP(call, state, fixed, first, SCORE, GAIN, SEEN, MASKED, FORM)`` is the state after the
    tile from ``first`` on. Only in the second walk may some pairs be hidden. If the form has SKIPS,
    tiles of which no pair attends may be among these: nothing of them is touched then, see
    ``met_from``, whose arguments ``own`` and ``place`` are.
    """
    whole, partial = walks
    if not FORM.BLIND:
        for i in range(whole[1]):
            first = block_start(i, whole, False, BLOCK)
            state = STEP(call, state, fixed, first, SCORE, GAIN, None, False, FORM)
    if FORM.SKIPS:
        for base in range(0, partial[1], MET):
            tiles, met = met_from(base, partial, own, place, call.captured, SEEN, BLOCK, BY_KEYS)
            for j in range(met):
                first = block_start(met_at(tiles, j), partial, True, BLOCK)
                state = STEP(call, state, fixed, first, SCORE, GAIN, SEEN, True, FORM)
    else:
        for i in range(partial[1]):
            first = block_start(i, partial, True, BLOCK)
            state = STEP(call, state, fixed, first, SCORE, GAIN, SEEN, True, FORM)
    return state


def launch_of(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    constants: dict[str, Any],
    blocks: Blocks | None = None,
) -> Launch:
    """Return a Launch; arguments that are None are constants."""
    missing = {name: None for name, value in arguments.items() if value is None}
    present = {name: value for name, value in arguments.items() if value is not None}
    if blocks is None:
        return Launch(kernel, grid, present, constants | missing)
    return Launch(kernel, grid, present, constants | missing, blocks.warps, blocks.stages)


def word(bits: int) -> int:
    """32 bits as the signed number that a kernel takes without widening it."""
    return bits - 2**32 if bits >= 2**31 else bits


def seed_memory(problem: Problem, operands: Operands) -> tuple[Tensor, ...] | None:
    """Return what dropout draws with, as ``pairs.drawing`` takes it; None without dropout.

    No None is in the tuple: Triton 3.6 cannot compare a tuple that has one with None.
    """
    if problem.dropout_p == 0:
        return None
    device = operands.q.device
    seed = seed_tensor(operands.seed, device)
    if operands.origin == START:
        return (seed,)
    return seed, torch.tensor(operands.origin, dtype=torch.int64, device=device)


def head_strides(tensor: Tensor, problem: Problem) -> tuple[int, int, int, int]:
    """Return strides along (b, h, row, column) of a tensor with a row per query or key.

    Of keys or values in pages, along (page, h, row of a page, column).
    """
    if problem.layout == "dense" or tensor.dim() == 4:
        b, h, row, column = tensor.stride()
        return b, h, row, column
    row, h, column = tensor.stride()
    return 0, h, row, column


def number_strides(tensor: Tensor, problem: Problem) -> tuple[int, int, int]:
    """Return strides along (b, h, m) of a tensor with one number per row, shaped as lse."""
    if problem.layout == "dense":
        b, h, row = tensor.stride()
        return b, h, row
    h, row = tensor.stride()
    return 0, h, row


def slots_of(problem: Problem, length: int, block: int) -> int:
    """Return the number of tiles of a head's ``length`` rows, or of slots in a packed call."""
    if problem.layout == "dense":
        return -(-length // block)
    return length // block + problem.batch if problem.batch else 0


def programs_of(problem: Problem, heads: int, slots: int) -> int:
    """Return how many programs a walk has that gives each slot of each head one."""
    return slots * heads * (problem.batch if problem.layout == "dense" else 1)


def lists_of(lists: TileLists | None) -> tuple[Any, ...]:
    """Lists of tiles as an argument, (order, counts, numbers): see ``list_of``."""
    if lists is None:
        return None, None, None
    return lists.order, lists.counts, (*lists.numbers(), lists.order.shape[3])
