"""What the Gluon kernels share: the order of tiles, and descriptors of a tensor's tiles."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.walk.descriptors import described
from tilewise.kernels.gpu.walk.tiles import counts_in, list_of, tile_in
from tilewise.problem import Problem

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_WARPS = 4  # of a group: the kernels add the other group and the warp that loads
GROUPS: gl.constexpr = gl.constexpr(2)  # of four warps that multiply, beside the one that loads


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
