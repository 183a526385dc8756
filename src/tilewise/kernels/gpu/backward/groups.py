"""Gradients on Hopper: one warp loads tiles, two groups of warps share the keys.

A program owns 128 keys of one key head, 64 for each group, and walks the queries of its group of
heads. Keys and values stay in shared memory, and queries and incoming gradients come through a
ring. Products are computed transposed, ``[keys, queries]``: so P and dS are operands as they lie in
the registers, and nothing of a pair goes through shared memory.

The fused form makes the gradients of queries too: see ``fused.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.backward import Backward
from tilewise.kernels.gpu.backward.fused import (
    Sums,
    add_queries,
    by_keys,
    here_only,
    leave,
    place_in_turn,
    rooms_for,
)
from tilewise.kernels.gpu.backward.gradients import pair_gradients
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.walk.groups import (
    GROUPS,
    async_store,
    barriers,
    counted,
    described_rows,
    fetch,
    in_groups,
    masked_and_whole,
    tile_at,
    tile_down,
)
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.pairs import LOG2E, shown
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    launch_of,
    lists_of,
    number_strides,
    programs_of,
    range_of,
    slots_of,
    split_range,
)


@gluon.jit
def _load(sources, shared, FORM: gl.constexpr):
    """Load keys and values of both groups, then fill the ring with queries and gradients."""
    q_rows, k_rows, v_rows, grad_rows = sources
    memory, bars, place, spans, lists, group = shared
    k_s, v_s, q_s, g_s = memory[:4]
    held, q_full, g_full, empty = bars[:4]
    b, key_head, n0 = place[:3]
    HALF: gl.constexpr = FORM.BN // GROUPS
    for c in gl.static_range(GROUPS):
        fetch(k_rows, (b, key_head, n0 + c * HALF, 0), held.index(c), k_s.index(c))
        fetch(v_rows, (b, key_head, n0 + c * HALF, 0), held.index(c), v_s.index(c))
    t = n0 * 0
    for member in range(group):
        h = key_head * group + member
        walk = counted(spans, lists, b, h, n0 // FORM.BN, FORM.BM)
        count = walk[1] + walk[2]
        for j in range(count):
            if FORM.FUSED:
                m0 = tile_down(j, spans, count, FORM.BM)
            else:
                m0 = tile_at(j, spans, walk, FORM.BM, FORM.LISTED)
            here = t % FORM.STAGES
            mbarrier.wait(empty.index(here), ((t // FORM.STAGES) & 1) ^ 1)
            fetch(q_rows, (b, h, m0, 0), q_full.index(here), q_s.index(here))
            fetch(grad_rows, (b, h, m0, 0), g_full.index(here), g_s.index(here))
            t += 1


@gluon.jit
def _of_rows(numbers, m, M, other: gl.constexpr, MASKED: gl.constexpr):
    """One of the numbers of ``rows.row_values``; ``other`` of rows beyond M, if MASKED."""
    if MASKED:
        return gl.load(numbers + m, mask=m < M, other=other)
    return gl.load(numbers + m)


@gluon.jit
def _step(t, m0, totals, fixed, c: gl.constexpr, SEEN: gl.constexpr, SCORE: gl.constexpr,
          GAIN: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """(dK, dV) after a tile of queries, dK not yet scaled.

    ``fixed`` is what all tiles of a head share.
    """
    total_k, total_v = totals
    operands, memory, bars, place, rows, plane, scale, call = fixed
    k, v = operands
    b, h, n, M, N = place
    k_s, v_s, q_s, g_s = memory[:4]
    _, q_full, g_full, empty = bars[:4]
    S_LAYOUT: gl.constexpr = n.type.layout
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    HALF: gl.constexpr = FORM.BN // GROUPS
    here = t % FORM.STAGES
    turn = (t // FORM.STAGES) & 1
    if FORM.D > 64:  # else the loop spills addresses
        own = here_only(c)
        k = k_s.index(own).reshape([HALF, FORM.D])
        v = v_s.index(own).reshape([HALF, FORM.D])
        M += here_only(0)
    zeros = gl.full([HALF, FORM.BM], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(q_full.index(here), turn)
    q = q_s.index(here).reshape([FORM.BM, FORM.D])
    products = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(g_full.index(here), turn)
    grad = g_s.index(here).reshape([FORM.BM, FORM.D])
    by_value = warpgroup_mma(v, grad.permute((1, 0)), zeros, use_acc=False, is_async=True)
    m = m0 + gl.arange(0, FORM.BM, gl.SliceLayout(0, S_LAYOUT))[None, :]
    base = _of_rows(rows, m, M, float("inf"), MASKED)  # while the products run
    products, by_value = warpgroup_mma_wait(0, deps=[products, by_value])
    visible = None
    if MASKED:
        visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
    if SCORE is None:
        scores = products * (scale * LOG2E)
        if MASKED:
            scores = gl.where(visible, scores, float("-inf"))
        p = gl.exp2(scores - base)
        weights = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
        total_v = warpgroup_mma(weights, grad, total_v, is_async=True)
        # Not before: beside both products the registers have no room for two numbers of a query.
        shift = _of_rows(rows + plane, m, M, 0.0, MASKED)
        ds = p * (by_value - shift)
        if MASKED:
            ds = gl.where(p == 0, 0.0, ds)
    else:
        shift = _of_rows(rows + plane, m, M, 0.0, MASKED)
        row = (base, shift, base, base, base)
        pairs = (b, h, m, n, M, N)
        numbers = (scale, 1.0, 0, 0)
        p, ds = pair_gradients(
            call, (products, by_value), row, numbers, pairs, visible, SCORE, GAIN, MASKED, FORM
        )
        weights = gl.convert_layout(p.to(q.dtype), P_LAYOUT)
        total_v = warpgroup_mma(weights, grad, total_v, is_async=True)
    ds = gl.convert_layout(ds.to(q.dtype), P_LAYOUT)
    if FORM.FUSED:
        side = t % 2
        ds_full = bars[4][0]
        # This side is free. The last to multiply by it was this group, or the other one two tiles
        # ago: that has ended, since dS of the last tile was waited for.
        memory[4].index(side * GROUPS + c).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(side), count=1)
    if FORM.SHARED:
        mbarrier.wait(ds_full.index(side), (t // 2) & 1)
        part = by_keys(c, t, memory, FORM)
        total_k = warpgroup_mma(ds, q, total_k, is_async=True)
        part = warpgroup_mma_wait(1, deps=[part])  # dK goes on while dQ is stored
        leave(c, t, part, memory, bars, FORM)
    elif FORM.FUSED:
        total_k = warpgroup_mma(ds, q, total_k, is_async=True)
        if side == c:  # the groups take turns: halves of 32 columns would be slow products
            mbarrier.wait(ds_full.index(side), (t // 2) & 1)
            part = by_keys(c, t, memory, FORM)
            part = warpgroup_mma_wait(0, deps=[part])
            leave(c, t, part, memory, bars, FORM)
    else:
        total_k = warpgroup_mma(ds, q, total_k, is_async=True)
    # Left running into the next tile they gained nothing: 501 TFLOP/s, where it is 636 so.
    total_k, total_v = warpgroup_mma_wait(0, deps=[total_k, total_v])
    mbarrier.arrive(empty.index(here), count=1)
    return total_k, total_v


@gluon.jit
def _sum(c: gl.constexpr, own, shared, SEEN: gl.constexpr, SCORE: gl.constexpr,
         GAIN: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Gradients of the keys and values of group ``c``."""
    grad_k_rows, grad_v_rows, rows, row_strides, plane, scale, call = own
    memory, bars, place, spans, lists, group = shared
    k_s, v_s = memory[:2]
    held = bars[0]
    b, key_head, n0, M, N = place
    HALF: gl.constexpr = FORM.BN // GROUPS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.BM, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.D, 16])
    n = (n0 + c * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT)))[:, None]
    total_k = gl.full([HALF, FORM.D], 0.0, gl.float32, D_LAYOUT)
    total_v = gl.full([HALF, FORM.D], 0.0, gl.float32, D_LAYOUT)
    mbarrier.wait(held.index(c), 0)
    k = k_s.index(c).reshape([HALF, FORM.D])
    v = v_s.index(c).reshape([HALF, FORM.D])
    totals = (total_k, total_v)
    before = n0 * 0  # tiles of the heads that came before
    for member in range(group):
        h = key_head * group + member
        row_head = head_of(rows, row_strides, b, h, 0)
        walk = counted(spans, lists, b, h, n0 // FORM.BN, FORM.BM)
        count = walk[1] + walk[2]
        fixed = (k, v), memory, bars, (b, h, n, M, N), row_head, plane, scale, call
        if FORM.FUSED:
            j = count * 0
            for end in range(2):
                masked, whole = masked_and_whole(end, spans, count, FORM.BM)
                for _ in range(masked):
                    m0 = tile_down(j, spans, count, FORM.BM)
                    totals = _step(before + j, m0, totals, fixed, c, SEEN, SCORE, GAIN, True, FORM)
                    j += 1
                for _ in range(whole):
                    m0 = tile_down(j, spans, count, FORM.BM)
                    totals = _step(before + j, m0, totals, fixed, c, None, SCORE, GAIN, False, FORM)
                    j += 1
        else:
            for j in range(walk[1]):
                m0 = tile_at(j, spans, walk, FORM.BM, FORM.LISTED)
                totals = _step(before + j, m0, totals, fixed, c, SEEN, SCORE, GAIN, True, FORM)
            for j in range(walk[1], count):
                m0 = tile_at(j, spans, walk, FORM.BM, FORM.LISTED)
                totals = _step(before + j, m0, totals, fixed, c, None, SCORE, GAIN, False, FORM)
        before += count
    total_k, total_v = totals
    if FORM.FUSED:  # the other group multiplies dS by these keys too
        mbarrier.arrive(bars[4][3].index(0), count=1)
        mbarrier.wait(bars[4][3].index(0), 0)
    # Keys and values were multiplied for the last time: their memory takes their gradients.
    k.store((total_k * scale).to(k.dtype))
    v.store(total_v.to(v.dtype))
    fence_async_shared()
    async_store(grad_k_rows, [b, key_head, n0 + c * HALF, 0], k_s.index(c))
    async_store(grad_v_rows, [b, key_head, n0 + c * HALF, 0], v_s.index(c))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys", "tiles", "plane"])
def keys_in_groups(
    q_rows, k_rows, v_rows, grad_rows, grad_k_rows, grad_v_rows, sum_rows, turns, rows, row_strides,
    lists, heads, group, queries, keys, tiles, plane, scale, call, SEEN: gl.constexpr,
    SCORE: gl.constexpr, GAIN: gl.constexpr, QUERIES_OF: gl.constexpr, KEYS_OF: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Gradients of 128 keys and values of one key head; arguments as ``passes.key_kernel`` has.

    ``q_rows`` and so on are descriptors of tiles [1, 1, rows, D]. FUSED: also what these keys add
    to dQ, in ``sum_rows`` (float32, not yet scaled). ``turns`` are zeros: how many programs have
    started, then for each head and tile of queries how many have added to it.
    """
    ST: gl.constexpr = FORM.STAGES
    HALF: gl.constexpr = FORM.BN // GROUPS
    KIND: gl.constexpr = q_rows.dtype
    if FORM.FUSED:
        tile, line = place_in_turn(turns, tiles)
    else:
        program = gl.program_id(0)
        tile = program % tiles
        line = program // tiles
    key_heads = heads // group
    b = line // key_heads
    key_head = line % key_heads
    n0 = tile * FORM.BN
    low, full_low, full_high, high = range_of(
        b, n0, queries, keys, call.captured, QUERIES_OF, FORM.BN, True
    )
    if FORM.FUSED:
        # Keys beyond the last are zeros, and p of them may be infinite: their product is NaN in dQ.
        full_high = gl.where(n0 + FORM.BN > keys, 0, full_high)
    spans = split_range(low, full_low, full_high, high, queries, FORM.BM)
    k_s = gl.allocate_shared_memory(KIND, [GROUPS, 1, 1, HALF, FORM.D], k_rows.layout)
    v_s = gl.allocate_shared_memory(KIND, [GROUPS, 1, 1, HALF, FORM.D], v_rows.layout)
    q_s = gl.allocate_shared_memory(KIND, [ST, 1, 1, FORM.BM, FORM.D], q_rows.layout)
    g_s = gl.allocate_shared_memory(KIND, [ST, 1, 1, FORM.BM, FORM.D], grad_rows.layout)
    held = barriers(GROUPS, 2)  # keys and values
    q_full, g_full, empty = barriers(ST, 1), barriers(ST, 1), barriers(ST, GROUPS)
    ds_s, dq_s, adding = None, None, None
    if FORM.FUSED:
        ds_s, dq_s, adding = rooms_for(sum_rows, KIND, FORM)
    fence_async_shared()
    memory = (k_s, v_s, q_s, g_s, ds_s, dq_s)
    bars = (held, q_full, g_full, empty, adding)
    place = (b, key_head, n0, queries, keys)
    own = (grad_k_rows, grad_v_rows, rows, row_strides, plane, scale, call)
    shared = (memory, bars, place, spans, lists, group)
    sources = (q_rows, k_rows, v_rows, grad_rows)
    if FORM.FUSED:
        sums = (sum_rows, turns, heads, call.captured)
        gl.warp_specialize(
            [
                (_sum, (0, own, shared, SEEN, SCORE, GAIN, FORM)),
                (_sum, (1, own, shared, SEEN, SCORE, GAIN, FORM)),
                (_load, (sources, shared, FORM)),
                (add_queries, (sums, shared, KEYS_OF, FORM)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_sum, (0, own, shared, SEEN, SCORE, GAIN, FORM)),
                (_sum, (1, own, shared, SEEN, SCORE, GAIN, FORM)),
                (_load, (sources, shared, FORM)),
            ],
            [4, 1],
            [240, 24],
        )


class Form(NamedTuple):
    """The constants of ``keys_in_groups``: see ``gradients.Form`` and ``forward.groups.Form``.

    FUSED: dQ is made too, and ROOMS tiles of it wait in shared memory. SHARED: each group makes 64
    of its columns, which are all columns else, in turn.
    """

    BM: int
    BN: int
    D: int
    STAGES: int
    LISTED: bool
    FUSED: bool
    SHARED: bool
    ROOMS: int = 2
    FOLD: bool = True
    DROPOUT: bool = False
    ENTROPY: bool = False


class Captured(NamedTuple):
    """The part of a ``backward.Call`` that ``pair_gradients`` reads."""

    captured: tuple[Any, ...]


def key_launch(
    call: Backward, grad_k: Tensor, grad_v: Tensor, blocks: Blocks, sums: Sums | None = None
) -> Launch | None:
    """Return the launch of dK and dV; None where a tensor can have no descriptor.

    Args:
        call: what all walks of the backward are given.
        grad_k: where the gradient of the keys goes.
        grad_v: where that of the values goes.
        blocks: of ``Config.in_groups``, or of ``Config.fused``.
        sums: where dQ goes in the fused form, or None.
    """
    problem, operands, variant = call.problem, call.operands, call.variant
    half, width = blocks.keys // GROUPS.value, problem.head_dim
    tiles = [
        ("q_rows", operands.q, blocks.queries, width),
        ("k_rows", operands.k, half, width),
        ("v_rows", operands.v, half, width),
        ("grad_rows", call.upstream.out, blocks.queries, width),
        ("grad_k_rows", grad_k, half, width),
        ("grad_v_rows", grad_v, half, width),
    ]
    if sums is not None:
        tiles.append(("sum_rows", sums.sums, blocks.queries, width))
    rows = described_rows(tiles, problem)
    if rows is None:
        return None
    slots = slots_of(problem, problem.keys, blocks.keys)
    sides = blocks.queries, blocks.keys
    lists = tile_lists(problem, operands, variant.tables, *sides, by_keys=True)
    arguments = {
        "sum_rows": None,
        **rows,
        "turns": None if sums is None else sums.turns,
        "rows": call.rows,
        "row_strides": number_strides(call.rows[0], problem),
        "lists": lists_of(lists),
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": slots,
        "plane": call.rows[0].numel(),
        "scale": problem.scale,
        "call": Captured(call.captured()),
    }
    fused, shared = sums is not None, sums is not None and problem.head_dim > 64
    constants = {
        "SEEN": variant.seen,
        "SCORE": variant.score,
        "GAIN": variant.gain,
        "QUERIES_OF": variant.queries_of,
        "KEYS_OF": variant.keys_of if fused else None,
        "FORM": Form(*sides, problem.head_dim, blocks.stages, lists is not None, fused, shared),
    }
    grid = (programs_of(problem, problem.kv_heads, slots),)
    return in_groups(launch_of(keys_in_groups, grid, arguments, constants))
