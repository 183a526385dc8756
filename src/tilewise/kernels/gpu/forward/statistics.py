"""Compute statistics of the rows: the largest logit, its first key, and the entropy.

They take a separate walk over the keys, after that of the output and without the values. So they
take no registers from the output's walk, whose bits are the same with statistics and without.

With ``t_j`` the exponents of a row in base 2 less the largest of them, its sink included::

    row_sum = sum_j 2^t_j,    row_mean = sum_j t_j 2^t_j / row_sum
    entropy = log(row_sum) - log(2) row_mean

Both sums are kept online: where the largest grows by ``d``, every ``t_j`` falls by it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.forward import Forward
from tilewise.kernels.gpu.forward.online import beside_sink, queries_at, scores_of_block, tops
from tilewise.kernels.gpu.walk.float8 import scaled_for
from tilewise.kernels.gpu.walk.forms import Form
from tilewise.kernels.gpu.walk.pairs import LN2, LOG2E
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    head_of,
    keys_at,
    launch_of,
    line_place,
    programs_of,
    range_of,
    scaled_side,
    slots_of,
    split_range,
    walked,
    walks_of,
)

FAR: tl.constexpr = tl.constexpr(-2000.0)  # an exponent whose power of two is 0, but finite
NEVER: tl.constexpr = tl.constexpr(2147483647)
OF_NAN: tl.constexpr = tl.constexpr(-2147483648)


@triton.jit
def describe_block(
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
    """The state of rows with one more block of keys: a ``STEP`` of ``tiles.walked``."""
    q, side, low, high, place, scale = fixed
    top, total, moment, top_key = state
    n = (n0 + tl.arange(0, FORM.BN))[None, :]
    scores, _ = scores_of_block(
        q, side, n0, low, high, place, scale, call.captured, SEEN, SCORE, MASKED, FORM
    )
    best = tl.max(scores, 1)  # a chip's maximum leaves NaN out
    if FORM.NAMED:
        # The sign of a key says that its score is NaN, so that the least of all is the first NaN's.
        found = tl.where(scores == best[:, None], n, NEVER)
        first = tl.min(tl.where(scores != scores, n | OF_NAN, found), 1)
        either = tl.minimum(first, top_key)
        better = tl.where(best == top, either, top_key)
        better = tl.where(best > top, first, better)
        better = tl.where(best == float("-inf"), top_key, better)
        top_key = tl.where(either < 0, either, better)
    new_top = tl.maximum(top, best)
    # A row may have seen nothing yet. One that saw infinity is measured from 0 as well: its total
    # is infinite then, and NaN where a score is and nowhere else.
    base = tl.where(tl.abs(new_top) == float("inf"), 0.0, new_top)
    unit = scale * LOG2E if FORM.FOLDED else LOG2E
    exponent = (scores - base[:, None]) * unit
    moved = (top - base) * unit
    p = tl.math.exp2(exponent)
    fade = tl.math.exp2(moved)
    moment = (moment + tl.maximum(moved, FAR) * total) * fade
    moment = moment + tl.sum(p * tl.maximum(exponent, FAR), 1)
    total = total * fade + tl.sum(p, 1)
    return new_top, total, moment, top_key


@triton.jit
def of_rows(top, total, moment, sink, scale, FOLDED: tl.constexpr):
    """Return a walk's result: (max_logit, row_mean, entropy) of rows, 0 for those of a dead one."""
    natural, base2 = tops(top, scale, FOLDED)
    natural = tl.where(total == total, natural, total)
    if sink is not None:
        of_keys, of_sink = beside_sink(base2, sink)
        fade, sunk = tl.math.exp2(of_keys), tl.math.exp2(of_sink)
        moment = (moment + tl.maximum(of_keys, FAR) * total) * fade
        moment = moment + sunk * tl.maximum(of_sink, FAR)
        total = total * fade + sunk
    dead = total == 0
    whole = tl.where(dead, 1.0, total)
    mean = tl.where(dead, 0.0, moment / whole)
    return natural, mean, tl.where(dead, 0.0, tl.log(whole) - LN2 * mean)


@triton.jit(do_not_specialize=COUNTS)
def describe(
    call, lists, batch, heads, group, queries, keys, last_page, tiles, SEEN: tl.constexpr,
    SCORE: tl.constexpr, KEYS_OF: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Statistics of a block of BM queries of one head; arguments as of ``attend``.

    But ``outputs`` of the call are row_mean, max_logit, entropy and top_key.
    """
    q, k = call.inputs[:2]
    row_mean, max_logit, entropy, top_key = call.outputs
    sinks, q_scale, k_scale = call.per_head[:3]
    cu_q, cu_k, block_table, key_lengths = call.sequences
    q_strides, k_strides = call.strides[:2]
    tile, line = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h, begin_q, begin_k, M, N, m0 = line_place(
        tile, line, (cu_q, cu_k, None), batch, heads, queries, keys, FORM.BM, False
    )
    if m0 >= M:
        return
    m = m0 + tl.arange(0, FORM.BM)
    b_k, pages, N = keys_at(block_table, key_lengths, b, N, keys, last_page, FORM.PAGE)
    k_head = head_of(k, k_strides, b_k, h // group, begin_k)
    q_tile = queries_at(head_of(q, q_strides, b, h, begin_q), q_strides, m0, M, FORM)
    scale = scaled_for(call.numbers[0], q_scale, k_scale, b, h, heads, group)

    state = (
        tl.full([FORM.BM], float("-inf"), tl.float32),
        tl.full([FORM.BM], 0.0, tl.float32),
        tl.full([FORM.BM], 0.0, tl.float32),
        tl.full([FORM.BM], NEVER, tl.int32),
    )
    low, full_low, full_high, high = range_of(b, m0, M, N, call.captured, KEYS_OF, FORM.BM, False)
    side = scaled_side(k_head, k_strides, pages, call.per_row[0], h // group)
    spans = split_range(low, full_low, full_high, high, N, FORM.BN)
    walks = walks_of(spans, lists, b, h, m0 // FORM.BM, FORM.BN)
    own = m[:, None]
    fixed = (q_tile, side, low, high, (b, h, own, M, N), scale)
    top, total, moment, first_key = walked(
        call, state, fixed, walks, own, (b, h, M, N), describe_block, SCORE, None, SEEN, FORM.BN,
        False, FORM,
    )  # fmt: skip
    sink = None if sinks is None else tl.load(sinks + h)
    highest, mean, spread = of_rows(top, total, moment, sink, scale, FORM.FOLDED)
    at = tl.cast(line, tl.int64) * queries + begin_q + m
    tl.store(max_logit + at, highest, mask=m < M)
    tl.store(row_mean + at, mean, mask=m < M)
    tl.store(entropy + at, spread, mask=m < M)
    if FORM.NAMED:
        first_key = tl.where(first_key == NEVER, -1, first_key & NEVER)
        tl.store(top_key + at, first_key.to(tl.int64), mask=m < M)


def statistics_launch(
    call: Forward, arguments: dict[str, Any], form: Form, blocks: Blocks
) -> Launch:
    """Return the launch that fills the statistics of a result, which has memory for them.

    Args:
        call: with the result of the walk of the output.
        arguments: of that walk, as ``Forward.arguments`` gives them, and its ``lists``.
        form: of ``Forward.form``.
        blocks: of queries and keys.
    """
    problem, result = call.problem, call.result
    tiles = slots_of(problem, problem.queries, blocks.queries)
    outputs = (result.stats[2], result.max_logit, result.entropy, result.top_key)
    given = arguments["call"]._replace(outputs=outputs)
    arguments = {name: each for name, each in arguments.items() if name != "drop_below"}
    arguments |= {"call": given, "tiles": tiles}
    part = call.config.part("forward", problem)
    # It reads no values and drops nothing: no other code for these.
    form = form._replace(PART=part, DV=0, DV_PADDED=0, DROPOUT=False)
    form = form._replace(NAMED=result.top_key is not None)
    programs = programs_of(problem, problem.heads, tiles)
    return launch_of(describe, (programs,), arguments, call.functions() | {"FORM": form}, blocks)
