"""The forward pass of many queries: one kernel for every layout, mask and score, and its host code.

A program takes a block of queries of one head and walks over the blocks of keys that the mask
allows. It keeps the row maximum, the row sum and the unfinished output of an online softmax
(``online.py``). Blocks that the mask shows whole come first, and skip the mask. The others follow.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import FAMILIES, Blocks
from tilewise.kernels.gpu.forward import Forward
from tilewise.kernels.gpu.forward.online import (
    absorb,
    nothing_seen,
    queries_at,
    settled,
    store_numbers,
)
from tilewise.kernels.gpu.forward.statistics import statistics_launch
from tilewise.kernels.gpu.walk.descriptors import page_rows
from tilewise.kernels.gpu.walk.float8 import (
    begin_transposed,
    folded,
    fp8_products,
    lowered,
    scaled_for,
    stored_form,
    transpose_values,
    wants_transposed,
    with_codes,
)
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.pairs import drawing
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    described_pages,
    head_of,
    keys_at,
    launch_of,
    line_place,
    lists_of,
    range_of,
    scaled_side,
    slot_of,
    slots_of,
    split_range,
    store_tile,
    walked,
    walks_of,
)
from tilewise.problem import Problem

_CACHED_BYTES = 32 << 20  # of keys and values, which heads that run together may share a cache for


@triton.jit(do_not_specialize=COUNTS)
def attend(
    call,
    lists,
    k_rows,
    v_rows,
    batch,
    heads,
    group,
    queries,
    keys,
    last_page,
    tiles,
    section,
    drop_below,
    SEEN: tl.constexpr,
    SCORE: tl.constexpr,
    KEYS_OF: tl.constexpr,
    FORM: tl.constexpr,
):
    """Attention of a block of BM queries of one head.

    In a variable-length call (``cu_q`` is not None) there are slots for more tiles than there are;
    a program without one ends. Strides are (b, h, row, column). With pages (PAGE is not 0) the
    lengths of sequences are their ``key_lengths``, and ``keys`` is the most that these may be.

    ``call`` is a ``Call``, ``lists`` are those of ``lists_of``, ``k_rows`` and ``v_rows`` those of
    ``page_rows``.
    """
    q, k, v = call.inputs
    out, lse, row_max, row_sum = call.outputs
    sinks, q_scale, k_scale, v_scale = call.per_head
    cu_q, cu_k, block_table, key_lengths = call.sequences
    q_strides, k_strides, v_strides, out_strides = call.strides
    scale, keep_factor, seed = call.numbers
    lines = heads if cu_q is not None else batch * heads
    tile, line = slot_of(tl.program_id(0), tiles, section, lines, FORM.REVERSED)
    b, h, begin_q, begin_k, M, N, m0 = line_place(
        tile, line, (cu_q, cu_k, None), batch, heads, queries, keys, FORM.BM, False
    )
    if m0 >= M:
        return
    m = m0 + tl.arange(0, FORM.BM)
    b_k, pages, N = keys_at(block_table, key_lengths, b, N, keys, last_page, FORM.PAGE)
    k_head = head_of(k, k_strides, b_k, h // group, begin_k)
    begin_v = begin_k
    if FORM.TRANSPOSED and cu_q is not None:
        begin_v = begin_transposed(begin_k, b)
    v_head = head_of(v, v_strides, b_k, h // group, begin_v)
    q_tile = queries_at(head_of(q, q_strides, b, h, begin_q), q_strides, m0, M, FORM)
    scale = scaled_for(scale, q_scale, k_scale, b, h, heads, group)
    if FORM.FOLDED and (q_scale is not None or k_scale is not None):
        q_tile, scale = folded(q_tile, scale)

    drawn = drawing(seed)
    own = m[:, None]
    low, full_low, full_high, high = range_of(b, m0, M, N, call.captured, KEYS_OF, FORM.BM, False)
    k_pages = described_pages(pages, k_rows, h // group)
    v_pages = described_pages(pages, v_rows, h // group)
    k_side = scaled_side(k_head, k_strides, k_pages, call.per_row[0], h // group)
    v_side = scaled_side(v_head, v_strides, v_pages, call.per_row[1], h // group)
    spans = split_range(low, full_low, full_high, high, N, FORM.BN)
    walks = walks_of(spans, lists, b, h, m0 // FORM.BM, FORM.BN)
    sides = (k_side, v_side, low, high)
    state = nothing_seen(FORM)
    fixed = (q_tile, sides, (b, h, own, M, N), (scale, drawn, drop_below))
    acc, top, total = walked(
        call, state, fixed, walks, own, (b, h, M, N), absorb, SCORE, None, SEEN, FORM.BN, False,
        FORM,
    )  # fmt: skip

    sink = None if sinks is None else tl.load(sinks + h)
    total = lowered(total, FORM)
    weight, numbers = settled(top, total, sink, scale, keep_factor, FORM.FOLDED, FORM.DROPOUT)
    weight = lowered(weight, FORM)
    if v_scale is not None:
        of_values = tl.load(v_scale + b * (heads // group) + h // group)
        weight = tl.where(total == 0, 0.0, weight * of_values)
    out_head = head_of(out, out_strides, b, h, begin_q)
    store_tile(
        out_head, m0, out_strides, M, acc * weight[:, None], FORM.BM, FORM.DV, FORM.DV_PADDED
    )
    at = tl.cast(line, tl.int64) * queries + begin_q + m
    store_numbers((lse, row_max, row_sum), at, m < M, numbers, total)


class Grid(NamedTuple):
    """Spread of programs over the tiles of heads: see ``slot_of``."""

    tiles: int
    section: int
    programs: int


def forward_launches(call: Forward) -> list[Launch]:
    """Return the launches that fill a result; nothing here reads a tensor's values."""
    problem, config, variant = call.problem, call.config, call.variant
    blocks = config.blocks("forward", problem)
    alone = _in_groups(call)
    if alone and call.result.entropy is None:
        return alone
    fp8 = fp8_products(problem, config.family)
    operands = with_codes(call.operands, fp8, stored_form(problem, config.family))
    before: list[Launch] = []
    transposed = wants_transposed(fp8, config.family)
    if transposed:
        operands, before = transpose_values(problem, operands, blocks)
    call = call._replace(operands=operands)
    grid = _grid(problem, blocks)
    lists = tile_lists(problem, operands, variant.tables, blocks.queries, blocks.keys)
    shared = {**call.arguments(), "lists": lists_of(lists)}
    arguments = {
        **shared,
        **page_rows(problem, operands, config, "forward"),
        "tiles": grid.tiles,
        "section": grid.section,
    }
    bare = call.form("forward", blocks, fp8)
    # Signs of scales go to the queries, see ``folded``.
    in_exponent = bare.FOLDED or (call.is_scaled() and variant.score is None)
    form = bare._replace(FOLDED=in_exponent, REVERSED=_grows(problem), TRANSPOSED=transposed)
    constants = {**call.functions(), "FORM": form}
    walk = launch_of(attend, (grid.programs,), arguments, constants, blocks)
    launches = alone or [*before, walk]
    if call.result.entropy is not None:
        launches.append(statistics_launch(call, shared, bare, blocks))
    return launches


def _in_groups(call: Forward) -> list[Launch]:
    """Return the launches of the Gluon kernel of the pass, where there is one for the call."""
    problem, config = call.problem, call.config
    blocks = config.in_groups("forward", problem)
    if blocks is None:
        return []
    from tilewise.kernels.gpu.forward.groups import attend_launch

    section, grows = _grid(problem, blocks).section, _grows(problem)
    return attend_launch(call, blocks, section, grows, FAMILIES[config.family].unit == "tcgen05")


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


def _grows(problem: Problem) -> bool:
    """Return whether later queries see more keys: the longest tiles then come first."""
    if any(instr.op not in ("band", "below", "and") for instr in problem.mask):
        return False
    bands = [instr.params for instr in problem.mask if instr.op == "band"]
    return any(left == -1 and right != -1 for left, right, _ in bands)
