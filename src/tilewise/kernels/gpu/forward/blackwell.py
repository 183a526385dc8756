"""The forward pass on Blackwell: ``groups.attend_in_groups`` with scores in tensor memory.

A group has 128 queries, a row for each thread. One warp issues the products of both groups in turn,
so that the matrix unit multiplies for one group while the other computes exponentials.

The matrix unit computes products in the order in which they are issued. So a group's scores of the
next tile need no barrier: they take the place of probabilities that the product before has read.

Sums in tensor memory are scaled only where the largest score of a row has grown by more than 2^8,
which is rare. Until then exponentials are relative to an older maximum, and at most 256.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.kernels.gpu.forward.online import scaled_scores, settled, store_numbers
from tilewise.kernels.gpu.walk.groups import (
    GROUPS,
    async_store,
    barriers,
    rows_layout,
    taken_as,
    tile_at,
)
from tilewise.kernels.gpu.walk.pairs import LOG2E, shown

_GROWN: gl.constexpr = gl.constexpr(8.0)  # in units of base 2: float16 holds probabilities of 2^8
_PIECE: gl.constexpr = gl.constexpr(32)  # columns of sums that a thread holds beside its scores


@gluon.jit
def places_of(KIND: gl.constexpr, FORM: gl.constexpr):
    """Return (scores, weights, sums) in tensor memory, and the barriers of a group's turns.

    Weights, which are probabilities before their division, lie in the first half of the scores.
    The barriers say that a group's scores are there, that its weights are, and its whole sums.
    """
    ROWS: gl.constexpr = FORM.BM // GROUPS
    scores = allocate_tensor_memory(
        gl.float32, [GROUPS, ROWS, FORM.BN], TensorMemoryLayout([ROWS, FORM.BN], 1)
    )
    out = allocate_tensor_memory(
        gl.float32, [GROUPS, ROWS, FORM.D], TensorMemoryLayout([ROWS, FORM.D], 1)
    )
    weights = taken_as(
        scores, KIND, [GROUPS, ROWS, 2 * FORM.BN], TensorMemoryLayout([ROWS, 2 * FORM.BN], 1)
    )
    return (scores, weights, out), (barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(GROUPS, 1))


@gluon.jit
def _score(c, place, memory, scores, FORM: gl.constexpr):
    q = memory[0].index(c).reshape([FORM.BM // GROUPS, FORM.D])
    k = memory[1].index(place).reshape([FORM.BN, FORM.D])
    tcgen05_mma(q, k.permute((1, 0)), scores.index(c), use_acc=False)


@gluon.jit
def _sum(c, j, memory, sums, FORM: gl.constexpr):
    _, weights, out = sums
    v = memory[2].index(j % FORM.STAGES).reshape([FORM.BN, FORM.D])
    p = weights.index(c).slice(0, FORM.BN)
    tcgen05_mma(p, v, out.index(c), use_acc=j > 0)


@gluon.jit
def multiply(memory, sums, bars, turns, walk, FORM: gl.constexpr):
    """Issue all products of a program; a commit arrives when all products before it are done."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    scored, weighed, summed = turns
    last = walk[1] + walk[2] - 1
    mbarrier.wait(k_full.index(0), 0)
    for c in gl.static_range(GROUPS):
        mbarrier.wait(q_full.index(c), 0)
        _score(c, 0, memory, sums[0], FORM)
        tcgen05_commit(scored.index(c))
    tcgen05_commit(k_empty.index(0))
    for j in range(last):
        here = j % FORM.STAGES
        after = (j + 1) % FORM.STAGES
        mbarrier.wait(v_full.index(here), (j // FORM.STAGES) & 1)
        mbarrier.wait(k_full.index(after), ((j + 1) // FORM.STAGES) & 1)
        for c in gl.static_range(GROUPS):
            mbarrier.wait(weighed.index(c), j & 1)
            _sum(c, j, memory, sums, FORM)
            _score(c, after, memory, sums[0], FORM)
            tcgen05_commit(scored.index(c))
        tcgen05_commit(v_empty.index(here))
        tcgen05_commit(k_empty.index(after))
    here = last % FORM.STAGES
    mbarrier.wait(v_full.index(here), (last // FORM.STAGES) & 1)
    for c in gl.static_range(GROUPS):
        mbarrier.wait(weighed.index(c), last & 1)
        _sum(c, last, memory, sums, FORM)
        tcgen05_commit(summed.index(c))


@gluon.jit
def _fade(out, fade, FORM: gl.constexpr):
    """Multiply the sums of a group by a number of each row."""
    LAYOUT: gl.constexpr = rows_layout(_PIECE)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(FORM.D // _PIECE):
        piece = out.slice(i * _PIECE, _PIECE)
        piece.store(piece.load(LAYOUT) * fade)


@gluon.jit
def _step(
    j, n0, state, fixed, KIND: gl.constexpr, SEEN: gl.constexpr, MASKED: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """(base, top, total) after the scores of tile ``j``, whose probabilities are in place.

    ``base`` is what a row's exponentials are relative to, and ``top`` its largest score.
    """
    base, top, total = state
    c, sums, turns, place, scale, captured = fixed
    scored, weighed, _ = turns
    b, h, m, M, N = place
    LAYOUT: gl.constexpr = top.type.layout.parent
    # The product of the tile before was issued before these scores: its sums are there too.
    mbarrier.wait(scored.index(c), j & 1)
    products = sums[0].index(c).load(LAYOUT)
    n = (n0 + gl.arange(0, FORM.BN, gl.SliceLayout(0, LAYOUT)))[None, :]
    scores = scaled_scores(products, scale, n, place, captured, None, FORM.FOLDED)
    if MASKED:
        visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN)
        scores = gl.where(visible, scores, float("-inf"))
    unit = LOG2E
    if FORM.FOLDED:
        unit = scale * LOG2E
    top = gl.maximum(top, gl.max(scores, 1))
    grown = (top - base) * unit > _GROWN
    new = gl.where(grown, top, base)
    # Where some pairs are hidden, a row may have seen nothing yet.
    shift = gl.where(new == float("-inf"), 0.0, new) if MASKED else new
    if (j > 0) & (gl.max(grown.to(gl.int32), 0) > 0):
        # 1 where the base stays: the other rows keep their bits.
        fade = gl.where(grown, gl.exp2((base - shift) * unit), 1.0)
        total = total * fade
        _fade(sums[2].index(c), fade, FORM)
    p = gl.exp2(scores * unit - (shift * unit)[:, None])
    total = total + gl.sum(p, 1)
    sums[1].index(c).slice(0, FORM.BN).store(p.to(KIND))
    mbarrier.arrive(weighed.index(c), count=1)
    return new, top, total


@gluon.jit
def attend_rows(c, own, sums, turns, SEEN: gl.constexpr, FORM: gl.constexpr):
    """Attention of the queries of group ``c``."""
    out_rows, outputs, memory, place, spans, walk, scale, per_head, captured = own
    b, h, _, line, m0, M, N = place
    sinks = per_head[0]
    ROWS: gl.constexpr = FORM.BM // GROUPS
    KIND: gl.constexpr = memory[1].dtype
    S_LAYOUT: gl.constexpr = rows_layout(FORM.BN)
    O_LAYOUT: gl.constexpr = rows_layout(FORM.D)
    m = m0 + c * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    fixed = c, sums, turns, (b, h, m[:, None], M, N), scale, captured
    base = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    state = (base, base, total)
    _, partial, whole, _ = walk
    for j in range(partial):
        n0 = tile_at(j, spans, walk, FORM.BN, FORM.LISTED)
        state = _step(j, n0, state, fixed, KIND, SEEN, True, FORM)
    for j in range(partial, partial + whole):
        n0 = tile_at(j, spans, walk, FORM.BN, FORM.LISTED)
        state = _step(j, n0, state, fixed, KIND, None, False, FORM)
    base, top, total = state

    unit = LOG2E
    if FORM.FOLDED:
        unit = scale * LOG2E
    # From here on sums are relative to the largest score, as every kernel leaves them.
    last = gl.where(top == float("-inf"), 1.0, gl.exp2((base - top) * unit))
    total = total * last
    sink = None if sinks is None else gl.load(sinks + h)
    weight, found = settled(top, total, sink, scale, 1.0, FORM.FOLDED, False)
    at = line.to(gl.int64) * M + m
    store_numbers(outputs, at, m < M, found, total)
    mbarrier.wait(turns[2].index(c), 0)
    out = sums[2].index(c).load(O_LAYOUT)
    out = out * gl.convert_layout(weight * last, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # The queries were multiplied for the last time: their memory takes the output.
    memory[0].index(c).reshape([ROWS, FORM.D]).store(out.to(KIND))
    fence_async_shared()
    async_store(out_rows, [b, h, m0 + c * ROWS, 0], memory[0].index(c))
    tma.store_wait(0)
