"""What the Gluon kernels share: the order of tiles, and descriptors of a tensor's tiles."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.walk.descriptors import described
from tilewise.kernels.gpu.walk.tiles import counts_in, list_of, tile_in
from tilewise.problem import Problem
from tilewise.variants.float8 import FLOAT8

_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    FLOAT8: gl.float8e4nv,
}
_WARPS = 4  # of a group: the kernels add the other group and the warp that loads
GROUPS: gl.constexpr = gl.constexpr(2)  # of four warps that multiply, beside the one that loads


# What copies a tile by its descriptor has these names from Triton 3.9 on, and had others before.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def barriers(places: gl.constexpr, count: gl.constexpr):
    """Barriers in shared memory, of which a phase ends after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [places, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(places):
        mbarrier.init(found.index(i), count=count)
    return found


@gluon.jit
def fetch(rows, place, full, room):
    """Copy a box of a tensor into shared memory; the phase of ``full`` ends when it is there."""
    mbarrier.expect(full, rows.block_type.nbytes)
    async_load(rows, place, full, room)


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


@gluon.jit
def tile_down(j, spans, count, BLOCK: gl.constexpr):
    """Return where tile ``j`` of ``count`` of a split range begins if the last one comes first."""
    return spans[0] + (count - 1 - j) * BLOCK


@gluon.jit
def masked_and_whole(end, spans, count, BLOCK: gl.constexpr):
    """Return how many tiles that need a mask come next in ``tile_down``, and then how many not.

    ``end`` is 0 before the first tile, and 1 after the last one that needs no mask.
    """
    first, full, beyond, _ = spans
    after = (full - first) // BLOCK
    whole = (beyond - full) // BLOCK
    return gl.where(end == 0, count - whole - after, after), gl.where(end == 0, whole, 0)


@builtin
def async_atomic_add(rows, place, source, _semantic=None):
    """Add a tile of shared memory to a tensor, as ``async_store`` stores one.

    Gluon's ``tma`` has it from Triton 3.9 on. The builder has it before.
    """
    indices = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, rows.handle, indices, source.handle)


@constexpr_function
def rows_layout(columns):
    """Return the layout of 128 rows in four warps, a row for each thread, as tensor memory has."""
    return gl.BlockedLayout([1, columns], [32, 1], [4, 1], [0, 1])


@builtin
def taken_as(memory, dtype, shape, layout, _semantic=None):
    """Return tensor memory as another type's. Triton 3.9 has given this a public name."""
    take = getattr(memory, "reinterpret", None) or memory._reinterpret
    return take(dtype, shape, layout, _semantic=_semantic)


def described_rows(
    tiles: Iterable[tuple[str, Tensor, int, int]], problem: Problem
) -> dict[str, TensorDescriptor] | None:
    """Return descriptors of tiles [1, 1, rows, columns], or None if a tensor can have none.

    Args:
        tiles: of each its name, its tensor, rows and columns.
        problem: whose.
    """
    found = {}
    for name, tensor, rows, columns in tiles:
        parts = described(tensor, problem, rows, columns)
        if parts is None or tensor.dtype not in _KINDS:
            return None
        layout = gl.NVMMASharedLayout.get_default_for(parts.block, _KINDS[tensor.dtype])
        found[name] = TensorDescriptor(tensor, parts.sizes, parts.steps, parts.block, layout)
    return found


def in_groups(launch: Launch) -> Launch:
    """Return a launch of a kernel in groups with the warps and stages that it is compiled for."""
    return launch._replace(warps=_WARPS, stages=1)
