"""The backward pass in Triton: values of each row, then dQ by query tiles and dK, dV by key tiles.

Both walks recompute the scores of a tile from q and k. With ``t = s2 - row_max`` in base-2 units

    p  = exp2(t) / row_sum                      the sink is in the sum
    dp = (grad_out . v) * keep / (1 - dropout_p)
    ds = p * (dp - shift - slope * (t + center)) * gain
    shift = rowsum(grad_out * out) - grad_lse,    slope = ln(2) * grad_entropy

so that dq = scale * ds . k, dk = scale * ds^T . q, dv = (p * keep)^T . grad_out / (1 - dropout_p).
Every sum has a fixed order and one owner. A program owns a tile of queries of one head, or a tile
of keys of one key head, and walks its group of query heads. So the gradients are the same bits in
every run, and nothing is added atomically.

The key tiles are computed transposed, ``[keys, queries]``, so P and dS enter their products as they
were computed.

If the form has a PART, the operands are too wide for the registers. The products that make scores
are then summed over PART columns at a time. A tile is loaded whole when it enters a gradient.

Absent rows and keys do not affect the result. Rows beyond a sequence, and keys outside the range
that the mask allows a tile, are loaded as 0. The dS of a hidden pair is selected to be 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu.backward.captured import captured_launches
from tilewise.kernels.gpu.backward.gradients import COUNTS, Backward, numbers_of, pair_gradients
from tilewise.kernels.gpu.backward.rows import Upstream, planes_of, row_launches, row_values
from tilewise.kernels.gpu.config import Config
from tilewise.kernels.gpu.expressions.variant import Variant
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.kernels.gpu.walk.parts import held, product_of, rows_of
from tilewise.kernels.gpu.walk.tiles import (
    counts_in,
    head_of,
    head_strides,
    launch_of,
    line_place,
    list_of,
    programs_of,
    range_of,
    slots_of,
    split_range,
    store_tile,
    tile_in,
)
from tilewise.problem import Grads, Needs, Operands, Problem, Result


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    call,
    grad_q,
    grad_q_strides,
    lists,
    batch,
    heads,
    group,
    queries,
    keys,
    tiles,
    plane,
    threshold,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    KEYS_OF: tl.constexpr,
    BLIND: tl.constexpr,
    SKIPS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Gradient of one tile of queries of one head, over the keys that the mask leaves it."""
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    HEAD_DIM: tl.constexpr = FORM.HEAD_DIM
    HEAD_PADDED: tl.constexpr = FORM.HEAD_PADDED
    VALUE_DIM: tl.constexpr = FORM.VALUE_DIM
    VALUE_PADDED: tl.constexpr = FORM.VALUE_PADDED
    q, k, v, grad_out, rows = call.inputs
    q_strides, k_strides, v_strides, grad_out_strides, row_strides = call.strides
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # under a causal mask the last tiles have the most to do
    b, h, begin, begin_k, M, N, m0 = line_place(
        tile, program // tiles, call.starts, batch, heads, queries, keys, BLOCK_M, False
    )
    if m0 >= M:
        return
    low, full_low, full_high, high = range_of(b, m0, M, N, call.captured, KEYS_OF, BLOCK_M, False)
    if BLIND:
        full_high = 0
    spans = split_range(low, full_low, full_high, high, N, BLOCK_N)
    if lists[0] is None:
        whole_tiles, partial = counts_in(spans, BLOCK_N)
    else:
        tile = m0 // BLOCK_M
        listed, whole_tiles, partial = list_of(lists, b, h, tile)

    q_rows = (head_of(q, q_strides, b, h, begin), q_strides, m0, 0, M)
    grad_rows = (head_of(grad_out, grad_out_strides, b, h, begin), grad_out_strides, m0, 0, M)
    q_tile = held(q_rows, BLOCK_M, HEAD_DIM, HEAD_PADDED, True, FORM)
    grad_tile = held(grad_rows, BLOCK_M, VALUE_DIM, VALUE_PADDED, True, FORM)
    k_head = head_of(k, k_strides, b, h // group, begin_k)
    v_head = head_of(v, v_strides, b, h // group, begin_k)
    m = m0 + tl.arange(0, BLOCK_M)[:, None]
    row = row_values(head_of(rows, row_strides, b, h, begin), plane, m, M, FORM.FOLD, FORM.ENTROPY)
    numbers = numbers_of(call, threshold)
    total = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    # The tiles that need no mask first; there are none where nothing is known of a mask.
    for MASKED in tl.static_range(BLIND, 2):
        for i in range(partial if MASKED else whole_tiles):
            if lists[0] is None:
                n0 = tile_in(i, spans, BLOCK_N, MASKED)
            else:
                n0 = tl.load(listed + i + (whole_tiles if MASKED else 0)) * BLOCK_N
            n = n0 + tl.arange(0, BLOCK_N)[None, :]
            visible = None
            wanted = True
            if MASKED:
                visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
                if SKIPS:
                    wanted = tl.max(visible.to(tl.int32)) > 0
            if wanted:
                k_rows = (k_head, k_strides, n0, low, high)
                v_rows = (v_head, v_strides, n0, low, high)
                k_tile = held(k_rows, BLOCK_N, HEAD_DIM, HEAD_PADDED, MASKED, FORM)
                v_tile = held(v_rows, BLOCK_N, VALUE_DIM, VALUE_PADDED, MASKED, FORM)
                products = product_of(q_tile, k_tile, BLOCK_M, BLOCK_N, HEAD_DIM, FORM)
                by_value = product_of(grad_tile, v_tile, BLOCK_M, BLOCK_N, VALUE_DIM, FORM)
                _, ds = pair_gradients(
                    call,
                    (products, by_value),
                    row,
                    numbers,
                    (b, h, m, n, M, N),
                    visible,
                    SCORE,
                    GAIN,
                    MASKED,
                    FORM,
                )
                if FORM.PART > 0:
                    k_tile = rows_of(k_rows, BLOCK_N, HEAD_DIM, HEAD_PADDED, MASKED, FORM.WIDE)
                total = tl.dot(ds.to(k_tile.dtype), k_tile, total, input_precision=FORM.PRECISION)
    head = head_of(grad_q, grad_q_strides, b, h, begin)
    store_tile(head, m0, grad_q_strides, M, total * numbers[0], BLOCK_M, HEAD_DIM, HEAD_PADDED)


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    call,
    grads,
    grad_strides,
    lists,
    batch,
    heads,
    group,
    queries,
    keys,
    tiles,
    plane,
    threshold,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    QUERIES_OF: tl.constexpr,
    BLIND: tl.constexpr,
    SKIPS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Gradients of one tile of keys and values of one key head, over its group's queries.

    ``grads`` are those of keys and values, of which one may be None. Blocks of pairs are
    [keys, queries].
    """
    BLOCK_M: tl.constexpr = FORM.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    HEAD_DIM: tl.constexpr = FORM.HEAD_DIM
    HEAD_PADDED: tl.constexpr = FORM.HEAD_PADDED
    VALUE_DIM: tl.constexpr = FORM.VALUE_DIM
    VALUE_PADDED: tl.constexpr = FORM.VALUE_PADDED
    q, k, v, grad_out, rows = call.inputs
    q_strides, k_strides, v_strides, grad_out_strides, row_strides = call.strides
    grad_k, grad_v = grads
    grad_k_strides, grad_v_strides = grad_strides
    program = tl.program_id(0)
    tile = program % tiles
    b, key_head, begin, begin_k, M, N, n0 = line_place(
        tile, program // tiles, call.starts, batch, heads // group, queries, keys, BLOCK_N, True
    )
    if n0 >= N:
        return
    low, full_low, full_high, high = range_of(b, n0, M, N, call.captured, QUERIES_OF, BLOCK_N, True)
    if BLIND:
        full_high = 0
    spans = split_range(low, full_low, full_high, high, M, BLOCK_M)
    if lists[0] is None:
        whole_tiles, partial = counts_in(spans, BLOCK_M)

    k_rows = (head_of(k, k_strides, b, key_head, begin_k), k_strides, n0, 0, N)
    v_rows = (head_of(v, v_strides, b, key_head, begin_k), v_strides, n0, 0, N)
    k_tile = held(k_rows, BLOCK_N, HEAD_DIM, HEAD_PADDED, True, FORM)
    v_tile = held(v_rows, BLOCK_N, VALUE_DIM, VALUE_PADDED, True, FORM)
    n = n0 + tl.arange(0, BLOCK_N)[:, None]
    numbers = numbers_of(call, threshold)
    total_k = tl.zeros([BLOCK_N, HEAD_PADDED], tl.float32)
    total_v = tl.zeros([BLOCK_N, VALUE_PADDED], tl.float32)
    for member in range(group):
        h = key_head * group + member
        q_head = head_of(q, q_strides, b, h, begin)
        grad_head = head_of(grad_out, grad_out_strides, b, h, begin)
        row_head = head_of(rows, row_strides, b, h, begin)
        if lists[0] is not None:
            tile = n0 // BLOCK_N
            listed, whole_tiles, partial = list_of(lists, b, h, tile)
        for MASKED in tl.static_range(BLIND, 2):
            for i in range(partial if MASKED else whole_tiles):
                if lists[0] is None:
                    m0 = tile_in(i, spans, BLOCK_M, MASKED)
                else:
                    m0 = tl.load(listed + i + (whole_tiles if MASKED else 0)) * BLOCK_M
                m = m0 + tl.arange(0, BLOCK_M)[None, :]
                visible = None
                wanted = True
                if MASKED:
                    visible = shown(b, h, m, n, M, N, call.captured[0], call.captured[1], SEEN)
                    if SKIPS:
                        wanted = tl.max(visible.to(tl.int32)) > 0
                if wanted:
                    q_rows = (q_head, q_strides, m0, low, high)
                    grad_rows = (grad_head, grad_out_strides, m0, low, high)
                    q_tile = held(q_rows, BLOCK_M, HEAD_DIM, HEAD_PADDED, MASKED, FORM)
                    grad_tile = held(grad_rows, BLOCK_M, VALUE_DIM, VALUE_PADDED, MASKED, FORM)
                    row = row_values(row_head, plane, m, M, FORM.FOLD, FORM.ENTROPY)
                    products = product_of(k_tile, q_tile, BLOCK_N, BLOCK_M, HEAD_DIM, FORM)
                    by_value = product_of(v_tile, grad_tile, BLOCK_N, BLOCK_M, VALUE_DIM, FORM)
                    p, ds = pair_gradients(
                        call,
                        (products, by_value),
                        row,
                        numbers,
                        (b, h, m, n, M, N),
                        visible,
                        SCORE,
                        GAIN,
                        MASKED,
                        FORM,
                    )
                    if grad_v is not None:
                        if FORM.PART > 0:
                            grad_tile = rows_of(
                                grad_rows, BLOCK_M, VALUE_DIM, VALUE_PADDED, MASKED, FORM.WIDE
                            )
                        p = p.to(grad_tile.dtype)
                        total_v = tl.dot(p, grad_tile, total_v, input_precision=FORM.PRECISION)
                    if grad_k is not None:
                        if FORM.PART > 0:
                            q_tile = rows_of(
                                q_rows, BLOCK_M, HEAD_DIM, HEAD_PADDED, MASKED, FORM.WIDE
                            )
                        ds = ds.to(q_tile.dtype)
                        total_k = tl.dot(ds, q_tile, total_k, input_precision=FORM.PRECISION)
    if grad_k is not None:
        head = head_of(grad_k, grad_k_strides, b, key_head, begin_k)
        store_tile(
            head, n0, grad_k_strides, N, total_k * numbers[0], BLOCK_N, HEAD_DIM, HEAD_PADDED
        )
    if grad_v is not None:
        if FORM.DROPOUT:
            total_v = total_v * numbers[1]
        head = head_of(grad_v, grad_v_strides, b, key_head, begin_k)
        store_tile(head, n0, grad_v_strides, N, total_v, BLOCK_N, VALUE_DIM, VALUE_PADDED)


def backward_launches(
    problem: Problem,
    operands: Operands,
    result: Result,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    needs: Needs,
    grad_entropy: Tensor | None,
    grads: Grads,
    config: Config,
    variant: Variant,
) -> list[Launch]:
    """Return the launches of a backward pass, for tensors on any device; no value is read.

    Args:
        problem: what was computed.
        operands: with what.
        result: what the forward pass gave for them.
        grad_out: shaped as ``result.out``, any strides.
        grad_lse: shaped as ``result.lse``, any strides, or None for zero.
        needs: which gradients are wanted.
        grad_entropy: shaped as ``result.entropy``, any strides, or None for zero.
        grads: where the wanted ones go; every element is written.
        config: tiles and precision.
        variant: the functions of mask and score.
    """
    upstream = Upstream(grad_out, grad_lse, grad_entropy)
    planes = planes_of(upstream, any(needs.score_tensors))
    rows = result.lse.new_empty((planes, *result.lse.shape))
    grad_sinks = grads.sinks if needs.sinks else None
    launches = row_launches(problem, operands, result, upstream, grad_sinks, rows, config)
    call = Backward(problem, operands, upstream, config, variant, rows)
    if needs.k or needs.v:
        wanted = (grads.k if needs.k else None, grads.v if needs.v else None)
        launches.append(_key_launch(call, wanted))
    if needs.q and grads.q is not None:
        launches.append(_query_launch(call, grads.q))
    if any(needs.score_tensors):
        launches += captured_launches(call, needs.score_tensors, grads.score_tensors)
    return launches


def _key_launch(call: Backward, grads: tuple[Tensor | None, Tensor | None]) -> Launch:
    problem = call.problem
    arguments, constants, blocks = call.walk(
        "dkdv",
        grads=grads,
        grad_strides=tuple(
            [None if grad is None else head_strides(grad, problem) for grad in grads]
        ),
    )
    slots = slots_of(problem, problem.keys, blocks.keys)
    grid = (programs_of(problem, problem.kv_heads, slots),)
    constants["QUERIES_OF"] = call.variant.queries_of
    return launch_of(key_kernel, grid, arguments | {"tiles": slots}, constants, blocks)


def _query_launch(call: Backward, grad_q: Tensor) -> Launch:
    problem = call.problem
    strides = head_strides(grad_q, problem)
    arguments, constants, blocks = call.walk("dq", grad_q=grad_q, grad_q_strides=strides)
    slots = slots_of(problem, problem.queries, blocks.queries)
    grid = (programs_of(problem, problem.heads, slots),)
    constants["KEYS_OF"] = call.variant.keys_of
    return launch_of(query_kernel, grid, arguments | {"tiles": slots}, constants, blocks)
