"""Attention over a cache: keys of different numbers in rows or pages. Forward only.

``tilewise.attention_paged`` reads the cache where it lies: a row of the cache is a page. Tensors
that require a gradient are taken; a backward pass through the result raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor
from tilewise.compat.flash_attn.arguments import Options
from tilewise.compat.flash_attn.forward_only import forward_only
from tilewise.engine.pages import check_entries
from tilewise.errors import InvalidArgument
from tilewise.functional import AttentionResult, attention_paged
from tilewise.variants import masks

_WHAT = "attention over a cache or pages"
_FIX = (
    "keep it out of the loss, or compute it in torch.no_grad(); to train, pass the keys themselves "
    "to flash_attn_func or flash_attn_varlen_func"
)


class Cache(NamedTuple):
    """Keys and values of B sequences.

    Args:
        k: [blocks, size, Hk, D].
        v: [blocks, size, Hk, Dv].
        lengths: integer [B]: key n of sequence b exists for n < lengths[b].
        table: integer [B, P]: key n of sequence b is row ``n % size`` of block
            ``table[b, n // size]``.
        starts: integer [B]: the keys before it do not count; None for 0.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor
    starts: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Return how many keys a sequence may have."""
        return self.table.shape[1] * self.k.shape[1]


def attend(
    q: Tensor,
    cache: Cache,
    options: Options,
    given: Mapping[str, Tensor | None],
    cu_seqlens_q: Tensor | None = None,
    sinks: Tensor | None = None,
) -> AttentionResult:
    """Attention of queries to the keys of their sequence in a cache.

    Args:
        q: [B, M, Hq, D], or packed [Tq, Hq, D] with cu_seqlens_q.
        cache: of B sequences; ``check_lengths`` and ``check_blocks`` have looked at it.
        options: without dropout. Positions count from the end of the keys, so that ``starts`` moves
            none of them.
        given: the caller's tensors by their names, q, keys and values among them: one that requires
            a gradient is named when somebody asks for it.
        cu_seqlens_q: integer [B + 1], or None.
        sinks: floating [Hq], or None.

    Returns:
        out as q, with width Dv; lse [B, Hq, M] or [Hq, Tq]. A backward pass through them raises
        ``Unsupported``.
    """
    with torch.no_grad():
        bare = cache
        if cache.starts is not None and cache.starts.is_cpu:
            bare = _without_padding(cache, cache.starts)
        found = in_place(q, bare, options, cu_seqlens_q, sinks=sinks)
    assert found.lse is not None
    out, lse = forward_only(_WHAT, _FIX, (found.out, found.lse), given)
    return AttentionResult(out, lse, found.stats)


def check_integers(name: str, tensor: object, shape: tuple[int | None, ...], device: str) -> None:
    """An int32 or int64 tensor of a shape (None: of any size there) on a kind of device."""
    sizes = ", ".join(["any" if size is None else str(size) for size in shape])
    required = f"an int32 or int64 tensor [{sizes}] on {device}"
    check_tensor(name, tensor, required, INDICES, shape=shape, device=device)


def in_place(
    q: Tensor,
    cache: Cache,
    options: Options,
    cu_seqlens_q: Tensor | None = None,
    backend: str | None = None,
    sinks: Tensor | None = None,
) -> AttentionResult:
    """``attend`` by ``attention_paged``, whose pages are the cache's blocks."""
    mask, starts = options.mask, cache.starts
    if starts is not None:
        after = masks.function(lambda b, h, m, n: n >= starts[b])
        mask = after if mask is None else mask & after
    packed = cu_seqlens_q is not None
    found: AttentionResult = attention_paged(
        q if packed else q.transpose(1, 2),
        cache.k.transpose(1, 2),
        cache.v.transpose(1, 2),
        cache.table,
        cache.lengths,
        cu_seqlens_q,
        mask=mask,
        score=options.score(),
        scale=options.scale,
        sinks=sinks,
        return_lse=True,
        backend=backend,
    )
    # Not _replace: torch 2.11's Dynamo cannot hold what that made over a break of the graph.
    return found if packed else AttentionResult(found.out.transpose(1, 2), found.lse, found.stats)


def _without_padding(cache: Cache, starts: Tensor) -> Cache:
    """The cache from its starts on, so that nobody reads what lies before them: it may be NaN.

    Pages are cut so small that every start is that of a page. Blocks whose rows do not lie one
    behind the other in memory are copied for it.
    """
    used = starts < cache.lengths
    size = cache.k.shape[1]
    rows = math.gcd(size, *starts[used].tolist())
    per_block = size // rows
    pieces = cache.k.shape[0] * per_block
    k, v = (x.reshape(pieces, rows, *x.shape[2:]) for x in (cache.k, cache.v))
    table = cache.table.long()[:, :, None] * per_block + torch.arange(per_block)
    slots = torch.arange(cache.table.shape[1] * per_block) + starts.long()[:, None] // rows
    table = table.flatten(1).gather(1, slots.clamp_max(slots.shape[1] - 1))
    return Cache(k, v, (cache.lengths - starts).clamp_min(0), table)


def check_lengths(cache: Cache, name: str, new: int = 0) -> None:
    """Lengths and starts are possible, with room for ``new`` keys; looked at on the CPU only.

    ``name`` is the caller's argument that the lengths are from.
    """
    if not cache.lengths.is_cpu:
        return
    room = cache.capacity - new
    for b, length in enumerate(cache.lengths.tolist()):
        if not 0 <= length <= room:
            held = f"the cache has {cache.capacity} rows"
            required = f"in [0, {room}]: {held}" + (f", and {new} are new" if new else "")
            raise InvalidArgument(name, f"{length} for sequence {b}", required)
    if cache.starts is not None and bool((cache.starts < 0).any()):
        raise InvalidArgument("cache_leftpad", str(cache.starts.tolist()), "numbers of 0 or more")


def check_blocks(cache: Cache, new: int = 0, name: str = "block_table") -> None:
    """The table names blocks that there are, where sequences have keys; on the CPU only.

    ``check_lengths`` has looked at it.
    """
    if not cache.table.is_cpu:
        return
    held, size = cache.k.shape[:2]
    check_entries(name, cache.table, cache.lengths + new, size, held)
