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

from tilewise.kernels.gpu.config import Blocks, Config, padded
from tilewise.kernels.gpu.descriptors import key_rows
from tilewise.kernels.gpu.eight import (
    decoded,
    eight_bits,
    folded,
    lowered,
    scaled_for,
    scales_of,
    with_codes,
)
from tilewise.kernels.gpu.emit import Variant, captures
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.lists import tile_lists
from tilewise.kernels.gpu.pairs import LN2, LOG2E, kept, shown
from tilewise.kernels.gpu.turn import begin_turned, turn_values, turns
from tilewise.kernels.gpu.walk import (
    counts_in,
    head_of,
    head_strides,
    keys_in,
    knows_whole_tiles,
    launch_of,
    list_of,
    lists_of,
    load_keys,
    load_tile,
    meets_empty_tiles,
    pages_of,
    place_of,
    side_of,
    slots_of,
    split_range,
    store_tile,
    tile_in,
    wide,
    word,
)
from tilewise.problem import Operands, Problem, Result
from tilewise.reference.philox import split_seed, threshold

__all__ = ["attend", "forward_launches"]

RAISED: tl.constexpr = tl.constexpr(8.0)  # the power of two of probabilities of 8 bits
FAR: tl.constexpr = tl.constexpr(-2000.0)  # an exponent whose power of two is 0, but finite
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
NEVER: tl.constexpr = tl.constexpr(2147483647)
_CACHED_BYTES = 32 << 20  # of keys and values, which heads that run together may share a cache for
_LEAST_FOLDED = 1e-30  # a scale that may stand in the exponent: positive, and no denormal


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
def absorb(
    state,
    q,
    sides,
    n0,
    place,
    numbers,
    captured,
    visible,
    SCORE: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr = 0,
    EIGHT: tl.constexpr = "",
    TURNED: tl.constexpr = False,
):
    """One block of keys in the online softmax; ``visible`` says which pairs attend if MASKED.

    ``sides`` are (keys, values, low, high): what ``load_keys`` takes.
    """
    acc, top, total, moment, top_key = state
    k_side, v_side, low, high = sides
    b, h, m, _, _ = place
    scale, seed_low, seed_high, drop_below = numbers
    EIGHTS: tl.constexpr = (EIGHT == "short") | (EIGHT == "whole")
    n = (n0 + tl.arange(0, BN))[None, :]
    k = load_keys(k_side, n0, low, high, BN, D, q.shape[1], MASKED, WIDE, PAGE)
    k = decoded(k, EIGHT)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = scaled_scores(products, scale, n, place, captured, SCORE, FOLDED)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    best = tl.max(scores, 1)
    if STATS > 1:
        first = tl.min(tl.where(scores == best[:, None], n, NEVER), 1)
        better = tl.where(best == top, tl.minimum(first, top_key), top_key)
        better = tl.where(best > top, first, better)
        top_key = tl.where(best == float("-inf"), top_key, better)
    new_top = tl.maximum(top, best)
    base = new_top
    if MASKED or SCORE is not None:  # a row may have seen nothing yet
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    if FOLDED:
        unit = scale * LOG2E
        least = base * unit
        if EIGHTS:
            least = least - RAISED
        exponent = scores * unit - least[:, None]
        moved = (top - base) * unit
    else:
        exponent = (scores - base[:, None]) * LOG2E
        if EIGHTS:
            exponent = exponent + RAISED
        moved = (top - base) * LOG2E
    p = tl.math.exp2(exponent)
    fade = tl.math.exp2(moved)
    if STATS > 0:
        moment = (moment + tl.maximum(moved, FAR) * total) * fade
        if EIGHTS:
            exponent = exponent - RAISED
        moment = moment + tl.sum(p * tl.maximum(exponent, FAR), 1)
    total = total * fade + tl.sum(p, 1)
    if DROPOUT:
        p = tl.where(kept(seed_low, seed_high, drop_below, b, h, m, n), p, 0.0)
    acc = acc * fade[:, None]
    if TURNED:  # blocks are there whole: loads that ask for every key would go byte by byte
        v = load_tile(v_side[0], n0, v_side[1], low, high, BN, DV, acc.shape[1], False, WIDE)
        if MASKED:
            row = (n0 + tl.arange(0, BN))[:, None]
            v = tl.where((row >= low) & (row < high), v, tl.zeros_like(v))
    else:
        v = load_keys(v_side, n0, low, high, BN, DV, acc.shape[1], MASKED, WIDE, PAGE)
        v = decoded(v, EIGHT)
    if EIGHT == "short":
        # The number only keeps the compiler from adding to acc within the matrix units after all.
        acc = acc + tl.dot(p.to(v.dtype), v, max_num_imprecise_acc=BN)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_top, total, moment, top_key


@triton.jit
def take_block(
    i,
    state,
    q,
    sides,
    spans,
    listed,
    place,
    numbers,
    captured,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
    EIGHT: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Block ``i`` of a walk in the online softmax."""
    b, h, m, M, N = place
    n0 = block_start(i, spans, listed, BN, MASKED)
    visible = None
    if MASKED:
        n = (n0 + tl.arange(0, BN))[None, :]
        visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN)
    return absorb(
        state,
        q,
        sides,
        n0,
        place,
        numbers,
        captured,
        visible,
        SCORE,
        FOLDED,
        MASKED,
        DROPOUT,
        STATS,
        D,
        DV,
        BN,
        WIDE,
        PRECISION,
        PAGE,
        EIGHT,
        TURNED,
    )


@triton.jit
def block_start(i, spans, listed, BN: tl.constexpr, MASKED: tl.constexpr):
    """Where block ``i`` of a walk begins: see ``walk_keys``."""
    n0 = tl.load(listed + i) * BN if listed is not None else tile_in(i, spans, BN, MASKED)
    return tl.multiple_of(n0, BN)


@triton.jit
def next_met(i, spans, listed, count, place, captured, SEEN: tl.constexpr, BN: tl.constexpr):
    """The first block from ``i`` on of which a pair attends; ``count`` where there is none."""
    b, h, m, M, N = place
    found = i >= count
    while not found:
        n = (block_start(i, spans, listed, BN, True) + tl.arange(0, BN))[None, :]
        visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN)
        met = tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0
        i = tl.where(met, i, i + 1)
        found = met | (i >= count)
    return i


@triton.jit
def walk_keys(
    state,
    q,
    sides,
    spans,
    listed,
    count,
    place,
    numbers,
    captured,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
    SKIPS: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr = 0,
    EIGHT: tl.constexpr = "",
    TURNED: tl.constexpr = False,
    STAGES: tl.constexpr = None,
):
    """``count`` blocks of keys: those that are ``listed``, or without a list those of ``spans``.

    SKIPS: blocks of which no pair attends may be among them. Neither their keys nor their values
    are touched then. They are passed over in a loop of their own: a state that went through a
    branch would take its registers twice. STAGES: of the walk, where it has not the kernel's.
    """
    acc, top, total, moment, top_key = state
    if SKIPS:
        i = next_met(count * 0, spans, listed, count, place, captured, SEEN, BN)
        while i < count:
            acc, top, total, moment, top_key = take_block(
                i,
                (acc, top, total, moment, top_key),
                q,
                sides,
                spans,
                listed,
                place,
                numbers,
                captured,
                SEEN,
                SCORE,
                FOLDED,
                MASKED,
                DROPOUT,
                STATS,
                D,
                DV,
                BN,
                WIDE,
                PRECISION,
                PAGE,
                EIGHT,
                TURNED,
            )
            i = next_met(i + 1, spans, listed, count, place, captured, SEEN, BN)
    else:
        for i in tl.range(0, count, num_stages=STAGES):
            acc, top, total, moment, top_key = take_block(
                i,
                (acc, top, total, moment, top_key),
                q,
                sides,
                spans,
                listed,
                place,
                numbers,
                captured,
                SEEN,
                SCORE,
                FOLDED,
                MASKED,
                DROPOUT,
                STATS,
                D,
                DV,
                BN,
                WIDE,
                PRECISION,
                PAGE,
                EIGHT,
                TURNED,
            )
    return acc, top, total, moment, top_key


@triton.jit
def tops(top, scale, FOLDED: tl.constexpr):
    """Row maxima in natural and in base-2 units; only those of dead rows are -inf."""
    if FOLDED:
        return top * scale, top * (scale * LOG2E)
    limited = tl.minimum(tl.maximum(top * LOG2E, LOWEST), -LOWEST)
    return top, tl.where(top == float("-inf"), top, limited)


@triton.jit
def with_sink(natural, base2, total, sink):
    """Of rows with a sink (lse, weight, of_sink, above).

    The weight makes a probability of an exponential; ``of_sink`` is how far the sink is from the
    largest logit (0 or less), ``above`` how far that is above the row's own.
    """
    _, sink2 = tops(sink, 1.0, False)
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
    return lse, weight, tl.maximum(of_sink, FAR), -tl.maximum(of_keys, FAR)


@triton.jit
def settled(
    top,
    total,
    moment,
    sink,
    scale,
    keep_factor,
    FOLDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    STATS: tl.constexpr,
):
    """What a walk comes to: (weight, (row_max, lse, max_logit, row_mean, entropy)).

    The output is the unfinished one times the weight. Without STATS the last three mean nothing.
    """
    natural, base2 = tops(top, scale, FOLDED)
    dead = total == 0
    if sink is not None:
        lse, weight, of_sink, above = with_sink(natural, base2, total, sink)
    else:
        weight = tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, total))
        lse = natural + tl.log(tl.where(dead, 1.0, total))
        lse = tl.where(dead, float("-inf"), lse)
    if DROPOUT:
        weight = weight * keep_factor
    mean = moment
    entropy = moment
    if STATS > 0:
        if sink is not None:
            fade = tl.math.exp2(-above)
            sunk = tl.math.exp2(of_sink)
            moment = (moment - above * total) * fade + sunk * of_sink
            total = total * fade + sunk
            dead = total == 0
        mean = tl.where(dead, 0.0, moment / tl.where(dead, 1.0, total))
        spread = tl.log(tl.where(dead, 1.0, total)) - LN2 * mean
        entropy = tl.where(dead, 0.0, spread)
    return weight, (base2, lse, natural, mean, entropy)


@triton.jit
def store_numbers(places, at, inside, row, total, first_key, STATS: tl.constexpr):
    """The numbers of rows: what ``settled`` gave for them, their sums and their first keys."""
    lse, row_max, row_sum, row_mean, max_logit, entropy, top_key = places
    tl.store(lse + at, row[1], mask=inside)
    tl.store(row_max + at, row[0], mask=inside)
    tl.store(row_sum + at, total, mask=inside)
    if STATS > 0:
        tl.store(max_logit + at, row[2], mask=inside)
        tl.store(row_mean + at, row[3], mask=inside)
        tl.store(entropy + at, row[4], mask=inside)
    if STATS > 1:
        tl.store(top_key + at, first_key.to(tl.int64), mask=inside)


@triton.jit
def slot_of(tiles, section, lines, REVERSED: tl.constexpr):
    """The tile and the line (a head of a batch item) of this program.

    Programs are numbered by sections of so many lines, within these by tiles, and then by lines, so
    that those that run together find their keys in the cache. REVERSED: the last tiles come first.
    """
    program = tl.program_id(0)
    first = program // (section * tiles) * section
    within = program % (section * tiles)
    here = tl.minimum(section, lines - first)
    tile = within // here
    if REVERSED:
        tile = tiles - 1 - tile
    return tile, first + within % here


@triton.jit(
    do_not_specialize=[
        "batch",
        "heads",
        "group",
        "queries",
        "keys",
        "last_page",
        "tiles",
        "section",
        "seed_low",
        "seed_high",
        "drop_below",
    ]
)
def attend(
    q,
    k,
    v,
    out,
    lse,
    row_max,
    row_sum,
    row_mean,
    max_logit,
    entropy,
    top_key,
    sinks,
    q_scale,
    k_scale,
    v_scale,
    cu_q,
    cu_k,
    block_table,
    key_lengths,
    order,
    counts,
    k_rows,
    v_rows,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    list_numbers,
    captured,
    batch,
    heads,
    group,
    queries,
    keys,
    last_page,
    tiles,
    section,
    scale,
    seed_low,
    seed_high,
    drop_below,
    keep_factor,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    KEYS_OF: tl.constexpr,
    FOLDED: tl.constexpr,
    BLIND: tl.constexpr,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
    EIGHT: tl.constexpr,
    TURNED: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    """Attention of a block of BM queries of one head.

    In a variable-length call (``cu_q`` is not None) there are slots for more tiles than there are;
    a program without one ends. Strides are (b, h, row, column). With pages (PAGE is not 0) the
    lengths of sequences are their ``key_lengths``, and ``keys`` is the most that these may be.
    """
    if cu_q is None:
        tile, line = slot_of(tiles, section, batch * heads, REVERSED)
        b, h = line // heads, line % heads
        m0, M, N = tile * BM, queries, keys
        begin_q, begin_k = 0, 0
        at = tl.cast(line, tl.int64) * queries
    else:
        tile, h = slot_of(tiles, section, heads, REVERSED)
        b, m0, begin_q = place_of(tile, cu_q, batch, BM)
        begin_k = tl.load(cu_k + b) if PAGE == 0 else 0
        M = (tl.load(cu_q + b + 1) - begin_q).to(tl.int32)
        N = (tl.load(cu_k + b + 1) - begin_k).to(tl.int32) if PAGE == 0 else keys
        at = tl.cast(h, tl.int64) * queries + begin_q
    if m0 >= M:
        return
    m = m0 + tl.arange(0, BM)
    q_head = head_of(q, q_strides, b, h, begin_q)
    b_k, pages = b, 0
    if PAGE > 0:
        N = keys_in(key_lengths, b, keys)
        b_k = 0  # no sequence has a place of its own
        pages = pages_of(block_table, b, keys, last_page, PAGE)
    k_head = head_of(k, k_strides, b_k, h // group, begin_k)
    begin_v = begin_k
    if TURNED and cu_q is not None:
        begin_v = begin_turned(begin_k, b)
    v_head = head_of(v, v_strides, b_k, h // group, begin_v)
    q_tile = load_tile(q_head, m0, q_strides, 0, M, BM, D, D_PADDED, True, WIDE)
    q_tile = decoded(q_tile, EIGHT)
    scale = scaled_for(scale, q_scale, k_scale, b, h, heads, group)
    if FOLDED and (q_scale is not None or k_scale is not None):
        q_tile, scale = folded(q_tile, scale)

    state = (
        tl.zeros([BM, DV_PADDED], tl.float32),
        tl.full([BM], float("-inf"), tl.float32),
        tl.zeros([BM], tl.float32),
        tl.zeros([BM], tl.float32),
        tl.full([BM], -1, tl.int32),
    )
    place = (b, h, m[:, None], M, N)
    numbers = (scale, seed_low, seed_high, drop_below)
    low, full_low, full_high, high = m0 * 0, m0 * 0, m0 * 0 + N, m0 * 0 + N
    if KEYS_OF is not None:
        low, full_low, full_high, high = KEYS_OF(
            b, m0, tl.minimum(m0 + BM, M), M, N, captured[0], captured[1]
        )
    start = (b_k if cu_q is None else b_k * 0, h // group, begin_k)  # packed rows have no batch
    k_side = side_of(k_head, k_strides, pages, k_rows, start)
    v_side = side_of(v_head, v_strides, pages, v_rows, start)
    sides = (k_side, v_side, low, high)
    spans = split_range(low, full_low, full_high, high, N, BN)
    if order is None:
        whole, partial = counts_in(spans, BN)
        listed = None
        listed_partial = None
    else:
        listed, whole, partial = list_of(order, counts, list_numbers, b, h, m0 // BM)
        listed_partial = listed + whole
    if not BLIND:
        state = walk_keys(
            state,
            q_tile,
            sides,
            spans,
            listed,
            whole,
            place,
            numbers,
            captured,
            None,
            SCORE,
            FOLDED,
            False,
            False,
            DROPOUT,
            STATS,
            D,
            DV,
            BN,
            WIDE,
            PRECISION,
            PAGE,
            EIGHT,
            TURNED,
        )
    acc, top, total, moment, first_key = walk_keys(
        state,
        q_tile,
        sides,
        spans,
        listed_partial,
        partial,
        place,
        numbers,
        captured,
        SEEN,
        SCORE,
        FOLDED,
        True,
        SKIPS,
        DROPOUT,
        STATS,
        D,
        DV,
        BN,
        WIDE,
        PRECISION,
        PAGE,
        EIGHT,
        TURNED,
        EDGE_STAGES,
    )

    sink = None if sinks is None else tl.load(sinks + h)
    total, moment = lowered(total, EIGHT), lowered(moment, EIGHT)
    weight, row = settled(top, total, moment, sink, scale, keep_factor, FOLDED, DROPOUT, STATS)
    weight = lowered(weight, EIGHT)
    if v_scale is not None:
        of_values = tl.load(v_scale + b * (heads // group) + h // group)
        weight = tl.where(total == 0, 0.0, weight * of_values)
    out_head = head_of(out, out_strides, b, h, begin_q)
    store_tile(out_head, m0, out_strides, M, acc * weight[:, None], BM, DV, DV_PADDED)
    numbers_of = (lse, row_max, row_sum, row_mean, max_logit, entropy, top_key)
    store_numbers(numbers_of, at + m, m < M, row, total, first_key, STATS)


class Grid(NamedTuple):
    """How programs are spread over the tiles of heads: see ``slot_of``."""

    tiles: int
    section: int
    programs: int


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
    eight = eight_bits(problem, config.family)
    operands = with_codes(operands, eight)
    before: list[Launch] = []
    turned = turns(eight, config.family)
    if turned:
        operands, before = turn_values(problem, operands, blocks)
    grid = _grid(problem, blocks)
    rows = key_rows(problem, operands, config, variant, blocks)
    arguments = {
        **tensors_of(problem, operands, result),
        **scales_of(operands),
        "cu_q": operands.cu_seqlens_q,
        "cu_k": operands.cu_seqlens_k,
        **lists_of(tile_lists(problem, operands, variant.tables, blocks.queries, blocks.keys)),
        "captured": (*captures(operands.mask_tensors), *captures(operands.score_tensors)),
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        **paging_of(problem, operands),
        **rows.arguments(),
        "tiles": grid.tiles,
        "section": grid.section,
        "scale": problem.scale,
        **dropout_of(problem, operands),
    }
    constants = {
        **constants_of(problem, operands, result, config, variant, blocks),
        "REVERSED": _grows(problem),
        "EIGHT": eight,
        "TURNED": turned,
        "EDGE_STAGES": rows.edge_stages,
    }
    if operands.q_scale is not None or operands.k_scale is not None:
        constants["FOLDED"] = variant.score is None  # ``folded`` makes it positive
    return [*before, launch_of(attend, (grid.programs,), arguments, constants, blocks)]


def _grid(problem: Problem, blocks: Blocks) -> Grid:
    """Tiles and sections; in a variable-length call a bound that needs no lengths."""
    tiles = slots_of(problem, problem.queries, blocks.queries)
    lines = problem.heads * (problem.batch if problem.layout == "dense" else 1)
    section = problem.heads // problem.kv_heads
    if _grows(problem):
        # Long and short tiles of many heads balance: as many as the cache has room for.
        widths = (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        section *= max(1, _CACHED_BYTES // max(problem.keys * widths, 1))
    return Grid(tiles, max(1, min(section, lines)), tiles * lines)


def constants_of(
    problem: Problem,
    operands: Operands,
    result: Result,
    config: Config,
    variant: Variant,
    blocks: Blocks,
) -> dict[str, Any]:
    """The constants of every walk over the keys; arguments as for ``forward_launches``."""
    return {
        "SEEN": variant.seen,
        "SCORE": variant.score,
        "KEYS_OF": variant.keys_of,
        "BLIND": not knows_whole_tiles(problem, variant),
        "SKIPS": meets_empty_tiles(problem, variant),
        **finishing_of(problem, operands, result, variant),
        "D": problem.head_dim,
        "D_PADDED": padded(problem.head_dim),
        "BM": blocks.queries,
        "BN": blocks.keys,
        "WIDE": wide(operands[:3], problem, blocks),
        "PRECISION": config.precision,
        "PAGE": problem.page_size,
    }


def finishing_of(
    problem: Problem, operands: Operands, result: Result, variant: Variant
) -> dict[str, Any]:
    """The constants of what ends a walk: ``settled``, and the rows of the output."""
    scaled = operands.q_scale is not None or operands.k_scale is not None
    return {
        "FOLDED": variant.score is None and problem.scale > _LEAST_FOLDED and not scaled,
        "DROPOUT": problem.dropout_p > 0,
        "STATS": 0 if result.entropy is None else 1 if result.top_key is None else 2,
        "DV": problem.value_dim,
        "DV_PADDED": padded(problem.value_dim),
    }


def tensors_of(problem: Problem, operands: Operands, result: Result) -> dict[str, Any]:
    """The tensors of a call, but for cu_seqlens, and their strides."""
    stats = result.stats
    return {
        "q": operands.q,
        "k": operands.k,
        "v": operands.v,
        "out": result.out,
        "lse": result.lse,
        "row_max": stats[0],
        "row_sum": stats[1],
        "row_mean": None if result.entropy is None else stats[2],
        "max_logit": result.max_logit,
        "entropy": result.entropy,
        "top_key": result.top_key,
        "sinks": operands.sinks,
        "q_strides": head_strides(operands.q, problem),
        "k_strides": head_strides(operands.k, problem),
        "v_strides": head_strides(operands.v, problem),
        "out_strides": head_strides(result.out, problem),
    }


def paging_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """The block table, the lengths, and the bounds that kernels clamp both to."""
    held = operands.k.shape[0] if problem.page_size else 1
    return {
        "block_table": operands.block_table,
        "key_lengths": operands.key_lengths,
        "keys": problem.keys if held else 0,
        "last_page": held - 1 if problem.page_size else None,
    }


def dropout_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Seed and threshold as 32-bit words, and the factor of what is kept."""
    low, high = split_seed(operands.seed)
    return {
        "seed_low": word(low),
        "seed_high": word(high),
        "drop_below": word(threshold(problem.dropout_p)),
        "keep_factor": 1.0 / (1.0 - problem.dropout_p),
    }


def _grows(problem: Problem) -> bool:
    """Whether later queries see more keys: the longest tiles then come first."""
    if any(instr.op not in ("band", "below", "and") for instr in problem.mask):
        return False
    bands = [instr.params for instr in problem.mask if instr.op == "band"]
    return any(left == -1 and right != -1 for left, right, _ in bands)
