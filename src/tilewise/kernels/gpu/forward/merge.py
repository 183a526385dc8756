"""The end of a decoding call: what the splits of a row's keys come to, merged in their order.

A split leaves of every row the unfinished output, the row maximum in the units of the walk, and the
row sum (``Partials``). With ``w_i = exp2(unit * (top_i - top))`` for ``top = max_i top_i``::

    sum = sum_i w_i sum_i,    acc = sum_i w_i acc_i

and then a row ends as any other does (``forward.settled``); its sink is added here, once. A split
of which a row sees no key has the sum 0, and its output is not read.

Source: Milakov and Gimelshein, 2018, section 3.1; Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Splitting, padded
from tilewise.kernels.gpu.expressions.variant import Variant
from tilewise.kernels.gpu.forward.arguments import dropout_of, finishing_of, head_scales, paging_of
from tilewise.kernels.gpu.forward.online import settled, store_numbers
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.pairs import LOG2E
from tilewise.kernels.gpu.walk.tiles import head_of, head_strides, keys_in, launch_of
from tilewise.problem import Operands, Problem, Result

_WIDE_VALUE = 128  # from where on a program that holds all splits of a row needs more warps


class Partials(NamedTuple):
    """What splits leave of rows, which count as those of lse do: by batch item, head and query.

    Args:
        out: float32 [rows, splits, Dv], not yet divided by the row sum.
        numbers: float32 [2, rows, splits]: row maximum in the units of the walk, and row sum.
    """

    out: Tensor
    numbers: Tensor


def empty_partials(problem: Problem, result: Result, splits: int) -> Partials:
    """Memory for the partial results of so many splits; a call of one split needs none."""
    rows = result.lse.numel() if splits > 1 else 0
    out = scratch(result.lse, (rows, splits, problem.value_dim))
    return Partials(out, scratch(out, (2, rows, splits)))


@triton.jit
def split_size(N, SPLITTING: tl.constexpr):
    """Keys of a split, and how many splits so many keys make: as ``config.Splitting`` says."""
    LEAST: tl.constexpr = SPLITTING.least
    ALL: tl.constexpr = LEAST * SPLITTING.most
    size = LEAST * tl.maximum(1, (N + ALL - 1) // ALL)
    return size, tl.maximum(1, (N + size - 1) // size)


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "rows", "slots"])
def merge_splits(
    outputs,
    sinks,
    v_scale,
    key_lengths,
    partials,
    out_strides,
    heads,
    group,
    queries,
    keys,
    rows,
    slots,
    scale,
    keep_factor,
    FOLDED: tl.constexpr,
    DROPOUT: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SPLITTING: tl.constexpr,
):
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


def merge_launch(
    problem: Problem,
    operands: Operands,
    result: Result,
    partials: Partials,
    variant: Variant,
    splitting: Splitting,
) -> Launch:
    """The launch that fills a result from what its splits left; arguments as of ``decode``."""
    rows, slots = partials.out.shape[:2]
    arguments: dict[str, Any] = {
        "outputs": (result.out, result.lse, *result.stats[:2]),
        "sinks": operands.sinks,
        "v_scale": head_scales(problem, operands)[2],
        "key_lengths": operands.key_lengths,
        "partials": tuple(partials),
        "out_strides": head_strides(result.out, problem),
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": paging_of(problem, operands)["keys"],
        "rows": rows,
        "slots": slots,
        "scale": problem.scale,
        "keep_factor": dropout_of(problem, operands)["keep_factor"],
    }
    constants = {**finishing_of(problem, operands, variant), "SPLITTING": splitting}
    warps = 4 if padded(problem.value_dim) <= _WIDE_VALUE else 8
    return launch_of(merge_splits, (rows,), arguments, constants, Blocks(1, 1, warps, 1))
