"""Compute the numbers per row that the backward walks read, and the sinks' gradient.

The forward pass gives a row's largest score and sum; grad_out, out and the gradients of lse and
entropy come in. From these, a pair's probability and gradient take no more than five numbers per
row. A sixth is the sum of the gradients of all the row's scores. Without a sink, it is the gradient
of lse.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.backward import Backward, folds
from tilewise.kernels.gpu.config import Blocks, padded
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.pairs import LN2, LOG2E
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    head_strides,
    launch_of,
    line_place,
    load_tile,
    number_strides,
    programs_of,
    slots_of,
)

# The power of two of an exponent below this is 0: see ``far`` of reference/tiles.py.
FAR: tl.constexpr = tl.constexpr(-2000.0)
_BLOCK, _SMALL_BLOCK = 64, 16
_CHUNK = 64  # columns of rows that are multiplied at once
_HELD = 64 * 128  # elements of a tile that four warps hold twice
_WIDEST = 256  # of values of which a program's registers hold so many rows of two tensors
_SHARES = 256


@triton.jit(do_not_specialize=["plane", "batch", "heads", "queries", "tiles"])
def row_kernel(
    out, grad_out, stats, grad_lse, grad_entropy, sinks, cu_q, rows, shares, turns, strides, plane,
    batch, heads, queries, tiles, DV: tl.constexpr, DV_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, FOLD: tl.constexpr, DUE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what all walks read per row (see ``row_values``), and each tile's sinks' gradient.

    FOLD: the row sum goes into the base as its logarithm. DUE: the plane of what the gradients of
    a row's scores add up to, 0 for none. ``strides`` are those of out, grad_out, grad_lse,
    grad_entropy and of numbers per row. ``turns``: those of ``fused.py``, or None.
    """
    out_strides, grad_out_strides, lse_strides, entropy_strides, row_strides = strides
    program = tl.program_id(0)
    tile, line = program % tiles, program // tiles
    b, h, begin, _, M, _, first = line_place(
        tile, line, (cu_q, None, None), batch, heads, queries, queries, BLOCK, False
    )
    m = first + tl.arange(0, BLOCK)
    inside = m < M
    if turns is not None:
        tl.store(turns + 1 + program, 0)
        tl.store(turns, 0, mask=program == 0)
    o_head = head_of(out, out_strides, b, h, begin)
    g_head = head_of(grad_out, grad_out_strides, b, h, begin)
    if FOLD:
        o = load_tile(o_head, first, out_strides, 0, M, BLOCK, DV, DV_PADDED, True, True)
        g = load_tile(g_head, first, grad_out_strides, 0, M, BLOCK, DV, DV_PADDED, True, True)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    else:
        # Summed as the walks sum grad_out . v: where a row has one key the two then cancel.
        all_pairs = tl.zeros([BLOCK, BLOCK], tl.float32)
        for c in tl.static_range(0, DV_PADDED, CHUNK):
            head = o_head + tl.cast(out_strides[3], tl.int64) * c
            o = load_tile(head, first, out_strides, 0, M, BLOCK, DV - c, CHUNK, True, True)
            head = g_head + tl.cast(grad_out_strides[3], tl.int64) * c
            g = load_tile(head, first, grad_out_strides, 0, M, BLOCK, DV - c, CHUNK, True, True)
            all_pairs = tl.dot(g, tl.trans(o), all_pairs, input_precision=PRECISION)
        i = tl.arange(0, BLOCK)
        delta = tl.sum(tl.where(i[:, None] == i[None, :], all_pairs, 0.0), 1)
    by_lse = tl.zeros([BLOCK], tl.float32)
    if grad_lse is not None:
        places = head_of(grad_lse, lse_strides, b, h, begin)
        places = places + m.to(tl.int64) * lse_strides[2]
        by_lse = tl.load(places, mask=inside, other=0.0).to(tl.float32)

    at = head_of(stats, row_strides, b, h, begin) + m
    top = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + plane, mask=inside, other=0.0)
    highest = top
    if sinks is not None:
        sink = tl.load(sinks + h) * LOG2E
        highest = tl.maximum(top, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.exp2(top - highest) * total
    if sinks is not None:
        share = tl.exp2(sink - highest)
        whole = whole + share
        share = tl.where(whole == 0.0, 0.0, share / tl.where(whole == 0.0, 1.0, whole))
    dead = total == 0.0
    some = tl.where(dead, 1.0, whole)

    place = head_of(rows, row_strides, b, h, begin) + m
    tl.store(place + plane, delta - by_lse, mask=inside)
    if FOLD:
        base = highest + tl.log2(some)
    else:
        base = top
        tl.store(place + 2 * plane, tl.exp2(top - highest) / some, mask=inside)
    tl.store(place, tl.where(dead, float("inf"), base), mask=inside)
    if grad_entropy is not None:
        places = head_of(grad_entropy, entropy_strides, b, h, begin)
        places = places + m.to(tl.int64) * entropy_strides[2]
        slope = tl.load(places, mask=inside, other=0.0).to(tl.float32) * LN2
        slope = tl.where(dead, 0.0, slope)
        mean = tl.load(at + 2 * plane, mask=inside, other=0.0)
        above = tl.log2(some) if FOLD else tl.maximum(top - highest, FAR)
        tl.store(place + 3 * plane, slope, mask=inside)
        tl.store(place + 4 * plane, tl.where(dead, 0.0, above - mean), mask=inside)
    due = by_lse
    if sinks is not None:
        by_sink = by_lse - delta
        if grad_entropy is not None:
            by_sink = by_sink - slope * (tl.maximum(sink - highest, FAR) - mean)
        by_sink = share * by_sink
        due = due - by_sink
    if DUE > 0:
        tl.store(place + DUE * plane, due, mask=inside)
    if shares is not None:
        total_share = tl.sum(tl.where(inside, by_sink, 0.0), 0)
        if cu_q is None:
            tl.store(shares + (h.to(tl.int64) * batch + b) * tiles + tile, total_share)
        else:
            tl.store(shares + h.to(tl.int64) * tiles + tile, total_share)


@triton.jit(do_not_specialize=["count"])
def sink_kernel(shares, grad_sinks, count, BLOCK: tl.constexpr):
    """The gradient of one head's sink: the sum of its shares, in their order."""
    h = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        share = tl.load(shares + h.to(tl.int64) * count + i, mask=i < count, other=0.0)
        total += share.to(tl.float64)
    tl.store(grad_sinks + h, tl.sum(total, 0).to(grad_sinks.dtype.element_ty))


@triton.jit
def row_values(rows, plane, m, M, FOLD: tl.constexpr, ENTROPY: tl.constexpr):
    """(base, shift, weight, slope, center) of rows ``m``, shaped as it is; those beyond M are dead.

    ``exp2(s2 - base) * weight`` is p: the base is infinite in a dead row. FOLD has no weight, and
    only ENTROPY has slope and center.
    """
    inside = m < M
    places = rows + m
    base = tl.load(places, mask=inside, other=float("inf"))
    shift = tl.load(places + plane, mask=inside, other=0.0)
    weight = base
    slope = base
    center = base
    if not FOLD:
        weight = tl.load(places + 2 * plane, mask=inside, other=0.0)
    if ENTROPY:
        slope = tl.load(places + 3 * plane, mask=inside, other=0.0)
        center = tl.load(places + 4 * plane, mask=inside, other=0.0)
    return base, shift, weight, slope, center


def row_launches(
    call: Backward, grad_sinks: Tensor | None, turns: Tensor | None = None
) -> list[Launch]:
    """Return the launches that make the values of each row and, where wanted, the sinks' gradient.

    Args:
        call: the pass, with the memory of these values.
        grad_sinks: where the gradient of the sinks goes, or None.
        turns: of ``fused.Sums``, to be set to zero.
    """
    problem, operands, result, upstream = call[:4]
    rows, due = call.rows, call.due_plane
    _, by_lse, by_entropy = upstream
    stats = result.stats.contiguous()
    width = padded(problem.value_dim)
    block = _BLOCK if folds(problem) and width <= _WIDEST else _SMALL_BLOCK
    slots = slots_of(problem, problem.queries, block)
    count = slots * (problem.batch if problem.layout == "dense" else 1)
    shares = None if grad_sinks is None else scratch(rows, (problem.heads, count))
    arguments = {
        "out": result.out,
        "grad_out": upstream.out,
        "stats": stats,
        "grad_lse": by_lse,
        "grad_entropy": by_entropy,
        "sinks": operands.sinks,
        "cu_q": operands.cu_seqlens_q,
        "rows": rows,
        "shares": shares,
        "turns": turns,
        "strides": (
            head_strides(result.out, problem),
            head_strides(upstream.out, problem),
            None if by_lse is None else number_strides(by_lse, problem),
            None if by_entropy is None else number_strides(by_entropy, problem),
            number_strides(rows[0], problem),
        ),
        "plane": rows[0].numel(),
        "batch": problem.batch,
        "heads": problem.heads,
        "queries": problem.queries,
        "tiles": slots,
    }
    constants = {
        "DV": problem.value_dim,
        "DV_PADDED": width,
        "BLOCK": block,
        "CHUNK": min(_CHUNK, width),
        "FOLD": folds(problem),
        "DUE": due if due < rows.shape[0] else 0,
        "PRECISION": call.config.precision,
    }
    grid = (programs_of(problem, problem.heads, slots),)
    warps = 8 if block * width > _HELD else 4
    launches = [launch_of(row_kernel, grid, arguments, constants, Blocks(block, block, warps, 1))]
    if shares is not None:
        summed = {"shares": shares, "grad_sinks": grad_sinks, "count": count}
        launches.append(launch_of(sink_kernel, (problem.heads,), summed, {"BLOCK": _SHARES}))
    return launches
