"""What the Gluon kernels share: the order of tiles, and descriptors of a tensor's tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gpu.walk.tiles import counts_in, list_of, tile_in

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
