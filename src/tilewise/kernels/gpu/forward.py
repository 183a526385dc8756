"""The forward pass: one kernel for every layout, mask and score, and the host code that aims it.

A program takes a block of queries of one head and walks over the blocks of keys that the mask
leaves, with the row maximum, the row sum and the unfinished output of an online softmax. Blocks
that the mask shows whole come first and never look at it; the others follow.

Scores are kept in the units that are cheapest to compare. Without a score function that is the bare
product q.k: the scale, which must be positive for it, then belongs to the exponent, and one fused
multiply-add per pair makes ``scale * log2(e) * (q.k - top)``. With one it is the natural logit,
which is subtracted before it is scaled, so that even the lowest float stays finite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Config, padded
from tilewise.kernels.gpu.emit import Variant, captures
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.lists import TileLists, tile_lists
from tilewise.kernels.gpu.pairs import LN2, LOG2E, kept, shown
from tilewise.problem import Operands, Problem, Result
from tilewise.reference.philox import split_seed, threshold

__all__ = ["attend", "forward_launches", "is_exact_band"]

_FAR: tl.constexpr = tl.constexpr(-2000.0)  # an exponent whose power of two is 0, but finite
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
_NEVER: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def rows_of(base, start, offsets, columns, row_stride, column_stride):
    """Pointers to a block of rows: 64 bits to where it starts, 32 bits within it."""
    within = offsets[:, None] * row_stride + columns[None, :] * column_stride
    return base + start.to(tl.int64) * row_stride + within


@triton.jit
def load_rows(
    base,
    start,
    offsets,
    low,
    high,
    row_stride,
    column_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows ``start + offsets`` of a matrix, 0 where they are not in [low, high) or past its width.

    Not BOUNDED says that all of them are.
    """
    columns = tl.arange(0, PADDED)
    at = rows_of(base, start, offsets, columns, row_stride, column_stride)
    if BOUNDED:
        rows = start + offsets
        held = ((rows >= low) & (rows < high))[:, None]
        if WIDTH < PADDED:
            held = held & (columns < WIDTH)[None, :]
        return tl.load(at, mask=held, other=0.0)
    if WIDTH < PADDED:
        return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def sequence_of(index, cu_q, sequences, steps, BM: tl.constexpr):
    """Which sequence a program works for, and on which of its tiles, by bisection.

    The tiles of sequence b are counted from ``cu[b] // BM + b``, which leaves room for all of them
    and can be told without the others.
    """
    low = index * 0
    high = low + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        start = (tl.load(cu_q + middle) // BM).to(tl.int32) + middle
        mine = start <= index
        low = tl.where(mine & (middle > low), middle, low)
        high = tl.where(mine, high, tl.maximum(middle, low + 1))
    first = (tl.load(cu_q + low) // BM).to(tl.int32) + low
    return low, index - first


@triton.jit
def _update(
    state,
    q,
    k_base,
    v_base,
    k_strides,
    v_strides,
    n0,
    low,
    high,
    place,
    numbers,
    mask_captures,
    score_captures,
    visible,
    SCORE: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys in the online softmax; ``visible`` says which pairs attend if MASKED."""
    acc, top, total, moment, top_key = state
    b, h, m, M, N = place
    scale, seed_low, seed_high, drop_below = numbers
    offsets = tl.arange(0, BN)
    n = (n0 + offsets)[None, :]
    D_PADDED: tl.constexpr = q.shape[1]
    DV_PADDED: tl.constexpr = acc.shape[1]
    k = load_rows(k_base, n0, offsets, low, high, k_strides[2], k_strides[3], D, D_PADDED, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not FOLDED:
        scores = scores * scale
        if SCORE is not None:
            scores = SCORE(scores, b, h, m, n, M, N, score_captures[0], score_captures[1])
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    best = tl.max(scores, 1)
    new_top = tl.maximum(top, best)
    base = new_top
    if MASKED or SCORE is not None:  # a row may have seen nothing yet
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    if FOLDED:
        unit = scale * LOG2E
        exponent = scores * unit - (base * unit)[:, None]
        moved = (top - base) * unit
    else:
        exponent = (scores - base[:, None]) * LOG2E
        moved = (top - base) * LOG2E
    p = tl.math.exp2(exponent)
    fade = tl.math.exp2(moved)
    if STATS > 0:
        moment = (moment + tl.maximum(moved, _FAR) * total) * fade
        moment = moment + tl.sum(p * tl.maximum(exponent, _FAR), 1)
    total = total * fade + tl.sum(p, 1)
    if STATS > 1:
        first = tl.min(tl.where(scores == best[:, None], n, _NEVER), 1)
        better = tl.where(best == top, tl.minimum(first, top_key), top_key)
        better = tl.where(best > top, first, better)
        top_key = tl.where(best == float("-inf"), top_key, better)
    if DROPOUT:
        p = tl.where(kept(seed_low, seed_high, drop_below, b, h, m, n), p, 0.0)
    acc = acc * fade[:, None]
    v = load_rows(v_base, n0, offsets, low, high, v_strides[2], v_strides[3], DV, DV_PADDED, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total, moment, top_key


@triton.jit
def _walk(
    state,
    q,
    k_base,
    v_base,
    k_strides,
    v_strides,
    first,
    left,
    gap,
    count,
    listed,
    low,
    high,
    place,
    numbers,
    mask_captures,
    score_captures,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    SKIPS: tl.constexpr,
    LISTED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``count`` blocks of keys: those at ``listed``, or from ``first`` on with one gap.

    The first ``left`` blocks follow ``first``, the others come ``gap`` keys later. SKIPS: blocks of
    which no pair attends may be among them. Neither their keys nor their values are touched then.
    """
    acc, top, total, moment, top_key = state
    b, h, m, M, N = place
    for i in tl.range(0, count):
        if LISTED:
            n0 = tl.load(listed + i) * BN
        elif MASKED:
            n0 = first + i * BN + tl.where(i < left, 0, gap)
        else:
            n0 = first + i * BN
        n0 = tl.multiple_of(n0, BN)
        visible = None
        if MASKED:
            n = (n0 + tl.arange(0, BN))[None, :]
            visible = shown(b, h, m, n, M, N, mask_captures[0], mask_captures[1], SEEN)
        if SKIPS:
            if tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0:
                acc, top, total, moment, top_key = _update(
                    (acc, top, total, moment, top_key),
                    q,
                    k_base,
                    v_base,
                    k_strides,
                    v_strides,
                    n0,
                    low,
                    high,
                    place,
                    numbers,
                    mask_captures,
                    score_captures,
                    visible,
                    SCORE,
                    FOLDED,
                    MASKED,
                    DROPOUT,
                    STATS,
                    D,
                    DV,
                    BN,
                    PRECISION,
                )
        else:
            acc, top, total, moment, top_key = _update(
                (acc, top, total, moment, top_key),
                q,
                k_base,
                v_base,
                k_strides,
                v_strides,
                n0,
                low,
                high,
                place,
                numbers,
                mask_captures,
                score_captures,
                visible,
                SCORE,
                FOLDED,
                MASKED,
                DROPOUT,
                STATS,
                D,
                DV,
                BN,
                PRECISION,
            )
    return acc, top, total, moment, top_key


@triton.jit
def _finish(top, total, scale, SCORE: tl.constexpr, FOLDED: tl.constexpr):
    """The row maximum in natural and in base-2 units, both finite but for a dead row."""
    natural = top * scale if FOLDED else top
    limited = tl.minimum(tl.maximum(natural * LOG2E, _LOWEST), -_LOWEST)
    base2 = tl.where(natural == float("-inf"), natural, limited)
    if FOLDED:
        base2 = tl.where(natural == float("-inf"), natural, top * (scale * LOG2E))
    return natural, base2


@triton.jit
def _with_sink(natural, base2, total, sink):
    """Lse with a sink, the weight that makes a probability of an exponential, and two exponents:

    how far the sink is below the largest logit, and how far that is above the row's own.
    """
    sink2 = tl.minimum(tl.maximum(sink * LOG2E, _LOWEST), -_LOWEST)
    sink2 = tl.where(sink == float("-inf"), sink, sink2)
    highest = tl.maximum(base2, sink2)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    of_sink, of_keys = sink2 - highest, base2 - highest
    keys = tl.math.exp2(of_keys)
    whole = keys * total + tl.math.exp2(of_sink)
    weight = tl.where(whole == 0, 0.0, keys / tl.where(whole == 0, 1.0, whole))
    own = tl.where(total == 0, float("-inf"), natural + tl.log(tl.where(total == 0, 1.0, total)))
    larger = tl.maximum(own, sink)
    larger = tl.where(larger == float("-inf"), 0.0, larger)
    lse = larger + tl.log(tl.exp(own - larger) + tl.exp(sink - larger))
    return lse, weight, tl.maximum(of_sink, _FAR), -tl.maximum(of_keys, _FAR)


@triton.jit(
    do_not_specialize=[
        "sequences",
        "heads",
        "group",
        "queries",
        "keys",
        "tiles",
        "section",
        "steps",
        "seed_low",
        "seed_high",
        "drop_below",
    ]
)
def attend(
    Q,
    K,
    V,
    OUT,
    LSE,
    ROW_MAX,
    ROW_SUM,
    ROW_MEAN,
    MAX_LOGIT,
    ENTROPY,
    TOP_KEY,
    SINKS,
    CU_Q,
    CU_K,
    ORDER,
    COUNTS,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    list_numbers,
    mask_captures,
    score_captures,
    sequences,
    heads,
    group,
    queries,
    keys,
    tiles,
    section,
    steps,
    scale,
    seed_low,
    seed_high,
    drop_below,
    keep_factor,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    KEYS_OF: tl.constexpr,
    FOLDED: tl.constexpr,
    SKIPS: tl.constexpr,
    REVERSED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of a block of BM queries of one head.

    Programs are numbered by sections of so many heads, within these by tiles, and then by heads, so
    that the heads that run together find their keys in the cache. In a variable-length call (CU_Q
    is not None) there is a tile too many for most sequences, and the program of that one ends.

    Strides are (batch, head, row, column); of packed tensors the first is 0.
    """
    program = tl.program_id(0)
    in_section = section * tiles
    first_head = program // in_section * section
    within = program % in_section
    here = tl.minimum(section, sequences * heads - first_head)
    if CU_Q is not None:
        here = tl.minimum(section, heads - first_head)
    tile = within // here
    head = first_head + within % here
    if REVERSED:
        tile = tiles - 1 - tile
    if CU_Q is None:
        b, h = head // heads, head % heads
        M, N = queries, keys
        q_start, k_start = b * 0, b * 0
        line = head.to(tl.int64) * queries
    else:
        b, tile = sequence_of(tile, CU_Q, sequences, steps, BM)
        h = head
        q_start, k_start = tl.load(CU_Q + b), tl.load(CU_K + b)
        M = (tl.load(CU_Q + b + 1) - q_start).to(tl.int32)
        N = (tl.load(CU_K + b + 1) - k_start).to(tl.int32)
        line = h.to(tl.int64) * queries + q_start
    m0 = tile * BM
    if m0 >= M:
        return
    kv_head = (h // group).to(tl.int64)
    batch, long_h = b.to(tl.int64), h.to(tl.int64)
    q_base = Q + batch * q_strides[0] + long_h * q_strides[1] + q_start * q_strides[2]
    k_base = K + batch * k_strides[0] + kv_head * k_strides[1] + k_start * k_strides[2]
    v_base = V + batch * v_strides[0] + kv_head * v_strides[1] + k_start * v_strides[2]
    offsets = tl.arange(0, BM)
    m = m0 + offsets
    q = load_rows(q_base, m0, offsets, 0, M, q_strides[2], q_strides[3], D, D_PADDED, True)

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    moment = tl.zeros([BM], tl.float32)
    top_key = tl.full([BM], -1, tl.int32)
    acc = tl.zeros([BM, DV_PADDED], tl.float32)
    state = (acc, top, total, moment, top_key)
    place = (b, h, m[:, None], M, N)
    numbers = (scale, seed_low, seed_high, drop_below)

    low, full_low, full_high, high = m0 * 0, m0 * 0, m0 * 0 + N, m0 * 0 + N
    if KEYS_OF is not None:
        low, full_low, full_high, high = KEYS_OF(
            b, m0, tl.minimum(m0 + BM, M), M, N, mask_captures[0], mask_captures[1]
        )
        low, full_low = (m0 * 0 + low).to(tl.int32), (m0 * 0 + full_low).to(tl.int32)
        full_high, high = (m0 * 0 + full_high).to(tl.int32), (m0 * 0 + high).to(tl.int32)
    if ORDER is not None:
        row = (
            batch * list_numbers[0] + long_h * list_numbers[1] + tile.to(tl.int64) * list_numbers[4]
        )
        counts = COUNTS + batch * list_numbers[2] + long_h * list_numbers[3] + 2 * tile
        whole, partial = tl.load(counts), tl.load(counts + 1)
        listed, first, edge, left, gap = ORDER + row, m0 * 0, m0 * 0, m0 * 0, m0 * 0
    else:
        start = low // BN * BN
        first = (full_low + BN - 1) // BN * BN
        whole = tl.maximum(full_high // BN - first // BN, 0)
        if SEEN is not None:
            # Without whole blocks all of the range is on the right.
            first = tl.where(whole > 0, first, start)
        edge = start
        left = (first - start) // BN
        gap = whole * BN
        partial = left + tl.maximum((high - first - gap + BN - 1) // BN, 0)
        listed = 0
    state = _walk(
        state,
        q,
        k_base,
        v_base,
        k_strides,
        v_strides,
        first,
        left,
        gap,
        whole,
        listed,
        low,
        high,
        place,
        numbers,
        mask_captures,
        score_captures,
        None,
        SCORE,
        FOLDED,
        False,
        False,
        ORDER is not None,
        DROPOUT,
        STATS,
        D,
        DV,
        BN,
        PRECISION,
    )
    if ORDER is not None:
        listed = listed + whole
    state = _walk(
        state,
        q,
        k_base,
        v_base,
        k_strides,
        v_strides,
        edge,
        left,
        gap,
        partial,
        listed,
        low,
        high,
        place,
        numbers,
        mask_captures,
        score_captures,
        SEEN,
        SCORE,
        FOLDED,
        True,
        SKIPS,
        ORDER is not None,
        DROPOUT,
        STATS,
        D,
        DV,
        BN,
        PRECISION,
    )
    acc, top, total, moment, top_key = state

    natural, base2 = _finish(top, total, scale, SCORE, FOLDED)
    if SINKS is not None:
        sink = tl.load(SINKS + h)
        lse, weight, of_sink, above = _with_sink(natural, base2, total, sink)
    else:
        dead = total == 0
        weight = tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, total))
        lse = natural + tl.log(tl.where(dead, 1.0, total))
        lse = tl.where(dead, float("-inf"), lse)
    out_columns = tl.arange(0, DV_PADDED)
    out_base = OUT + batch * out_strides[0] + long_h * out_strides[1] + q_start * out_strides[2]
    at = rows_of(out_base, m0, offsets, out_columns, out_strides[2], out_strides[3])
    inside = m < M
    held = inside[:, None] & (out_columns < DV)[None, :]
    if DROPOUT:
        weight = weight * keep_factor
    tl.store(at, (acc * weight[:, None]).to(OUT.dtype.element_ty), mask=held)
    line = line + m
    tl.store(LSE + line, lse, mask=inside)
    tl.store(ROW_MAX + line, base2, mask=inside)
    tl.store(ROW_SUM + line, total, mask=inside)
    if STATS > 0:
        tl.store(MAX_LOGIT + line, natural, mask=inside)
        if SINKS is not None:
            fade = tl.math.exp2(-above)
            sunk = tl.math.exp2(of_sink)
            moment = (moment - above * total) * fade + sunk * of_sink
            total = total * fade + sunk
        dead = total == 0
        mean = tl.where(dead, 0.0, moment / tl.where(dead, 1.0, total))
        entropy = tl.log(tl.where(dead, 1.0, total)) - LN2 * mean
        tl.store(ROW_MEAN + line, mean, mask=inside)
        tl.store(ENTROPY + line, tl.where(dead, 0.0, entropy), mask=inside)
    if STATS > 1:
        tl.store(TOP_KEY + line, top_key.to(tl.int64), mask=inside)


class Grid(NamedTuple):
    """How programs are spread over the tiles of heads: see ``attend``."""

    tiles: int
    section: int
    programs: int
    steps: int


def forward_launches(
    problem: Problem, operands: Operands, result: Result, config: Config, variant: Variant
) -> list[Launch]:
    """The launches that fill a result; nothing here reads a tensor's values.

    Args:
        problem: what is asked.
        operands: with what; cu_seqlens on the same device.
        result: with memory for everything that is wanted; statistics are asked for by theirs.
        config: of the chip.
        variant: the functions of the problem's mask and score.
    """
    blocks = config.blocks("forward", problem)
    lists = tile_lists(problem, operands, variant.tables, blocks.queries, blocks.keys)
    grid = _grid(problem, blocks)
    arguments = {
        **_tensors(operands, result),
        **_listed(lists),
        "mask_captures": tuple(captures(operands.mask_tensors)),
        "score_captures": tuple(captures(operands.score_tensors)),
        "sequences": problem.batch,
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": grid.tiles,
        "section": grid.section,
        "steps": grid.steps,
        "scale": problem.scale,
        **dropout_numbers(problem, operands),
    }
    constants = {
        "SEEN": variant.seen,
        "SCORE": variant.score,
        "KEYS_OF": variant.keys_of,
        "FOLDED": variant.score is None and problem.scale > 1e-30,
        "SKIPS": skips(problem, variant),
        "REVERSED": _grows(problem),
        "DROPOUT": problem.dropout_p > 0,
        "STATS": 0 if result.entropy is None else 1 if result.top_key is None else 2,
        "D": problem.head_dim,
        "DV": problem.value_dim,
        "D_PADDED": padded(problem.head_dim),
        "DV_PADDED": padded(problem.value_dim),
        "BM": blocks.queries,
        "BN": blocks.keys,
        "PRECISION": config.precision,
    }
    missing = {name: None for name, value in arguments.items() if value is None}
    present = {name: value for name, value in arguments.items() if value is not None}
    constants |= missing
    return [Launch(attend, (grid.programs,), present, constants, blocks.warps, blocks.stages)]


def _grid(problem: Problem, blocks: Blocks) -> Grid:
    """Tiles and sections; in a variable-length call a bound that needs no lengths."""
    heads = problem.heads
    group = heads // problem.kv_heads
    steps = 0
    if problem.layout == "varlen":
        tiles = problem.queries // blocks.queries + problem.batch if problem.queries else 0
        steps = max(problem.batch, 1).bit_length()
        lines, keys = heads, problem.keys
    else:
        tiles = -(-problem.queries // blocks.queries)
        lines, keys = heads * problem.batch, problem.keys
    section = group
    if _grows(problem):
        # As many heads at once as have their keys and values in the cache together.
        size = keys * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        section = max(1, _CACHED_BYTES // max(size, 1)) * group
    section = max(1, min(section, lines))
    return Grid(tiles, section, tiles * lines, steps)


_CACHED_BYTES = 32 << 20


def _tensors(operands: Operands, result: Result) -> dict[str, Any]:
    """The pointers and strides of a call."""
    stats = result.stats
    return {
        "Q": operands.q,
        "K": operands.k,
        "V": operands.v,
        "OUT": result.out,
        "LSE": result.lse,
        "ROW_MAX": stats[0],
        "ROW_SUM": stats[1],
        "ROW_MEAN": None if result.entropy is None else stats[2],
        "MAX_LOGIT": result.max_logit,
        "ENTROPY": result.entropy,
        "TOP_KEY": result.top_key,
        "SINKS": operands.sinks,
        "CU_Q": operands.cu_seqlens_q,
        "CU_K": operands.cu_seqlens_k,
        "q_strides": strides_of(operands.q),
        "k_strides": strides_of(operands.k),
        "v_strides": strides_of(operands.v),
        "out_strides": strides_of(result.out),
    }


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """(batch, head, row, column) of [B, H, S, D], or of packed [T, H, D]."""
    if tensor.dim() == 4:
        return tensor.stride()
    row, head, column = tensor.stride()
    return 0, head, row, column


def _listed(lists: TileLists | None) -> dict[str, Any]:
    if lists is None:
        return {"ORDER": None, "COUNTS": None, "list_numbers": None}
    numbers = (*lists.numbers(), lists.order.shape[3])
    return {"ORDER": lists.order, "COUNTS": lists.counts, "list_numbers": numbers}


def dropout_numbers(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Seed and threshold as 32-bit numbers with a sign, and the factor of what is kept."""
    low, high = split_seed(operands.seed)
    return {
        "seed_low": signed(low),
        "seed_high": signed(high),
        "drop_below": signed(threshold(problem.dropout_p)),
        "keep_factor": 1.0 / (1.0 - problem.dropout_p),
    }


def signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - 2**32 if word >= 2**31 else word


def is_exact_band(problem: Problem) -> bool:
    """Whether ``keys_of`` and ``queries_of`` leave no block in which nothing attends."""
    return all(instr.op in ("band", "below", "and") for instr in problem.mask)


def skips(problem: Problem, variant: Variant) -> bool:
    """Whether a walk may meet a block of which no pair attends, whose keys it must not read."""
    listed = any(table.whole for table in variant.tables)
    return variant.seen is not None and not listed and not is_exact_band(problem)


def _grows(problem: Problem) -> bool:
    """Whether later queries see more keys: the longest tiles then come first."""
    if not problem.mask or any(instr.op == "tiles" for instr in problem.mask):
        return False
    ends = [instr for instr in problem.mask if instr.op == "band"]
    only = all(instr.op in ("band", "below", "and") for instr in problem.mask)
    return only and any(left < 0 <= right for left, right, _ in (end.params for end in ends))
