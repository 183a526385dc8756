"""The forward pass for decode: the keys of a head are split among programs.

A program takes a block of rows and one split of their keys. Rows are the queries of all heads that
share the keys, head by head. So a key is loaded once for all of them, and a block has the same
number of rows for every group size. Splits are cut by the number of the sequence's own keys
(``config.Splitting``): the rest of the call changes no bit. A sequence of one split is finished at
once; else the results of the splits are merged in the order of the keys. A split leaves of every
row the unfinished output, the row maximum in the units of the walk, and the row sum. With
``w_i = exp2(unit * (top_i - top))`` for ``top = max_i top_i``::

    sum = sum_i w_i sum_i,    acc = sum_i w_i acc_i

and then a row ends as any other does (``online.settled``); its sink is added here, once. A split of
which a row sees no key has the sum 0, and its output is not read.

A mask's range of keys is that of all queries of a head; a split outside it reads nothing. With a
``BlockMask``, the mask itself finds blocks of keys in which nothing attends, during the walk.

Source: Milakov and Gimelshein, 2018, section 3.1; Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import Blocks, Splitting, padded
from tilewise.kernels.gpu.forward import Forward
from tilewise.kernels.gpu.forward.online import absorb, nothing_seen, settled, store_numbers
from tilewise.kernels.gpu.forward.statistics import statistics_launch
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.descriptors import page_rows
from tilewise.kernels.gpu.walk.float8 import decoded, fp8_products, stored_form, with_codes
from tilewise.kernels.gpu.walk.forms import Form
from tilewise.kernels.gpu.walk.pairs import LOG2E, drawing
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    described_pages,
    head_of,
    keys_at,
    keys_in,
    launch_of,
    lists_of,
    scaled_side,
    split_range,
    walked,
    walks_of,
)
from tilewise.problem import Problem, Result

_WIDE_VALUE = 128  # from where on a program that holds all splits of a row needs more warps


class _Partials(NamedTuple):
    """What splits leave of rows, which count as those of lse do: by batch item, head and query.

    Args:
        out: float32 [rows, splits, Dv], not yet divided by the row sum.
        numbers: float32 [2, rows, splits]: row maximum in the units of the walk, and row sum.
    """

    out: Tensor
    numbers: Tensor


def empty_partials(problem: Problem, result: Result, splits: int) -> _Partials:
    """Memory for the partial results of so many splits; a call of one split needs none."""
    rows = result.lse.numel() if splits > 1 else 0
    out = scratch(result.lse, (rows, splits, problem.value_dim))
    return _Partials(out, scratch(out, (2, rows, splits)))


@triton.jit
def split_size(N, SPLITTING: tl.constexpr):
    """Keys of a split, and how many splits so many keys make: as ``config.Splitting`` says."""
    LEAST: tl.constexpr = SPLITTING.least
    ALL: tl.constexpr = LEAST * SPLITTING.most
    size = LEAST * tl.maximum(1, (N + ALL - 1) // ALL)
    return size, tl.maximum(1, (N + size - 1) // size)


@triton.jit(do_not_specialize=[*COUNTS, "rows"])
def merge_splits(
    outputs, sinks, v_scale, key_lengths, partials, out_strides, heads, group, queries, keys, rows,
    slots, scale, keep_factor, FOLDED: tl.constexpr, DROPOUT: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, SPLITTING: tl.constexpr,
):  # fmt: skip
    """Merge one row of the result. Rows of a sequence of one split are there already."""
    out, lse, row_max, row_sum = outputs
    partial_out, partial_numbers = partials
    row = tl.program_id(0)
    line = row // queries
    b, h, m = line // heads, line % heads, row % queries
    N = keys
    if key_lengths is not None:
        N = keys_in(key_lengths, b, keys)
    _, splits = split_size(N, SPLITTING)
    if splits == 1:
        return
    split = tl.arange(0, SPLITTING.most)
    first = tl.cast(row, tl.int64) * slots
    stride = tl.cast(rows, tl.int64) * slots
    numbers = partial_numbers + first + split
    top = tl.load(numbers, mask=split < splits, other=float("-inf"))
    total = tl.load(numbers + stride, mask=split < splits, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    moved = (top - base) * (scale * LOG2E if FOLDED else LOG2E)
    weight = tl.math.exp2(moved)
    whole = tl.sum(weight * total, 0)

    columns = tl.arange(0, DV_PADDED)
    places = partial_out + (first + split)[:, None] * DV + columns[None, :]
    met = (split < splits) & (total != 0)
    some = tl.load(places, mask=met[:, None] & (columns < DV)[None, :], other=0.0)
    acc = tl.sum(some * weight[:, None], 0)

    sink = None if sinks is None else tl.load(sinks + h)
    factor, numbers_of_row = settled(highest, whole, sink, scale, keep_factor, FOLDED, DROPOUT)
    if v_scale is not None:
        kv_heads = heads // group
        factor = tl.where(whole == 0, 0.0, factor * tl.load(v_scale + b * kv_heads + h // group))
    to = head_of(out, out_strides, b, h, m) + columns.to(tl.int64) * out_strides[3]
    tl.store(to, (acc * factor).to(out.dtype.element_ty), mask=columns < DV)
    store_numbers((lse, row_max, row_sum), row, row < rows, numbers_of_row, whole)


def _merge_launch(
    call: Forward, partials: _Partials, splitting: Splitting, form: Form, shared: dict[str, Any]
) -> Launch:
    """The launch that fills a result from what its splits left; ``shared`` of ``arguments``."""
    rows, slots = partials.out.shape[:2]
    given, problem = shared["call"], call.problem
    arguments: dict[str, Any] = {
        "outputs": given.outputs,
        "sinks": given.per_head[0],
        "v_scale": given.per_head[3],
        "key_lengths": call.operands.key_lengths,
        "partials": tuple(partials),
        "out_strides": given.strides[3],
        **{name: shared[name] for name in ("heads", "group", "queries", "keys")},
        "rows": rows,
        "slots": slots,
        "scale": problem.scale,
        "keep_factor": given.numbers[1],
    }
    # Not the form: of all blocks it is the same code.
    names = ("FOLDED", "DROPOUT", "DV", "DV_PADDED")
    constants = {"SPLITTING": splitting, **{name: getattr(form, name) for name in names}}
    warps = 4 if padded(problem.value_dim) <= _WIDE_VALUE else 8
    return launch_of(merge_splits, (rows,), arguments, constants, Blocks(1, 1, warps, 1))


@triton.jit
def rows_of(base, strides, h, m):
    """Where the row of each query of each head begins, as a column."""
    offset = h.to(tl.int64) * strides[1] + m.to(tl.int64) * strides[2]
    return (base + offset)[:, None]


@triton.jit(do_not_specialize=COUNTS)
def attend_split(
    call,
    partials,
    k_rows,
    v_rows,
    batch,
    kv_heads,
    group,
    queries,
    keys,
    last_page,
    blocks,
    slots,
    drop_below,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    KEYS_OF: tl.constexpr,
    SPLITTING: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attention of BM rows of the heads that share one head of keys, over one split of these.

    Programs are numbered by blocks of rows, of these by splits, heads of keys and batch items.
    There are ``slots`` for splits; a program without one ends. Strides are (b, h, row, column).
    ``k_rows`` and ``v_rows`` are those of ``page_rows``.
    """
    q, k, v = call.inputs
    out, lse, row_max, row_sum = call.outputs
    sinks, q_scale, k_scale, v_scale = call.per_head
    _, _, block_table, key_lengths = call.sequences
    partial_out, partial_numbers = partials
    scale, keep_factor, seed = call.numbers
    q_strides, k_strides, v_strides, out_strides = call.strides
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
    row = block * FORM.BM + tl.arange(0, FORM.BM)
    of_group = tl.minimum(row // M, group - 1)
    h, m = kv_head * group + of_group, row - of_group * M  # what is beyond the last row has m >= M
    columns = tl.arange(0, FORM.D_PADDED)
    rows = rows_of(q + tl.cast(q_strides[0], tl.int64) * b, q_strides, h, m)
    places = rows + columns[None, :].to(tl.int64) * q_strides[3]
    q_tile = tl.load(places, mask=(m < M)[:, None] & (columns < FORM.D)[None, :], other=0.0)
    q_tile = decoded(q_tile, FORM)
    if FORM.TAIL > 0:
        columns = tl.arange(0, FORM.TAIL_PADDED)
        places = rows + (FORM.D_PADDED + columns)[None, :].to(tl.int64) * q_strides[3]
        inside = (m < M)[:, None] & (columns < FORM.TAIL)[None, :]
        q_tile = (q_tile, tl.load(places, mask=inside, other=0.0))
    if q_scale is not None:  # rows of a block may be of several heads
        scale = scale * tl.load(q_scale + b * (kv_heads * group) + h)[:, None]
    if k_scale is not None:
        scale = scale * tl.load(k_scale + b * kv_heads + kv_head)

    drawn = drawing(seed)
    numbers = (scale, drawn, drop_below)
    row_heads, own = h[:, None], m[:, None]
    begin = split * size
    end = tl.minimum(begin + size, N)
    low, full_low, full_high, high = begin, begin, end, end
    if KEYS_OF is not None:
        low, full_low, full_high, high = KEYS_OF(
            b, M * 0, M, M, N, call.captured[0], call.captured[1]
        )
        low, high = tl.maximum(low, begin), tl.minimum(high, end)
    k_head = head_of(k, k_strides, b_k, kv_head, 0)
    v_head = head_of(v, v_strides, b_k, kv_head, 0)
    k_pages = described_pages(pages, k_rows, kv_head)
    v_pages = described_pages(pages, v_rows, kv_head)
    k_side = scaled_side(k_head, k_strides, k_pages, call.per_row[0], kv_head)
    v_side = scaled_side(v_head, v_strides, v_pages, call.per_row[1], kv_head)
    sides = (k_side, v_side, low, high)
    spans = split_range(low, full_low, full_high, high, end, FORM.BN)
    walks = walks_of(spans, (None, None, None), b, kv_head, 0, FORM.BN)
    state = nothing_seen(FORM)
    fixed = (q_tile, sides, (b, row_heads, own, M, N), numbers)
    acc, top, total = walked(
        call, state, fixed, walks, own, (b, row_heads, M, N), absorb, SCORE, None, SEEN, FORM.BN,
        False, FORM,
    )  # fmt: skip

    columns = tl.arange(0, FORM.DV_PADDED)
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


def decode_launches(call: Forward) -> list[Launch]:
    """Return the launches that fill a decode result; nothing here reads a tensor's values.

    ``config.decodes`` is true of its problem.
    """
    problem, config = call.problem, call.config
    fp8 = fp8_products(problem, config.family, whole_walk=False)
    operands = with_codes(call.operands, fp8, stored_form(problem, config.family))
    call = call._replace(operands=operands, variant=call.variant._replace(tables=()))
    tiles = config.blocks("decode", problem)
    splitting = config.splitting()
    count = splitting.splits_within if problem.page_size else splitting.splits
    slots = count(problem.keys)
    shared = call.arguments()
    blocks = -(-shared["group"] * problem.queries // tiles.queries)
    partials = empty_partials(problem, call.result, slots)
    # The kernel has registers for no division: it is told the heads of keys.
    own = {name: value for name, value in shared.items() if name != "heads"}
    arguments = {
        **own,
        "kv_heads": problem.kv_heads,
        "partials": tuple(partials),
        **page_rows(problem, operands, config, "decode"),
        "blocks": blocks,
        "slots": slots,
    }
    form = call.form("decode", tiles, fp8)
    constants = {**call.functions(), "SPLITTING": splitting, "FORM": form}
    programs = blocks * slots * problem.kv_heads * problem.batch
    launches = [launch_of(attend_split, (programs,), arguments, constants, tiles)]
    if slots > 1:
        launches.append(_merge_launch(call, partials, splitting, form, shared))
    if call.result.entropy is not None:
        shared |= {"lists": lists_of(None)}
        launches.append(statistics_launch(call, shared, form, tiles))
    return launches
