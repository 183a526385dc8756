"""Rows of a table that lie anywhere, copied together or added to: of key lists read by copies."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.core import absence, core
from tilewise.kernels.cpu.cross_entropy import DTYPES
from tilewise.kernels.cpu.forks import threads

# Of a table: new memory of fewer bytes is mostly memory that the process had before.
_LARGE_BYTES = 1 << 22


def zero_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of a shape, in large pages where they are many and the system has some.

    A table that large is new memory in each call. By pages of 4 KB the system takes as long to make
    67 MB of it as for three times as much in pages of 2 MB.
    """
    made = torch.empty(like.shape, dtype=dtype, device=like.device)
    if made.nbytes >= _LARGE_BYTES and _by_core(made):
        core().large_pages(made.data_ptr(), made.nbytes)
    return made.zero_()


def copied_rows(table: Tensor, places: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows [count, D] of a table [some, D], whose own rows may overlap.

    Args:
        table: where they are; the numbers of a row are neighbours in memory.
        places: int64 [count], which rows.
        out: contiguous memory for them, or None.
    """
    if not _by_core(table):
        if out is None:
            return table.index_select(0, places)
        return torch.index_select(table, 0, places, out=out)
    if out is None:
        out = table.new_empty((len(places), table.shape[1]))
    _run(table, places, out, add=False)
    return out


def add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows [count, D] to those of a table, in their order where several go to one place.

    Args:
        table: [some, D] in the dtype of statistics, rows that do not overlap.
        places: int64 [count].
        rows: of the operands' dtype.
    """
    if _by_core(rows):
        _run(table, places, rows.contiguous(), add=True)
    elif table.is_cpu:
        table.index_add_(0, places, rows.to(table.dtype))
    else:  # index_add_ takes atomics there; this sorts
        table.index_put_((places,), rows.to(table.dtype), accumulate=True)


def _by_core(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in DTYPES and absence() is None


def _run(table: Tensor, places: Tensor, rows: Tensor, *, add: bool) -> None:
    places = places.contiguous()
    # The core believes these.
    assert table.stride(1) == 1 or table.shape[1] == 1
    assert rows.is_contiguous()
    assert places.dtype == torch.int64
    assert rows.shape == (len(places), table.shape[1])
    arrays = (table.data_ptr(), places.data_ptr(), rows.data_ptr())
    sizes = (len(table), table.stride(0), *rows.shape)
    core().gathered_rows(DTYPES[rows.dtype], threads(), add, sizes, arrays)
