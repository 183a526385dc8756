"""What a tensor descriptor (TMA) says of a tensor: blocks of rows copied by one instruction.

Rows that a mask or a length hides count as zero, whatever they hold. A descriptor cannot express
that. It takes no memory on the device, and a CUDA graph keeps it like any other argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.gpu.config import FAMILIES, Config, Pass, padded, tail_of
from tilewise.kernels.gpu.walk.tiles import head_strides
from tilewise.problem import Operands, Problem

_STEP_BYTES = 16  # of the engine: addresses and steps are multiples of it, a row has no less
_MOST_BYTES = 2**40  # of a step
_MOST_ROWS = 256  # of a block
_LONELY = 2**20  # the step along a dimension of size 1, which nobody takes
_LEAST_KEYS = 64  # of a block of keys
_LEAST_ROWS = 32  # of a tile; with 16 the loop of dQ spills on sm_90 at a width of 256


class Described(NamedTuple):
    """Sizes, steps in elements and the block of a descriptor, along (b, h, row, column)."""

    sizes: list[int]
    steps: list[int]
    block: list[int]


def described(tensor: Tensor, problem: Problem, rows: int, columns: int = 0) -> Described | None:
    """Describe blocks [1, 1, rows, columns] of a tensor; None where no descriptor can.

    The engine wants columns side by side, a start and steps that are multiples of 16 bytes, no step
    of zero, and rows of at least 16 bytes.

    Args:
        tensor: with a row per query or per key, in any layout. Of packed rows, b is one; of pages,
            b counts pages.
        problem: whose.
        rows: of a block.
        columns: of a block; 0 for all, padded.
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
    return Described(sizes, [*steps, 1], [1, 1, rows, columns or padded(sizes[3])])


def page_rows(
    problem: Problem, operands: Operands, config: Config, name: Pass
) -> dict[str, TensorDescriptor | None]:
    """Return descriptors of the rows of keys and values in pages, as arguments of a kernel.

    They are for key lists in blocks of 64 keys and more, 16 bits a number. Such a block is a page
    of which every key counts, and a tile of keys lies in one page. None stands for pointers.

    Args:
        problem: what to compute.
        operands: with what.
        config: of the chip.
        name: the pass whose blocks count.
    """
    found: dict[str, Any] = {"k_rows": None, "v_rows": None}
    rows = config.blocks(name, problem).keys
    if (
        not FAMILIES[config.family].descriptors
        or problem.page_size < _LEAST_KEYS
        or problem.page_size % rows
        or rows < _LEAST_ROWS
        or not operands.whole_pages
        or problem.dtype.itemsize != 2
        or problem.stored is not None
        or tail_of(problem.head_dim)
        or config.part(name, problem)
    ):
        return found
    parts = [described(tensor, problem, rows) for tensor in (operands.k, operands.v)]
    for each, tensor, argument in zip(parts, (operands.k, operands.v), found, strict=True):
        if None in parts or each is None:
            return {"k_rows": None, "v_rows": None}
        found[argument] = TensorDescriptor(tensor, each.sizes, each.steps, each.block)
    return found
