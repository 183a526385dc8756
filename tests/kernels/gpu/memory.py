"""The memory of a kernel's tensors, element by element, for ``guard``."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.gpu.floats import Array


class Memory:
    """A storage that a launch was given, in cells: which program read and wrote each.

    Args:
        start, end: addresses that the launch's tensors in it lie between.
        cell_bytes: the smallest element among those tensors.
    """

    def __init__(self, start: int, end: int, cell_bytes: int) -> None:
        self.start = start
        self.cell_bytes = cell_bytes
        self.cells = (end - start) // cell_bytes
        self.stored, self.updated, self.read = np.zeros((3, self.cells), np.int32)
        self.operation = np.zeros(self.cells, np.int8)  # of the last atomic update
        self.written = False

    def cells_of(self, addresses: Array, width_bytes: int) -> Array:
        """The cells of elements at addresses; -1 where that is none of this memory's."""
        offsets = (addresses - np.uint64(self.start)).view(np.int64)
        cells, rest = np.divmod(offsets, self.cell_bytes)
        if width_bytes > self.cell_bytes:
            steps = np.arange(width_bytes // self.cell_bytes)
            cells, rest = (cells[:, None] + steps).ravel(), np.repeat(rest, steps.size)
        aligned = rest % min(width_bytes, self.cell_bytes) == 0
        return np.where(aligned & (cells >= 0) & (cells < self.cells), cells, -1)


class Region:
    """A tensor argument: which cells of its memory are its own."""

    def __init__(self, name: str, tensor: Any, memory: Memory) -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.start = tensor.data_ptr()
        self.memory = memory
        self.own = np.zeros(memory.cells + 1, np.bool_)  # the last one, -1, is nobody's
        if all(self.shape):
            per_element = tensor.element_size() // memory.cell_bytes
            first = (self.start - memory.start) // memory.cell_bytes
            np.lib.stride_tricks.as_strided(
                self.own[first:],
                (*self.shape, per_element),
                (*(stride * per_element for stride in tensor.stride()), 1),
            )[...] = True


def _extent(tensor: Any) -> tuple[int, int]:
    """Addresses of a tensor's first element and of the end of its last one."""
    sizes, strides = tensor.shape, tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if all(sizes) else start


def _storage(tensor: Any) -> int:
    return int(getattr(tensor, "base", tensor).untyped_storage().data_ptr())


def regions_of(named: dict[str, Any]) -> dict[int, Region]:
    """The regions of tensors, by ``id``; tensors of one storage share its memory."""
    sharing: dict[int, list[Any]] = {}
    for tensor in named.values():
        sharing.setdefault(_storage(tensor), []).append(tensor)
    memories = {}
    for storage, tensors in sharing.items():
        starts, ends = zip(*map(_extent, tensors), strict=True)
        cell_bytes = min(tensor.element_size() for tensor in tensors)
        memories[storage] = Memory(min(starts), max(ends), cell_bytes)
    return {
        id(tensor): Region(name, tensor, memories[_storage(tensor)])
        for name, tensor in named.items()
    }


def tensors_in(argument: Any, name: str) -> dict[str, Any]:
    """The tensors in an argument by name: itself, or those of a tuple."""
    if isinstance(argument, tuple):
        found: dict[str, Any] = {}
        for index, each in enumerate(argument):
            found |= tensors_in(each, f"{name}[{index}]")
        return found
    return {name: argument} if hasattr(argument, "data_ptr") else {}
