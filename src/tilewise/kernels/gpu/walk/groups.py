"""What the Gluon kernels share: the order of tiles, and descriptors of a tensor's tiles.

By a tensor descriptor (TMA) one instruction copies a block of rows. Rows that a mask or a length
hides count as zero, whatever they hold; a descriptor cannot express that. It takes no memory on the
device, and a CUDA graph keeps it like any other argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gpu.config import padded
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.walk.tiles import counts_in, head_strides, list_of, tile_in
from tilewise.problem import Problem

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_WARPS = 4  # of a group: the kernels add the other group and the warp that loads
GROUPS: gl.constexpr = gl.constexpr(2)  # of four warps that multiply, beside the one that loads
_STEP_BYTES = 16  # of the copy engine: addresses and steps are multiples of it, a row has no less
_MOST_BYTES = 2**40  # of a step
_MOST_ROWS = 256  # of a block
_LONELY = 2**20  # the step along a dimension of size 1, which nobody takes


@gluon.jit
def counted(spans, lists, b, h, tile, BLOCK: gl.constexpr):
    """(listed, partial, whole, moved): how many tiles a program walks, and where they are listed.

    As ``walk.tiles.walks_of``; without lists of tiles ``listed`` is nothing. All tiles are moved by
    so many rows, of which there are none here.
    """
    if lists[0] is None:
        whole, partial = counts_in(spans, BLOCK)
        found = 0, partial, whole, whole * 0
    else:
        listed, whole, partial = list_of(lists, b, h, tile)
        found = listed, partial, whole, whole * 0
    return found


@gluon.jit
def tile_at(j, spans, walk, BLOCK: gl.constexpr, LISTED: gl.constexpr):
    """Return where tile ``j`` of a walk of ``counted`` begins: those that need a mask come first.

    So the loop over them ends where the loop over the others begins, and the ring stays full.
    """
    listed, partial, whole, moved = walk
    if LISTED:
        at = gl.where(j < partial, j + whole, j - partial)
        first = gl.load(listed + at) * BLOCK
    else:
        masked = tile_in(j, spans, BLOCK, True)
        first = gl.where(j < partial, masked, tile_in(j - partial, spans, BLOCK, False))
    return first + moved


def described_rows(
    tiles: Iterable[tuple[str, Tensor, int]], problem: Problem
) -> dict[str, TensorDescriptor] | None:
    """Return descriptors of tiles [1, 1, rows, D] by name, or None if a tensor can have none."""
    found = {}
    for name, tensor, rows in tiles:
        parts = described(tensor, problem, rows)
        if parts is None or tensor.dtype not in _KINDS:
            return None
        layout = gl.NVMMASharedLayout.get_default_for(parts.block, _KINDS[tensor.dtype])
        found[name] = TensorDescriptor(tensor, parts.sizes, parts.steps, parts.block, layout)
    return found


def in_groups(launch: Launch) -> Launch:
    """Return a launch of a kernel in groups with the warps and stages that it is compiled for."""
    return launch._replace(warps=_WARPS, stages=1)


class _Described(NamedTuple):
    """Sizes, steps in elements and the block of a descriptor, along (b, h, row, column)."""

    sizes: list[int]
    steps: list[int]
    block: list[int]


def described(tensor: Tensor, problem: Problem, rows: int) -> _Described | None:
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
    return _Described(sizes, [*steps, 1], [1, 1, rows, padded(sizes[3])])
