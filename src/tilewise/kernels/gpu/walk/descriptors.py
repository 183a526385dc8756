"""Tensor descriptors: whole blocks of rows copied by the chip's own engine, from one instruction.

Only blocks that no mask and no length touches are loaded this way. In all others some rows count as
zero, which a descriptor cannot express. They keep their pointers, and rows beyond a length stay
unread.

A descriptor is made on the host from strides and the address alone, and is an argument of the
launch. It takes no memory on the device, and a CUDA graph keeps it like any other argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.gpu.config import Blocks, Config, padded
from tilewise.kernels.gpu.expressions.variant import Variant
from tilewise.kernels.gpu.walk.tiles import head_strides, knows_whole_tiles
from tilewise.problem import Operands, Problem

_STEP_BYTES = 16  # of the engine: addresses and steps are multiples of it, a row has no less
_MOST_BYTES = 2**40  # of a step
_MOST_ROWS = 256  # of a block
_LONELY = 2**20  # the step along a dimension of size 1, which nobody takes
# Wider heads, dropout and biases take more registers or longer loops by descriptors than by
# pointers, and float32 multiplies without them: see notes/performance-log.md.
_WIDEST, _ITEM_BYTES = 128, 2
_LARGE_BLOCK = 128 * 64


class KeyRows(NamedTuple):
    """Descriptors of keys and values, or None, and the stages of the walk over partial blocks."""

    k: TensorDescriptor | None = None
    v: TensorDescriptor | None = None
    edge_stages: int | None = None

    def arguments(self) -> dict[str, Any]:
        """As a kernel takes them."""
        return {"k_rows": self.k, "v_rows": self.v}


def described(tensor: Tensor, problem: Problem, rows: int) -> TensorDescriptor | None:
    """A descriptor of blocks [1, 1, rows, padded width] of a tensor; None where there can be none.

    The engine wants columns side by side, a start and steps that are multiples of 16 bytes, no step
    of zero, and rows of at least 16 bytes.

    Args:
        tensor: keys or values in any layout: dimensions (b, h, row, column); of packed rows, b is
            one; of pages, b counts pages.
        problem: whose.
        rows: of a block.
    """
    sizes = list(tensor.shape if tensor.dim() == 4 else (1, *tensor.transpose(0, 1).shape))
    *steps, column = head_strides(tensor, problem)
    item = tensor.dtype.itemsize
    straight = (column == 1 or sizes[3] == 1) and sizes[3] * item >= _STEP_BYTES
    if not (
        straight and all(sizes) and rows <= _MOST_ROWS and tensor.data_ptr() % _STEP_BYTES == 0
    ):
        return None
    for axis, step in enumerate(steps):
        if sizes[axis] == 1:
            steps[axis] = _LONELY
        elif step * item % _STEP_BYTES or not 0 < step * item < _MOST_BYTES:
            return None
    return TensorDescriptor(tensor, sizes, [*steps, 1], [1, 1, rows, padded(sizes[3])])


def key_rows(
    problem: Problem, operands: Operands, config: Config, variant: Variant, blocks: Blocks
) -> KeyRows:
    """Return what the forward pass loads whole blocks of keys and values by; arguments as there."""
    wanted = config.descriptors
    widest = max(padded(problem.head_dim), padded(problem.value_dim))
    if (
        wanted is None
        or problem.keys < wanted.keys
        or problem.page_size % blocks.keys
        or problem.dtype.itemsize != _ITEM_BYTES
        or problem.stored is not None
        or widest > _WIDEST
        or problem.dropout_p
        or any(instr.op == "bias" for instr in problem.score)
        or not knows_whole_tiles(problem, variant)
    ):
        return KeyRows()
    k, v = (described(tensor, problem, blocks.keys) for tensor in (operands.k, operands.v))
    if k is None or v is None:
        return KeyRows()
    large = widest > 64 and blocks.queries * blocks.keys > _LARGE_BLOCK
    few_edges = all(instr.op in ("band", "below", "and") for instr in problem.mask)
    return KeyRows(k, v, wanted.edge_stages if large and few_edges else None)
