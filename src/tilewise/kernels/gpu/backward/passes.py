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

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.backward import Backward
from tilewise.kernels.gpu.backward.captured import captured_launches
from tilewise.kernels.gpu.backward.gradients import (
    heads_at,
    key_side,
    key_step,
    keys_of_head,
    numbers_of,
    query_side,
    query_step,
    store_sums,
)
from tilewise.kernels.gpu.backward.rows import row_launches
from tilewise.kernels.gpu.walk.descriptors import page_rows
from tilewise.kernels.gpu.walk.tiles import (
    COUNTS,
    described_pages,
    head_of,
    head_strides,
    launch_of,
    line_place,
    programs_of,
    range_of,
    slots_of,
    split_range,
    store_tile,
    walked,
    walks_of,
)
from tilewise.problem import Grads


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    call, grad_q, grad_q_strides, k_rows, v_rows, lists, batch, heads, group, queries, keys, tiles,
    plane, threshold, SCORE: tl.constexpr, GAIN: tl.constexpr, SEEN: tl.constexpr,
    KEYS_OF: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries of one head, over the keys that the mask leaves it.

    ``k_rows`` and ``v_rows`` are those of ``page_rows``.
    """
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # under a causal mask the last tiles have the most to do
    b, h, begin, begin_k, M, N, m0 = line_place(
        tile, program // tiles, call.starts, batch, heads, queries, keys, FORM.BM, False
    )
    if m0 >= M:
        return
    low, full_low, full_high, high = range_of(b, m0, M, N, call.captured, KEYS_OF, FORM.BM, False)
    if FORM.BLIND:
        full_high = 0
    spans = split_range(low, full_low, full_high, high, N, FORM.BN)
    walks = walks_of(spans, lists, b, h, m0 // FORM.BM, FORM.BN)
    own = query_side(call, plane, (b, h, begin, begin_k, M, N), m0, FORM)
    k_head, k_strides, pages = keys_of_head(call, 1, b, h // group, begin_k, FORM)
    v_head, v_strides, pages = keys_of_head(call, 2, b, h // group, begin_k, FORM)
    m = m0 + tl.arange(0, FORM.BM)[:, None]
    numbers = numbers_of(call, threshold)
    total = tl.full([FORM.BM, FORM.D_PADDED], 0.0, tl.float32)
    k_side = (k_head, k_strides, described_pages(pages, k_rows, h // group))
    v_side = (v_head, v_strides, described_pages(pages, v_rows, h // group))
    fixed = own, (k_side, v_side, low, high), (b, h, m, M, N), own[2], numbers
    total = walked(
        call, total, fixed, walks, m, (b, h, M, N), query_step, SCORE, GAIN, SEEN, FORM.BN, False,
        FORM,
    )  # fmt: skip
    head = head_of(grad_q, grad_q_strides, b, h, begin)
    total = total * numbers[0]
    store_tile(head, m0, grad_q_strides, M, total, FORM.BM, FORM.D, FORM.D_PADDED)


@triton.jit(do_not_specialize=COUNTS)
def key_kernel(
    call, grads, grad_strides, lists, batch, heads, group, queries, keys, tiles, plane, threshold,
    SCORE: tl.constexpr, GAIN: tl.constexpr, SEEN: tl.constexpr, QUERIES_OF: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys and values of one key head, over its group's queries.

    ``grads`` are those of keys and values, of which one may be None. Blocks of pairs are
    [keys, queries].
    """
    program = tl.program_id(0)
    tile = program % tiles
    b, key_head, begin, begin_k, M, N, n0 = line_place(
        tile, program // tiles, call.starts, batch, heads // group, queries, keys, FORM.BN, True
    )
    if n0 >= N:
        return
    low, full_low, full_high, high = range_of(b, n0, M, N, call.captured, QUERIES_OF, FORM.BN, True)
    if FORM.BLIND:
        full_high = 0
    spans = split_range(low, full_low, full_high, high, M, FORM.BM)

    own = key_side(call, 1, (b, key_head, begin, begin_k, M, N), n0, FORM)
    n = n0 + tl.arange(0, FORM.BN)[:, None]
    numbers = numbers_of(call, threshold)
    total_k = tl.full([FORM.BN, FORM.D_PADDED], 0.0, tl.float32)
    total_v = tl.full([FORM.BN, FORM.DV_PADDED], 0.0, tl.float32)
    for member in range(group):
        h = key_head * group + member
        walks = walks_of(spans, lists, b, h, n0 // FORM.BN, FORM.BM)
        row_heads = heads_at(call, b, h, begin)
        fixed = grads, own, row_heads, (b, h, n, M, N), (low, high), numbers, plane
        total_k, total_v = walked(
            call, (total_k, total_v), fixed, walks, n, (b, h, M, N), key_step, SCORE, GAIN, SEEN,
            FORM.BM, True, FORM,
        )  # fmt: skip
    place = (b, key_head, begin_k)
    store_sums((total_k, total_v), grads, grad_strides, place, n0, N, numbers, False, FORM)


def backward_launches(call: Backward, grads: Grads) -> list[Launch]:
    """Return the launches of a backward pass, for tensors on any device; no value is read.

    ``grads`` says where the wanted gradients go; every element is written.
    """
    needs = call.needs
    fused, turns = _fused(call, grads)
    grad_sinks = grads.sinks if needs.sinks else None
    launches = row_launches(call, grad_sinks, turns)
    launches += fused
    if not fused and (needs.k or needs.v):
        wanted = (grads.k if needs.k else None, grads.v if needs.v else None)
        launches.append(_key_launch(call, wanted))
    if not fused and needs.q and grads.q is not None:
        launches.append(query_launch(call, grads.q))
    if any(needs.score_tensors):
        launches += captured_launches(call, grads.score_tensors)
    return launches


def _fused(call: Backward, grads: Grads) -> tuple[list[Launch], Tensor | None]:
    """Return the launches of the kernel of the whole backward, and what is to be 0 before it."""
    problem, (grad_q, grad_k, grad_v) = call.problem, grads[:3]
    blocks, needs = call.config.fused(problem), call.needs
    plain = call.upstream.entropy is None and not any(needs.score_tensors)
    if blocks is None or not plain or not all(needs[:3]):
        return [], None
    if grad_q is None or grad_k is None or grad_v is None:
        return [], None
    from tilewise.kernels.gpu.backward.fused import narrow_launch, sums_for
    from tilewise.kernels.gpu.backward.groups import key_launch

    sums = sums_for(problem, call.rows, blocks)
    launch = key_launch(call, grad_k, grad_v, blocks, sums)
    if launch is None:
        return [], None
    return [launch, narrow_launch(problem, sums, grad_q, blocks)], sums.turns


def _key_launch(call: Backward, grads: tuple[Tensor | None, Tensor | None]) -> Launch:
    problem, (grad_k, grad_v) = call.problem, grads
    grouped = call.config.in_groups("dkdv", problem)
    if (
        grouped is not None
        and grad_k is not None
        and grad_v is not None
        and call.upstream.entropy is None
    ):
        from tilewise.kernels.gpu.backward.groups import key_launch

        launch = key_launch(call, grad_k, grad_v, grouped)
        if launch is not None:
            return launch
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


def query_launch(call: Backward, grad_q: Tensor) -> Launch:
    """Return the launch that makes the gradient of q; the values of rows are made before."""
    problem = call.problem
    strides = head_strides(grad_q, problem)
    rows = page_rows(problem, call.operands, call.config, "dq")
    arguments, constants, blocks = call.walk("dq", grad_q=grad_q, grad_q_strides=strides, **rows)
    slots = slots_of(problem, problem.queries, blocks.queries)
    grid = (programs_of(problem, problem.heads, slots),)
    constants["KEYS_OF"] = call.variant.keys_of
    return launch_of(query_kernel, grid, arguments | {"tiles": slots}, constants, blocks)
