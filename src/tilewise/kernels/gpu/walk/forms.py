"""The constants of every walk over the pairs, as one value that its kernel is compiled for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Config, padded, tail_of
from tilewise.kernels.gpu.expressions import Variant
from tilewise.kernels.gpu.walk.tiles import head_strides
from tilewise.problem import Problem
from tilewise.variants.program import Program


class Form(NamedTuple):
    """The constants of a walk: one constexpr, whose members kernels read by name.

    Functions are not among them. Triton knows those that are constexprs of their own by their
    source, and those in a tuple by their name alone.

    Args:
        BM, BN: queries and keys of a tile.
        D, DV: the widths of keys and values; D_PADDED and DV_PADDED are the blocks that hold them.
        TAIL: columns of keys beyond D_PADDED, which TAIL_PADDED holds; 0 for none.
        WIDE: offsets within a tile take 64 bits.
        PRECISION: of products of float32.
        PAGE: keys of a page, or 0.
        PART: columns that products are summed over at a time, or 0 for all of them.
        DROPOUT: some pairs are dropped.
        BLIND: no tile is known to be shown whole.
        SKIPS: tiles of which no pair attends may be met.
        FOLDED: forward, scores are kept in units of the bare product q.k.
        SHARED: forward, values are the keys' columns before the tail, in place.
        FP8: forward, how 8 bits are multiplied, see ``walk.float8``.
        STORED: forward, what pages in 8 bits hold, see there.
        TRANSPOSED: forward, values are transposed, see there.
        REVERSED: forward, the last tiles come first.
        NAMED: of statistics, whether the first of the largest scores is named.
        FOLD: backward, the row sum is in the exponent, see ``rows.folds``.
        ENTROPY: backward, the entropy has a gradient.
    """

    BM: int
    BN: int
    D: int
    D_PADDED: int
    DV: int
    DV_PADDED: int
    TAIL: int
    TAIL_PADDED: int
    WIDE: bool
    PRECISION: str
    PAGE: int
    PART: int
    DROPOUT: bool
    BLIND: bool
    SKIPS: bool
    FOLDED: bool = False
    SHARED: bool = False
    FP8: str = ""
    STORED: str = ""
    TRANSPOSED: bool = False
    REVERSED: bool = False
    NAMED: bool = False
    FOLD: bool = False
    ENTROPY: bool = False


def form_of(
    problem: Problem,
    tensors: tuple[Tensor, ...],
    config: Config,
    variant: Variant,
    blocks: Blocks,
    name: str,
) -> Form:
    """Return what forms of both passes share.

    Args:
        problem: what to compute.
        tensors: with a row per query or key, which the walk reads.
        config: of the chip.
        variant: the functions of the problem's mask and score.
        blocks: of the walk.
        name: as ``Config.part`` takes it.
    """
    tail = tail_of(problem.head_dim)
    return Form(
        BM=blocks.queries,
        BN=blocks.keys,
        D=problem.head_dim,
        D_PADDED=padded(problem.head_dim - tail),
        DV=problem.value_dim,
        DV_PADDED=padded(problem.value_dim),
        TAIL=tail,
        TAIL_PADDED=padded(tail) if tail else 0,
        WIDE=wide(tensors, problem, blocks),
        PRECISION=config.precision,
        PAGE=problem.page_size,
        PART=config.part(name, problem),
        DROPOUT=problem.dropout_p > 0,
        BLIND=not (_has_whole_ranges(problem.mask) or any(x.whole for x in variant.tables)),
        SKIPS=_meets_empty_tiles(problem, variant),
    )


def _has_whole_ranges(mask: Program) -> bool:
    """Return whether ``expressions/text.py`` knows a range of pairs that a mask shows all of."""
    stack = [True]
    for instr in mask:
        if instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(first and second if instr.op == "and" else first or second)
        elif instr.op == "not":
            stack[-1] = False
        elif instr.op != "tiles":
            stack.append(instr.op in ("band", "below"))
    return stack.pop()


def _meets_empty_tiles(problem: Problem, variant: Variant) -> bool:
    """Return whether a walk may meet a tile in which no pair attends; it must read none of it.

    Two bands may have no pair in common in any row, although their ranges overlap. Tiles that a
    table lists are judged by the table's own rectangles.
    """
    bands = sum(instr.op == "band" for instr in problem.mask)
    exact = bands < 2 and all(instr.op in ("band", "below", "and") for instr in problem.mask)
    return not exact and not any(table.whole for table in variant.tables)


def wide(tensors: tuple[Tensor, ...], problem: Problem, blocks: Blocks) -> bool:
    """Return whether an offset within a tile may take more than 31 bits."""
    most = max(blocks.queries, blocks.keys)
    return any(
        (most - 1) * row + (padded(tensor.shape[-1]) - 1) * column >= 2**31
        for tensor in tensors
        for _, _, row, column in [head_strides(tensor, problem)]
    )
