"""Where the tensors of a call lie: anywhere, or against a page that nobody may touch.

A guarded tensor ends where a page begins that can be neither read nor written, or begins where
one ends. An access of one element too far then kills the process, wherever it comes from.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.case import PLAIN, Layout

_PAGE = mmap.PAGESIZE
_NONE, _BOTH, _PRIVATE = 0, mmap.PROT_READ | mmap.PROT_WRITE, 0x22  # MAP_PRIVATE | MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class Heap:
    """Memory from torch's own allocator."""

    def flat(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements, not set."""
        return torch.empty(count, dtype=dtype)

    def free(self) -> None:
        """Nothing: torch frees what it gave."""


class Guarded(Heap):
    """Memory that ends (``side`` "end") or begins ("begin") at a page that kills who touches it."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.libc = _libc()
        self.mapped: list[tuple[int, int]] = []

    def flat(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` elements between two guard pages, against one of them."""
        size = count * dtype.itemsize
        inside = max(1, math.ceil(size / _PAGE)) * _PAGE
        whole = inside + 2 * _PAGE
        start = self.libc.mmap(None, whole, _NONE, _PRIVATE, -1, 0)
        if start is None or start == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        self.mapped.append((start, whole))
        if self.libc.mprotect(start + _PAGE, inside, _BOTH):
            raise OSError(ctypes.get_errno(), "mprotect")
        if not count:
            return torch.empty(0, dtype=dtype)
        first = start + _PAGE + (inside - size if self.side == "end" else 0)
        return torch.frombuffer((ctypes.c_char * size).from_address(first), dtype=dtype)

    def free(self) -> None:
        """Give all of it back: no tensor of it may be used again."""
        for start, whole in self.mapped:
            self.libc.munmap(start, whole)
        self.mapped.clear()


def strides_of(sizes: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Strides of a tensor of these sizes that lies so."""
    rank = len(sizes)
    moved = len(layout.order)
    order = [*range(rank - moved), *[rank - moved + dim for dim in layout.order]]
    pads = [0] * (rank - len(layout.pads)) + list(layout.pads)
    strides, running = [0] * rank, layout.step
    for dim, pad in zip(reversed(order), reversed(pads), strict=True):
        if dim in layout.expanded:
            continue
        strides[dim] = running
        running *= max(sizes[dim], 1) + pad
    return tuple(strides)


def lay(values: Tensor, dtype: torch.dtype, layout: Layout, heap: Heap) -> Tensor:
    """The values in a dtype, lying as ``layout`` says, among NaN where floats have gaps.

    Along an expanded dimension the first value is that of all. Nothing lies behind the last
    element, so that a guard page is next to it.
    """
    sizes = values.shape
    if layout == PLAIN or values.numel() == 0:
        flat = heap.flat(values.numel(), dtype)
        flat.copy_(values.reshape(-1))
        return flat.view(sizes)
    for dim in layout.expanded:
        values = values.narrow(dim, 0, 1).expand(*sizes)
    strides = strides_of(sizes, layout)
    extent = layout.offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    flat = heap.flat(extent, dtype)
    flat.fill_(math.nan if dtype.is_floating_point else 1)
    placed = flat.as_strided(sizes, strides, layout.offset)
    alone = tuple(1 if dim in layout.expanded else size for dim, size in enumerate(sizes))
    flat.as_strided(alone, strides, layout.offset).copy_(values[tuple(slice(n) for n in alone)])
    return placed
