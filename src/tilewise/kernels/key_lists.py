"""Key lists by the compiled core, in one pass each: as sets, and where the keys of sets lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.cpu.core import absence, core
from tilewise.kernels.cpu.forks import threads


class Located(NamedTuple):
    """Where the keys of lists lie, as a paged call is told.

    Args:
        table: int32 [problems, pages of a list].
        lengths: int32 [problems], the keys of each list.
        keys: int64 [problems, K], which keys these are; None if nobody asked, or for pages of more
            than one key.
    """

    table: Tensor
    lengths: Tensor
    keys: Tensor | None


def by_core(x: Tensor) -> bool:
    """Return whether the core can read a tensor: it is in memory, and the core is there."""
    return x.is_cpu and absence() is None


def key_sets(indices: Tensor, block: int, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return sets and counts, as ``engine.key_lists.Listed``, and where the first mistake is.

    Args:
        indices: int32 or int64 [B, heads, M, K], or packed [heads, T, K]; any strides.
        block: keys of a block.
        lengths: int64 [T], T = B * M, the keys of the sequence of each list.

    Returns:
        int32 [T, heads, K]; int64 [T, heads]; and the place in the flat sets of the first index
        that names nothing and is not -1, or -1.
    """
    many, heads, width = lengths.shape[0], indices.shape[-3], indices.shape[-1]
    sets = torch.empty((many, heads, width), dtype=torch.int32, device="cpu")
    counts = torch.empty((many, heads), dtype=torch.int64, device="cpu")
    if indices.is_neg():  # the core does not see this flag
        indices = indices.resolve_neg()
    wrong = core().key_sets(threads(), block, indices, lengths.contiguous(), sets, counts)
    return sets, counts, wrong


def key_pages(
    sets: Tensor,
    counts: Tensor,
    heads: int,
    sizes: tuple[int, int, int, int],
    steps: tuple[int, int, int],
    item: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    table: Tensor | None,
    with_keys: bool,
) -> Located:
    """Return where the keys of sets lie, for each list and key head.

    Args:
        sets: int32 [T, 1 or heads, K], contiguous; of ``key_sets``.
        counts: int64 [T, 1 or heads], contiguous.
        heads: key heads.
        sizes: keys of a block, of a page, of a head in all, and of a page of ``table``.
        steps: numbers from page to page: outer, head, page.
        item: int64 [T], contiguous as the next three: the batch item or sequence of each list.
        lengths: int64 [T], its keys.
        starts: int64 [items], where packed sequences start; or None.
        table: int32 [items, pages], where keys lie in pages already; or None.
        with_keys: whether to return the keys too, if pages have one key.
    """
    lists, _, width = sets.shape
    block, size, *_ = sizes
    shape = (lists, heads, width * (block // size))
    numbers = torch.empty(shape, dtype=torch.int32, device="cpu")
    own = torch.empty(lists * heads, dtype=torch.int32, device="cpu")
    keys = None
    if with_keys and size == 1:
        keys = torch.empty(shape, dtype=torch.int64, device="cpu")
    where = (item, lengths, starts, table)
    core().key_pages(threads(), sizes, steps, sets, counts, *where, numbers, own, keys)
    flat = (lists * heads, shape[2])
    return Located(numbers.view(flat), own, None if keys is None else keys.view(flat))
