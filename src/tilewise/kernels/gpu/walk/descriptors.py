"""What a tensor descriptor (TMA) says of a tensor: blocks of rows copied by one instruction.

Rows that a mask or a length hides count as zero, whatever they hold. A descriptor cannot express
that. It takes no memory on the device, and a CUDA graph keeps it like any other argument.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.kernels.gpu.config import padded
from tilewise.kernels.gpu.walk.tiles import head_strides
from tilewise.problem import Problem

_STEP_BYTES = 16  # of the engine: addresses and steps are multiples of it, a row has no less
_MOST_BYTES = 2**40  # of a step
_MOST_ROWS = 256  # of a block
_LONELY = 2**20  # the step along a dimension of size 1, which nobody takes


class Described(NamedTuple):
    """Sizes, steps in elements and the block of a descriptor, along (b, h, row, column)."""

    sizes: list[int]
    steps: list[int]
    block: list[int]


def described(tensor: Tensor, problem: Problem, rows: int) -> Described | None:
    """Describe blocks [1, 1, rows, padded width] of a tensor; None where no descriptor can.

    The engine wants columns side by side, a start and steps that are multiples of 16 bytes, no step
    of zero, and rows of at least 16 bytes.

    Args:
        tensor: with a row per query or per key, in any layout. Of packed rows, b is one; of pages,
            b counts pages.
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
    return Described(sizes, [*steps, 1], [1, 1, rows, padded(sizes[3])])
