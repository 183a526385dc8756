"""What the Gluon kernels share: the order of tiles, and descriptors of a tensor's tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gpu.walk.tiles import tile_in

GROUPS: gl.constexpr = gl.constexpr(2)  # of four warps that multiply, beside the one that loads


@gluon.jit
def partial_first(j, spans, partial, BLOCK: gl.constexpr):
    """Return where tile ``j`` begins if the ``partial`` tiles that need a mask come first."""
    masked = tile_in(j, spans, BLOCK, True)
    whole = tile_in(j - partial, spans, BLOCK, False)
    return gl.where(j < partial, masked, whole)
