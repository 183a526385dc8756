"""The table of a mask, made on the device: of every rectangle whether it is empty, partial or full.

One program evaluates the pairs of one rectangle, piece by piece. Nothing is read by the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.expressions import Variant, captures
from tilewise.kernels.gpu.walk.pairs import shown
from tilewise.kernels.gpu.walk.tiles import COUNTS, launch_of, lengths_of
from tilewise.problem import Operands, Problem
from tilewise.reference.programs import Grid

_PIECE = 64


@triton.jit(do_not_specialize=[*COUNTS, "rows", "columns", "block_queries", "block_keys"])
def cover_rectangles(
    table,
    cu_q,
    cu_k,
    captured,
    queries,
    keys,
    heads,
    rows,
    columns,
    block_queries,
    block_keys,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return whether the mask hides all (0), some (1) or none (2) of the pairs of a rectangle.

    A rectangle past the end of its sequence is 0.
    """
    program = tl.program_id(0)
    column = program % columns
    row = program // columns % rows
    line = program // columns // rows
    b, h = line // heads, line % heads
    _, _, M, N = lengths_of(b, (cu_q, cu_k, None), queries, keys)
    m0, n0 = row * block_queries, column * block_keys
    m1, n1 = tl.minimum(m0 + block_queries, M), tl.minimum(n0 + block_keys, N)
    seen, hidden = program * 0, program * 0
    for m_at in tl.range(m0, m1, BLOCK):
        for n_at in tl.range(n0, n1, BLOCK):
            m = (m_at + tl.arange(0, BLOCK))[:, None]
            n = (n_at + tl.arange(0, BLOCK))[None, :]
            inside = (m < m1) & (n < n1)
            visible = shown(b, h, m, n, M, N, captured[0], captured[1], SEEN) & inside
            away = inside & ~visible
            seen = tl.maximum(seen, tl.max(tl.max(visible.to(tl.int32), 1), 0))
            hidden = tl.maximum(hidden, tl.max(tl.max(away.to(tl.int32), 1), 0))
    cover = tl.where(seen == 0, 0, 2 - hidden)
    tl.store(table + program, cover.to(tl.uint8))


def cover_launches(
    problem: Problem, operands: Operands, grid: Grid, table: Tensor, variant: Variant
) -> list[Launch]:
    """Return the launch that fills a table.

    Args:
        problem: with the mask.
        operands: with its tensors, and cu_seqlens on the same device.
        grid: the rectangles.
        table: uint8 [grid.batches, grid.heads, grid.rows, grid.columns], contiguous.
        variant: the functions of the mask.
    """
    arguments = {
        "table": table,
        "cu_q": operands.cu_seqlens_q,
        "cu_k": operands.cu_seqlens_k,
        "captured": tuple(captures(operands.mask_tensors)),
        "queries": problem.queries,
        "keys": problem.keys,
        "heads": grid.heads,
        "rows": grid.rows,
        "columns": grid.columns,
        "block_queries": grid.block_queries,
        "block_keys": grid.block_keys,
    }
    constants = {"SEEN": variant.seen, "BLOCK": _PIECE}
    return [launch_of(cover_rectangles, (table.numel(),), arguments, constants)]
