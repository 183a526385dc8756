"""The fused backward on Hopper: what ``groups.keys_in_groups`` does beyond dK and dV to make dQ.

The products are five in place of seven. dS goes through shared memory, because a tile of queries
needs the dS of both groups. One more warp adds ``dS . k`` to float32 sums in memory, by the copy
engine. Programs of a head add to a tile in the order of their keys, which an integer of each tile
keeps. So results have the same bits in every run.

No program waits for one that has not started. A program takes its tile of keys by a counter when it
starts, and waits for programs with lower numbers alone. Of the programs that run, the one with the
lowest number waits for nobody.

Programs wait little for two reasons. All walk their queries from the last tile to the first: so
under a causal mask or a window too, a program meets a tile after those that it waits for. And
numbers go round 16 heads of keys: of 132 programs that start together, 8 wait for one another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.groups import (
    GROUPS,
    async_atomic_add,
    async_store,
    barriers,
    counted,
    tile_down,
)
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    head_strides,
    launch_of,
    load_tile,
    programs_of,
    range_of,
    slot_of,
    slots_of,
    store_tile,
)
from tilewise.problem import Problem

_LINES: gl.constexpr = gl.constexpr(16)  # heads of keys whose programs start in turn


@gluon.jit
def ordered(number):
    """``number``, when all that this warp copied out of shared memory is in memory.

    ``tma.store_wait`` waits only until it is read. The fence orders what the copy engine does, and
    reads and writes of the integer that hands a tile on.
    """
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def place_in_turn(turns, tiles):
    """(tile, line) of a program that starts: of a line, which is a head of keys, tiles ascend."""
    program = gl.atomic_add(turns, 1, sem="relaxed", scope="gpu")
    return slot_of(program, tiles, _LINES, gl.num_programs(0) // tiles, False)


@gluon.jit
def rooms_for(sum_rows, KIND: gl.constexpr, FORM: gl.constexpr):
    """(dS, dQ, barriers) in shared memory: two sides of dS of both groups, and ROOMS of dQ."""
    HALF: gl.constexpr = FORM.BN // GROUPS
    ROOMS: gl.constexpr = FORM.ROOMS
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, FORM.BM], KIND)
    DQ_SHAPE: gl.constexpr = [ROOMS, 1, 1, FORM.BM, FORM.D]
    ds_s = gl.allocate_shared_memory(KIND, [2 * GROUPS, HALF, FORM.BM], DS_LAYOUT)
    dq_s = gl.allocate_shared_memory(gl.float32, DQ_SHAPE, sum_rows.layout)
    ds_full, ended = barriers(2, GROUPS), barriers(1, GROUPS)
    dq_full, dq_empty = barriers(ROOMS, GROUPS if FORM.SHARED else 1), barriers(ROOMS, 1)
    return ds_s, dq_s, (ds_full, dq_full, dq_empty, ended)


@gluon.jit
def add_queries(sums, shared, KEYS_OF: gl.constexpr, FORM: gl.constexpr):
    """Add what the groups leave of dQ to the sums, tile by tile, each in its turn."""
    sum_rows, turns, heads, captured = sums
    memory, bars, place, spans, lists, group = shared
    dq_s = memory[5]
    dq_full, dq_empty = bars[4][1:3]
    b, key_head, n0, M, N = place
    row_tiles = (M + FORM.BM - 1) // FORM.BM
    t = n0 * 0
    for member in range(group):
        h = key_head * group + member
        walk = counted(spans, lists, b, h, n0 // FORM.BN, FORM.BM)
        count = walk[1] + walk[2]
        added = count * 0 - 1
        for j in range(count):
            m0 = tile_down(j, spans, count, FORM.BM)
            low = range_of(b, m0, M, N, captured, KEYS_OF, FORM.BM, False)[0]
            before = n0 // FORM.BN - gl.maximum(low, 0) // FORM.BN  # programs that add
            turn = turns + (1 + (b * heads + h) * row_tiles + m0 // FORM.BM)
            here = t % FORM.ROOMS
            while added < before:
                added = gl.atomic_add(turn, 0, sem="acquire", scope="gpu")
            before = ordered(before)
            mbarrier.wait(dq_full.index(here), (t // FORM.ROOMS) & 1)
            if before == 0:  # the first one stores: nobody has to set the sums to zero
                async_store(sum_rows, [b, h, m0, 0], dq_s.index(here))
            else:
                async_atomic_add(sum_rows, [b, h, m0, 0], dq_s.index(here))
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(here), count=1)
            # While this tile is written, look at the turn of the next one. Else both latencies
            # follow one another, and at D = 64 take longer than a tile.
            added = before * 0 - 1
            if j + 1 < count:
                added = gl.atomic_add(turn - 1, 0, sem="acquire", scope="gpu")
            gl.atomic_add(turn, ordered(1), sem="release", scope="gpu")
            t += 1


@gluon.jit
def by_keys(c: gl.constexpr, t, memory, FORM: gl.constexpr):
    """DS . k of a tile of queries, of 64 columns: all, or those of group ``c``; under way."""
    k_s, ds_s = memory[0], memory[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    part = gl.full([FORM.BM, 64], 0.0, gl.float32, LAYOUT)
    for g in gl.static_range(GROUPS):
        ds = ds_s.index(t % 2 * GROUPS + g).permute((1, 0))
        k = k_s.index(here_only(g)).reshape([FORM.BN // GROUPS, FORM.D])
        if FORM.SHARED:
            k = k.slice(c * 64, 64, dim=1)
        part = warpgroup_mma(ds, k, part, use_acc=g > 0, is_async=True)
    return part


@gluon.jit
def leave(c: gl.constexpr, t, part, memory, bars, FORM: gl.constexpr):
    """Leave a part of dQ to the warp that adds it."""
    dq_full, dq_empty = bars[4][1:3]
    here = t % FORM.ROOMS
    room = memory[5].index(here).reshape([FORM.BM, FORM.D])
    if FORM.SHARED:
        room = room.slice(c * 64, 64, dim=1)
    mbarrier.wait(dq_empty.index(here), ((t // FORM.ROOMS) & 1) ^ 1)
    room.store(part)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(here), count=1)


@gluon.jit
def here_only(number):
    """The same number, of which the compiler knows nothing outside of the loop.

    It would move addresses of keys and values out of the loop, and spill them: at D = 128, 78 times
    in loops, and 43 times without dQ, where it is 0 so.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["heads", "queries", "tiles"])
def narrow_kernel(sums, turns, grad_q, strides, heads, queries, tiles, scale,
                  D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write dQ of a tile of queries: the sums, scaled; 0 where no program has added any."""
    program = tl.program_id(0)
    line, first = program // tiles, program % tiles * BLOCK
    b, h = line // heads, line % heads
    end = tl.where(tl.load(turns + 1 + program) > 0, queries, 0)
    head = head_of(sums, strides[0], b, h, 0)
    values = load_tile(head, first, strides[0], 0, end, BLOCK, D, D, True, False)
    head = head_of(grad_q, strides[1], b, h, 0)
    store_tile(head, first, strides[1], queries, values * scale, BLOCK, D, D)


class Sums(NamedTuple):
    """What the fused form needs for dQ.

    Args:
        sums: float32 [B, Hq, M, D], contiguous.
        turns: int32, 1 + a number for each tile of queries of each head; zeros when it starts.
    """

    sums: Tensor
    turns: Tensor


def sums_for(problem: Problem, like: Tensor, blocks: Blocks) -> Sums:
    """Return memory for the sums of dQ; ``like`` is a float32 tensor on their device."""
    lines = problem.batch * problem.heads
    sums = scratch(like, (problem.batch, problem.heads, problem.queries, problem.head_dim))
    count = 1 + lines * slots_of(problem, problem.queries, blocks.queries)
    return Sums(sums, scratch(like, (count,)).view(torch.int32))


def narrow_launch(problem: Problem, sums: Sums, grad_q: Tensor, blocks: Blocks) -> Launch:
    """Return the launch that makes dQ of its sums."""
    slots = slots_of(problem, problem.queries, blocks.queries)
    arguments = {
        **sums._asdict(),
        "grad_q": grad_q,
        "strides": (head_strides(sums.sums, problem), head_strides(grad_q, problem)),
        "heads": problem.heads,
        "queries": problem.queries,
        "tiles": slots,
        "scale": problem.scale,
    }
    constants = {"D": problem.head_dim, "BLOCK": blocks.queries}
    grid = (programs_of(problem, problem.heads, slots),)
    return launch_of(narrow_kernel, grid, arguments, constants, blocks._replace(warps=4, stages=1))
