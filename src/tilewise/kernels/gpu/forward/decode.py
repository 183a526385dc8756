"""The forward pass for decode: the keys of a head are split among programs.

A program takes a block of rows and one split of their keys. Rows are the queries of all heads that
share the keys, head by head. So a key is loaded once for all of them, and a block has the same
number of rows for every group size. Splits are cut by the number of the sequence's own keys
(``config.Splitting``): the rest of the call changes no bit. The results of the splits are merged in
the order of the keys (``merge.py``). A sequence of one split is finished at once.

A mask's range of keys is that of all queries of a head; a split outside it reads nothing. With a
``BlockMask``, the mask itself finds blocks of keys in which nothing attends, during the walk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gpu.config import Config
from tilewise.kernels.gpu.expressions.variant import Variant, captures
from tilewise.kernels.gpu.forward.arguments import (
    dropout_of,
    finishing_of,
    form_of,
    functions_of,
    paging_of,
    tensors_of,
)
from tilewise.kernels.gpu.forward.merge import empty_partials, merge_launch, split_size
from tilewise.kernels.gpu.forward.online import (
    absorb,
    nothing_seen,
    settled,
    store_numbers,
    walk_keys,
)
from tilewise.kernels.gpu.forward.statistics import Walk, statistics_launch
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.walk.float8 import decoded, fp8_products, stored_form, with_codes
from tilewise.kernels.gpu.walk.pairs import drawing
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    keys_at,
    launch_of,
    lists_of,
    scaled_side,
    split_range,
    walks_of,
)
from tilewise.problem import Operands, Problem, Result


@triton.jit
def rows_of(base, strides, h, m):
    """Where the row of each query of each head begins, as a column."""
    offset = h.to(tl.int64) * strides[1] + m.to(tl.int64) * strides[2]
    return (base + offset)[:, None]


@triton.jit(
    do_not_specialize=[
        "batch",
        "kv_heads",
        "group",
        "queries",
        "keys",
        "last_page",
        "blocks",
        "slots",
        "drop_below",
    ]
)
def attend_split(
    inputs,
    outputs,
    per_head,
    per_row,
    block_table,
    key_lengths,
    partials,
    strides,
    captured,
    batch,
    kv_heads,
    group,
    queries,
    keys,
    last_page,
    blocks,
    slots,
    scale,
    seed,
    drop_below,
    keep_factor,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    KEYS_OF: tl.constexpr,
    SPLITTING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attention of BM rows of the heads that share one head of keys, over one split of these.

    Programs are numbered by blocks of rows, of these by splits, heads of keys and batch items.
    There are ``slots`` for splits; a program without one ends. Strides are (b, h, row, column).
    """
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BN
    D_PADDED: tl.constexpr = FORM.D_PADDED
    DV_PADDED: tl.constexpr = FORM.DV_PADDED
    q, k, v = inputs
    out, lse, row_max, row_sum = outputs
    sinks, q_scale, k_scale, v_scale = per_head
    partial_out, partial_numbers = partials
    q_strides, k_strides, v_strides, out_strides = strides
    program = tl.program_id(0)
    block = program % blocks
    split = program // blocks % slots
    line = program // blocks // slots
    b, kv_head = line // kv_heads, line % kv_heads
    M = queries
    b_k, pages, N = keys_at(block_table, key_lengths, b, keys, keys, last_page, FORM.PAGE)
    size, splits = split_size(N, SPLITTING)
    if split >= splits:
        return
    row = block * BM + tl.arange(0, BM)
    of_group = tl.minimum(row // M, group - 1)
    h, m = kv_head * group + of_group, row - of_group * M  # what is beyond the last row has m >= M
    columns = tl.arange(0, D_PADDED)
    rows = rows_of(q + tl.cast(q_strides[0], tl.int64) * b, q_strides, h, m)
    places = rows + columns[None, :].to(tl.int64) * q_strides[3]
    q_tile = tl.load(places, mask=(m < M)[:, None] & (columns < FORM.D)[None, :], other=0.0)
    q_tile = decoded(q_tile, FORM)
    if FORM.TAIL > 0:
        columns = tl.arange(0, FORM.TAIL_PADDED)
        places = rows + (D_PADDED + columns)[None, :].to(tl.int64) * q_strides[3]
        inside = (m < M)[:, None] & (columns < FORM.TAIL)[None, :]
        q_tile = (q_tile, tl.load(places, mask=inside, other=0.0))
    if q_scale is not None:  # rows of a block may be of several heads
        scale = scale * tl.load(q_scale + b * (kv_heads * group) + h)[:, None]
    if k_scale is not None:
        scale = scale * tl.load(k_scale + b * kv_heads + kv_head)

    drawn = drawing(seed)
    numbers = (scale, drawn, drop_below)
    place = ((b, h[:, None], m[:, None], M, N), numbers)
    begin = split * size
    end = tl.minimum(begin + size, N)
    low, full_low, full_high, high = begin, begin, end, end
    if KEYS_OF is not None:
        low, full_low, full_high, high = KEYS_OF(b, M * 0, M, M, N, captured[0], captured[1])
        low, high = tl.maximum(low, begin), tl.minimum(high, end)
    k_head = head_of(k, k_strides, b_k, kv_head, 0)
    v_head = head_of(v, v_strides, b_k, kv_head, 0)
    k_side = scaled_side(k_head, k_strides, pages, per_row[0], kv_head)
    v_side = scaled_side(v_head, v_strides, pages, per_row[1], kv_head)
    sides = (k_side, v_side, low, high)
    spans = split_range(low, full_low, full_high, high, end, BN)
    walks = walks_of(spans, (None, None, None), b, kv_head, 0, BN)
    state = nothing_seen(FORM)
    acc, top, total = walk_keys(
        state, q_tile, sides, walks, place, captured, absorb, SEEN, SCORE, FORM
    )

    columns = tl.arange(0, DV_PADDED)
    inside = m < M
    kept_columns = inside[:, None] & (columns < FORM.DV)[None, :]
    at = (tl.cast(b, tl.int64) * (kv_heads * group) + h) * M + m
    if splits == 1:
        sink = None if sinks is None else tl.load(sinks + h)
        weight, row_numbers = settled(
            top, total, sink, scale, keep_factor, FORM.FOLDED, FORM.DROPOUT
        )
        if v_scale is not None:
            of_values = tl.load(v_scale + b * kv_heads + kv_head)
            weight = tl.where(total == 0, 0.0, weight * of_values)
        to = rows_of(out + tl.cast(out_strides[0], tl.int64) * b, out_strides, h, m)
        to = to + columns[None, :].to(tl.int64) * out_strides[3]
        tl.store(to, (acc * weight[:, None]).to(out.dtype.element_ty), mask=kept_columns)
        store_numbers((lse, row_max, row_sum), at, inside, row_numbers, total)
    else:
        stride = tl.cast(batch * kv_heads, tl.int64) * (group * M) * slots
        at = at * slots + split
        tl.store(partial_numbers + at, top, mask=inside)
        tl.store(partial_numbers + stride + at, total, mask=inside)
        # The merge does not read the rows that saw no key of this split: bytes that are saved.
        seen = kept_columns & (total != 0)[:, None]
        tl.store(partial_out + at[:, None] * FORM.DV + columns[None, :], acc, mask=seen)


def decode_launches(
    problem: Problem, operands: Operands, result: Result, config: Config, variant: Variant
) -> list[Launch]:
    """Return the launches that fill a decode result; nothing here reads a tensor's values.

    Args:
        problem: one of which ``config.decodes`` is true.
        operands: with what.
        result: with memory for everything that is wanted; statistics are asked for by theirs.
        config: of the chip.
        variant: the functions of the problem's mask and score.
    """
    unlisted = variant._replace(tables=())
    fp8 = fp8_products(problem, config.family, whole_walk=False)
    operands = with_codes(operands, fp8, stored_form(problem, config.family))
    tiles = config.blocks("decode", problem)
    splitting = config.splitting()
    count = splitting.splits_within if problem.page_size else splitting.splits
    slots = count(problem.keys)
    group = problem.heads // problem.kv_heads
    blocks = -(-group * problem.queries // tiles.queries)
    partials = empty_partials(problem, result, slots)
    arguments = {
        **tensors_of(problem, operands, result),
        "block_table": operands.block_table,
        "key_lengths": operands.key_lengths,
        "partials": tuple(partials),
        "captured": (*captures(operands.mask_tensors), *captures(operands.score_tensors)),
        "batch": problem.batch,
        "kv_heads": problem.kv_heads,
        "group": group,
        "queries": problem.queries,
        **paging_of(problem, operands),
        "blocks": blocks,
        "slots": slots,
        "scale": problem.scale,
        **dropout_of(problem, operands),
    }
    form = form_of(problem, operands, config, unlisted, tiles, fp8)._replace(
        **finishing_of(problem, operands, variant)
    )
    constants = {**functions_of(unlisted), "SPLITTING": splitting, "FORM": form}
    programs = blocks * slots * problem.kv_heads * problem.batch
    launches = [launch_of(attend_split, (programs,), arguments, constants, tiles)]
    if slots > 1:
        launches.append(merge_launch(problem, operands, result, partials, variant, splitting))
    if result.entropy is not None:
        walk = Walk(config, unlisted, tiles, lists_of(None), fp8)
        launches.append(statistics_launch(problem, operands, result, walk))
    return launches
