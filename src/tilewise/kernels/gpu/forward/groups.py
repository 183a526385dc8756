"""The forward pass on Hopper: one warp loads tiles, two groups of four warps share the queries.

A program owns 128 queries of one head, 64 for each group. A ring of tiles of keys and values lies
in shared memory. The loading warp fills a place of the ring as soon as both groups have released
it. A group multiplies queries with tile j while its product of probabilities and values of tile
j - 1 still runs, and the exponentials of tile j hide under that product. While one group computes
exponentials the other multiplies.

float8 has a form of its own (EIGHT): its values lie transposed, each tile of P V begins at 0, and
four probabilities are a word between two tiles.

The numbers are those of ``forward/online.py``: the same online softmax, in the same units.
"""

from __future__ import annotations

from typing import NamedTuple

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
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.expressions import captures
from tilewise.kernels.gpu.forward import Forward, blackwell
from tilewise.kernels.gpu.forward.online import scaled_scores, settled, store_numbers, weighed
from tilewise.kernels.gpu.walk.float8 import (
    LOWERED,
    RAISED,
    folded,
    keys_as_columns,
    scaled_for,
    transpose_values,
)
from tilewise.kernels.gpu.walk.groups import (
    GROUPS,
    async_store,
    barriers,
    counted,
    described_rows,
    fetch,
    in_groups,
    tile_at,
)
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    launch_of,
    lists_of,
    programs_of,
    range_of,
    slot_of,
    slots_of,
    split_range,
)
from tilewise.variants.float8 import FLOAT8


@gluon.jit
def _load(given, FORM: gl.constexpr):
    """Fill the rings; the tiles come in the order in which they are multiplied."""
    rows, memory, bars, place, spans, walk = given
    q_rows, k_rows, v_rows = rows
    q_s, k_s, v_s = memory[:3]
    q_full, k_full, k_empty, v_full, v_empty = bars
    b, h, key_head, m0 = place
    HALF: gl.constexpr = FORM.BM // GROUPS
    for c in gl.static_range(GROUPS):
        fetch(q_rows, (b, h, m0 + c * HALF, 0), q_full.index(c), q_s.index(c))
    for j in range(walk[1] + walk[2]):
        n0 = tile_at(j, spans, walk, FORM.BN, FORM.LISTED)
        place_of = j % FORM.STAGES
        free = ((j // FORM.STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(place_of), free)
        fetch(k_rows, (b, key_head, n0, 0), k_full.index(place_of), k_s.index(place_of))
        mbarrier.wait(v_empty.index(place_of), free)
        row, column = (n0 * 0, n0) if FORM.EIGHT else (n0, n0 * 0)
        fetch(v_rows, (b, key_head, row, column), v_full.index(place_of), v_s.index(place_of))


@gluon.jit
def _softmax(
    products, n0, top, total, place, scale, captured, SEEN: gl.constexpr, MASKED: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """(p, fade, top, total) after a tile of products, see ``online.weighed``."""
    b, h, m, M, N = place
    n = (n0 + gl.arange(0, FORM.BN, gl.SliceLayout(0, products.type.layout)))[None, :]
    scores = scaled_scores(products, scale, n, place, captured, None, FORM.FOLDED)
    if MASKED:
        visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN)
        scores = gl.where(visible, scores, float("-inf"))
    raised: gl.constexpr = RAISED if FORM.EIGHT else 0
    return weighed(scores, top, total, scale, MASKED, raised, FORM.FOLDED)


@gluon.jit
def _kept(weights, fade, out, KIND: gl.constexpr, FORM: gl.constexpr):
    """(out, kept): what a tile of probabilities leaves until they are multiplied by values.

    Of 8 bits a thread's operand is four neighbours of 16 keys, and a product leaves it two of
    eight. So keys change places by 16, in name only: ``float8.transpose_kernel`` lays out values
    likewise. Four are a word: as bytes they would be taken apart and packed anew between two tiles.
    """
    fade = gl.convert_layout(fade, gl.SliceLayout(1, out.type.layout))
    if FORM.EIGHT:
        p = weights.reshape([FORM.BM // GROUPS, FORM.BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        even, odd = gl.split(p)
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        words = gl.inline_asm_elementwise(
            "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high};}",
            "=r,f,f,f,f",
            [first, second, third, fourth],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        kept = (words, fade)
    else:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
        out = out * fade[:, None]
        kept = gl.convert_layout(weights.to(KIND), LAYOUT)
    return out, kept


@gluon.jit
def _times_values(kept, v_s, place, out, FORM: gl.constexpr):
    """The product of ``_kept`` and the values of a place, under way; 16 bits add to ``out``."""
    if FORM.EIGHT:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 4)
        words = gl.join(kept[0], kept[0])
        words = gl.join(words, words).reshape([FORM.BM // GROUPS, FORM.BN])
        # In this layout four registers that follow one another are the bytes of a word.
        words = gl.convert_layout(words, LAYOUT, assert_trivial=True)
        p = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
        )
        v = v_s.index(place).reshape([FORM.D, FORM.BN]).permute((1, 0))
        sums = warpgroup_mma(p, v, out, use_acc=False, is_async=True)
    else:
        v = v_s.index(place).reshape([FORM.BN, FORM.D])
        sums = warpgroup_mma(kept, v, out, is_async=True)
    return sums


@gluon.jit
def _added(out, kept, sums, FORM: gl.constexpr):
    """The output after a product of ``_times_values`` that has ended.

    Matrix units add products of 8 bits with few bits: each tile begins at 0, and is added here.
    """
    if FORM.EIGHT:
        sums = out * kept[1][:, None] + sums
    return sums


@gluon.jit
def _step(
    j, n0, state, fixed, SEEN: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """(out, top, total, kept) after the scores of tile ``j`` and the values of the tile before it.

    ``fixed`` is what all tiles of a group share.
    """
    out, top, total, kept = state
    q, memory, bars, place, scale, captured = fixed
    k_s, v_s = memory[1:3]
    _, k_full, k_empty, v_full, v_empty = bars
    S_LAYOUT: gl.constexpr = top.type.layout.parent
    here = j % FORM.STAGES
    before = (j - 1) % FORM.STAGES
    mbarrier.wait(k_full.index(here), (j // FORM.STAGES) & 1)
    k = k_s.index(here).reshape([FORM.BN, FORM.D])
    zeros = gl.full([FORM.BM // GROUPS, FORM.BN], 0.0, gl.float32, S_LAYOUT)
    products = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((j - 1) // FORM.STAGES) & 1)
    sums = _times_values(kept, v_s, before, out, FORM)
    products = warpgroup_mma_wait(1, deps=[products])
    mbarrier.arrive(k_empty.index(here), count=1)
    weights, fade, top, total = _softmax(
        products, n0, top, total, place, scale, captured, SEEN, MASKED, FORM
    )
    total = _after_exponentials(total)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(v_empty.index(before), count=1)
    out = _added(out, kept, sums, FORM)
    out, kept = _kept(weights, fade, out, v_s.dtype, FORM)
    return out, top, total, kept


@gluon.jit
def _after_exponentials(total):
    """The same numbers, behind a branch that depends on every exponential.

    ptxas moves the wait for the running product before the exponentials, and none of them is
    hidden. It moves nothing across a branch of single threads. A trap, a vote or a fence would make
    it run all products of the matrix units one after the other.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred q; setp.ge.f32 q, $1, 0f00000000; @q bra SKIP_${:uid}; nanosleep.u32 1; "
        "SKIP_${:uid}: mov.b32 $0, $1;}",
        "=f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _attend_rows(c, own, bars, SEEN: gl.constexpr, FORM: gl.constexpr):
    """Attention of the queries of group ``c``."""
    out_rows, outputs, memory, place, spans, walk, scale, per_head, captured = own
    q_s, k_s, v_s, out_s = memory
    q_full, k_full, k_empty, v_full, _ = bars
    b, h, key_line, line, m0, M, N = place
    sinks, q_scale, k_scale, v_scale = per_head
    lse, row_max, row_sum = outputs
    HALF: gl.constexpr = FORM.BM // GROUPS
    DEPTH: gl.constexpr = 32 if FORM.EIGHT else 16
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.BN, DEPTH])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FORM.D, DEPTH])
    m = m0 + c * HALF + gl.arange(0, HALF, gl.SliceLayout(1, S_LAYOUT))
    where = (b, h, m[:, None], M, N)
    _, partial, whole, _ = walk

    mbarrier.wait(q_full.index(c), 0)
    q = q_s.index(c).reshape([HALF, FORM.D])
    if FORM.FOLDED and (q_scale is not None or k_scale is not None):
        signed, scale = folded(q.load(O_LAYOUT), scale)
        q.store(signed)
        fence_async_shared()
    mbarrier.wait(k_full.index(0), 0)
    k = k_s.index(0).reshape([FORM.BN, FORM.D])
    zeros = gl.full([HALF, FORM.BN], 0.0, gl.float32, S_LAYOUT)
    products = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    mbarrier.arrive(k_empty.index(0), count=1)
    top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    first = tile_at(0, spans, walk, FORM.BN, FORM.LISTED)
    weights, fade, top, total = _softmax(
        products, first, top, total, where, scale, captured, SEEN, True, FORM
    )
    out = gl.full([HALF, FORM.D], 0.0, gl.float32, O_LAYOUT)
    out, kept = _kept(weights, fade, out, v_s.dtype, FORM)
    state = (out, top, total, kept)
    fixed = q, memory, bars, where, scale, captured
    for j in range(1, partial):
        n0 = tile_at(j, spans, walk, FORM.BN, FORM.LISTED)
        state = _step(j, n0, state, fixed, SEEN, True, FORM)
    for j in range(gl.maximum(partial, 1), partial + whole):
        n0 = tile_at(j, spans, walk, FORM.BN, FORM.LISTED)
        state = _step(j, n0, state, fixed, None, False, FORM)
    out, top, total, kept = state
    last = partial + whole - 1
    place_of = last % FORM.STAGES
    mbarrier.wait(v_full.index(place_of), (last // FORM.STAGES) & 1)
    sums = _times_values(kept, v_s, place_of, out, FORM)
    out = _added(out, kept, warpgroup_mma_wait(0, deps=[sums]), FORM)

    sink = None if sinks is None else gl.load(sinks + h)
    if FORM.EIGHT:
        total = total * LOWERED
    weight, found = settled(top, total, sink, scale, 1.0, FORM.FOLDED, False)
    if FORM.EIGHT:
        weight = weight * LOWERED
    if v_scale is not None:
        weight = gl.where(total == 0, 0.0, weight * gl.load(v_scale + key_line))
    out = out * gl.convert_layout(weight, gl.SliceLayout(1, O_LAYOUT))[:, None]
    at = line.to(gl.int64) * M + m
    store_numbers((lse, row_max, row_sum), at, m < M, found, total)
    out_s.index(c).reshape([HALF, FORM.D]).store(out.to(out_rows.dtype))
    fence_async_shared()
    async_store(out_rows, [b, h, m0 + c * HALF, 0], out_s.index(c))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def attend_in_groups(
    q_rows, k_rows, v_rows, out_rows, outputs, per_head, lists, captured, heads, group, queries,
    keys, tiles, section, lines, scale, SEEN: gl.constexpr, KEYS_OF: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Attention of BM queries of one head; arguments as ``attend.attend`` takes them.

    ``q_rows`` and so on are descriptors of tiles [1, 1, rows, D], of transposed values
    [1, 1, D, keys]; ``outputs`` are lse, row_max and row_sum.
    """
    ST: gl.constexpr = FORM.STAGES
    KIND: gl.constexpr = q_rows.dtype
    tile, line = slot_of(gl.program_id(0), tiles, section, lines, FORM.REVERSED)
    b = line // heads
    h = line % heads
    m0 = tile * FORM.BM
    low, full_low, full_high, high = range_of(
        b, m0, queries, keys, captured, KEYS_OF, FORM.BM, False
    )
    spans = split_range(low, full_low, full_high, high, keys, FORM.BN)
    listed, partial, whole, _ = counted(spans, lists, b, h, tile, FORM.BN)
    # Queries without keys take a tile beyond the last key: it loads as zeros, whatever hidden keys
    # hold, and all its pairs are hidden. No branch ends a group early.
    none = partial + whole == 0
    beyond = (keys + FORM.BN - 1) // FORM.BN * FORM.BN
    walk = (listed, gl.where(none, 1, partial), whole, gl.where(none, beyond, 0))

    q_s = gl.allocate_shared_memory(KIND, [GROUPS, 1, 1, FORM.BM // GROUPS, FORM.D], q_rows.layout)
    k_s = gl.allocate_shared_memory(KIND, [ST, 1, 1, FORM.BN, FORM.D], k_rows.layout)
    V_ROWS: gl.constexpr = FORM.D if FORM.EIGHT else FORM.BN
    V_COLUMNS: gl.constexpr = FORM.BN if FORM.EIGHT else FORM.D
    v_s = gl.allocate_shared_memory(KIND, [ST, 1, 1, V_ROWS, V_COLUMNS], v_rows.layout)
    out_s = q_s  # queries are multiplied for the last time before the output is there
    if FORM.EIGHT:
        OUT: gl.constexpr = out_rows.dtype
        OUT_SHAPE: gl.constexpr = [GROUPS, 1, 1, FORM.BM // GROUPS, FORM.D]
        out_s = gl.allocate_shared_memory(OUT, OUT_SHAPE, out_rows.layout)
    RELEASES: gl.constexpr = 1 if FORM.TENSOR_MEMORY else GROUPS
    q_full = barriers(GROUPS, 1)
    k_full, v_full = barriers(ST, 1), barriers(ST, 1)
    k_empty, v_empty = barriers(ST, RELEASES), barriers(ST, RELEASES)
    memory = (q_s, k_s, v_s, out_s)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    scale = scaled_for(scale, per_head[1], per_head[2], b, h, heads, group)
    place = (b, h, b * (heads // group) + h // group, line, m0, queries, keys)
    own = (out_rows, outputs, memory, place, spans, walk, scale, per_head, captured)
    given = (q_rows, k_rows, v_rows), memory, bars, (b, h, h // group, m0), spans, walk
    if FORM.TENSOR_MEMORY:
        sums, turns = blackwell.places_of(KIND, FORM)
        fence_async_shared()
        gl.warp_specialize(
            [
                (blackwell.attend_rows, (0, own, sums, turns, SEEN, FORM)),
                (blackwell.attend_rows, (1, own, sums, turns, SEEN, FORM)),
                (blackwell.multiply, (memory, sums, bars, turns, walk, FORM)),
                (_load, (given, FORM)),
            ],
            [4, 1, 1],
            [208, 24, 24],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_attend_rows, (0, own, bars, SEEN, FORM)),
                (_attend_rows, (1, own, bars, SEEN, FORM)),
                (_load, (given, FORM)),
            ],
            [4, 1],
            [240, 24],
        )


class Form(NamedTuple):
    """The constants of ``attend_in_groups``: what ``walk.forms.Form`` has too is as there.

    Args:
        STAGES: tiles in a ring of shared memory.
        LISTED: tiles are listed, see ``walk.lists``.
        TENSOR_MEMORY: scores and sums lie in tensor memory, see ``forward.blackwell``.
        EIGHT: operands are float8, and values transposed, see ``walk.float8``.
    """

    D: int
    BM: int
    BN: int
    STAGES: int
    FOLDED: bool
    REVERSED: bool
    LISTED: bool
    TENSOR_MEMORY: bool
    EIGHT: bool


def attend_launch(
    call: Forward, blocks: Blocks, section: int, grows: bool, tensor_memory: bool
) -> list[Launch]:
    """Return the launches of the forward pass; none where a tensor can have no descriptor.

    Args:
        call: the pass.
        blocks: of ``Config.in_groups``.
        section: lines of a section of the grid, see ``tiles.slot_of``.
        grows: whether the last tiles have the most keys.
        tensor_memory: whether the chip has it, and no wgmma.
    """
    problem, operands, result, _, variant = call
    half, width, eight = blocks.queries // GROUPS.value, problem.head_dim, problem.dtype is FLOAT8
    before: list[Launch] = []
    values = operands.v, blocks.keys, width
    if eight:
        turned, before = transpose_values(problem, operands, blocks, by_threads=True)
        values = keys_as_columns(turned.v, problem), width, blocks.keys
    tiles = (
        ("q_rows", operands.q, half, width),
        ("k_rows", operands.k, blocks.keys, width),
        ("v_rows", *values),
        ("out_rows", result.out, half, width),
    )
    rows = described_rows(tiles, problem)
    if rows is None:
        return []
    slots = slots_of(problem, problem.queries, blocks.queries)
    lists = tile_lists(problem, operands, variant.tables, blocks.queries, blocks.keys)
    # Scales of q and k belong to the exponent too: ``folded`` makes them positive.
    in_exponent = call.is_scaled() or call.folds()
    arguments = {
        **rows,
        "outputs": (result.lse, result.stats[0], result.stats[1]),
        "per_head": (operands.sinks, *call.head_scales()),
        "lists": lists_of(lists),
        "captured": tuple(captures(operands.mask_tensors)),
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": slots,
        "section": section,
        "lines": problem.heads * problem.batch,
        "scale": problem.scale,
    }
    sizes = (problem.head_dim, blocks.queries, blocks.keys, blocks.stages)
    constants = {
        "SEEN": variant.seen,
        "KEYS_OF": variant.keys_of,
        "FORM": Form(*sizes, in_exponent, grows, lists is not None, tensor_memory, eight),
    }
    grid = (programs_of(problem, problem.heads, slots),)
    return [*before, in_groups(launch_of(attend_in_groups, grid, arguments, constants))]
