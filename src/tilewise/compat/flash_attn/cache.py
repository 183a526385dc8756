"""Attention over a cache: keys of different numbers in rows or pages. Forward only.

``tilewise.attention_paged`` reads the cache where it lies: a row of the cache is a page. Tensors
that require a gradient are taken; a backward pass through the result raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor
from tilewise.compat.flash_attn.arguments import Options
from tilewise.compat.flash_attn.layers.rotary import numbered
from tilewise.compat.gradients import forward_only
from tilewise.engine.pages import check_entries
from tilewise.errors import InvalidArgument
from tilewise.functional import AttentionResult, attention_paged
from tilewise.problem import side_by_side
from tilewise.validation import check_cu_seqlens
from tilewise.variants import masks
from tilewise.variants.float8 import FLOAT8

_WHAT = "attention over a cache or pages"
_FIX = (
    "keep it out of the loss, or compute it in torch.no_grad(); to train, pass the keys themselves "
    "to flash_attn_func or flash_attn_varlen_func"
)


class Cache(NamedTuple):
    """Keys and values of B sequences."""

    k: Tensor  # [blocks, size, Hk, D]
    v: Tensor  # [blocks, size, Hk, Dv]
    lengths: Tensor  # integer [B]: key n of sequence b exists for n < lengths[b]
    # Integer [B, P]: key n of sequence b is row ``n % size`` of block ``table[b, n // size]``.
    table: Tensor
    starts: Tensor | None = None  # integer [B]: the keys before it do not count; None for 0

    @property
    def capacity(self) -> int:
        """Return how many keys a sequence may have."""
        return self.table.shape[1] * self.k.shape[1]


class More(NamedTuple):
    """What few calls over a cache have."""

    sinks: Tensor | None = None  # floating [Hq], or None
    # A row sees the keys of its own chunk of so many, which count from ``Cache.starts``; 0 for all
    # chunks.
    chunk: int = 0
    # ``q_scale`` [B, Hq], ``k_scale`` and ``v_scale`` [B, Hk], those that there are: what float8
    # numbers are to be multiplied by.
    scales: Mapping[str, Any] = MappingProxyType({})
    keys: Tensor | None = None  # lists of keys as ``attention_paged`` takes them, or None


NO_MORE = More()


def attend(
    q: Tensor,
    cache: Cache,
    options: Options,
    given: Mapping[str, Tensor | None],
    cu_seqlens_q: Tensor | None = None,
    more: More = NO_MORE,
) -> AttentionResult:
    """Attention of queries to the keys of their sequence in a cache.

    q is [B, M, Hq, D], or packed [Tq, Hq, D] with cu_seqlens_q, integer [B + 1]. ``check_lengths``
    and ``check_blocks`` have looked at the cache. There is no dropout. Positions count from the end
    of the keys, so that ``starts`` moves none of them. ``given`` are the caller's tensors by their
    names, q, keys and values among them: one that requires a gradient is named when somebody asks
    for it.

    Returns:
        out as q, with width Dv (bfloat16 for float8); lse [B, Hq, M] or [Hq, Tq]. A backward pass
        through them raises ``Unsupported``.
    """
    with torch.no_grad():
        bare = cache
        if cache.starts is not None and cache.starts.is_cpu:
            bare = _without_padding(cache, cache.starts)
        widen = q.dtype is FLOAT8 and q.is_cpu
        road = _widened if widen else in_place
        found = road(q, bare, options, cu_seqlens_q, more=more)
    assert found.lse is not None
    out, lse = forward_only(_WHAT, _FIX, (found.out, found.lse), given)
    return AttentionResult(out, lse, found.stats)


def check_integers(name: str, tensor: object, shape: tuple[int | None, ...], device: str) -> None:
    """An int32 or int64 tensor of a shape (None: of any size there) on a kind of device."""
    sizes = ", ".join(["any" if size is None else str(size) for size in shape])
    required = f"an int32 or int64 tensor [{sizes}] on {device}"
    check_tensor(name, tensor, required, INDICES, shape=shape, device=device)


def check_starts(name: str, starts: Tensor, count: int | None, rows: Tensor) -> None:
    """Starts of packed rows are integer [sequences + 1]; from 0 to the rows' number, on the CPU."""
    entries = None if count is None else count + 1
    check_integers(name, starts, (entries,), rows.device.type)
    if starts.shape[0] < 1:
        raise InvalidArgument(name, "no entry", "one for each sequence and one more")
    if starts.is_cpu:
        check_cu_seqlens(name, starts, rows.shape[0])


def in_place(
    q: Tensor,
    cache: Cache,
    options: Options,
    cu_seqlens_q: Tensor | None = None,
    backend: str | None = None,
    more: More = NO_MORE,
) -> AttentionResult:
    """``attend`` by ``attention_paged``, whose pages are the cache's blocks."""
    mask, starts, chunk = options.mask, cache.starts, more.chunk
    if starts is not None:
        after = masks.function(lambda b, h, m, n: n >= starts[b])
        mask = after if mask is None else mask & after
    if chunk:

        def same(b: Any, h: Any, m: Any, n: Any) -> Any:
            first = 0 if starts is None else starts[b]
            return (n - first) // chunk == (m + n.length - m.length - first) // chunk

        mask = masks.function(same) if mask is None else mask & masks.function(same)
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
        keys=more.keys,
        scale=options.scale,
        sinks=more.sinks,
        **more.scales,
        return_lse=True,
        backend=backend,
    )
    # Not _replace: torch 2.11's Dynamo cannot hold what that made over a break of the graph.
    return found if packed else AttentionResult(found.out.transpose(1, 2), found.lse, found.stats)


def _widened(
    q: Tensor, cache: Cache, options: Options, cu_seqlens_q: Tensor | None, *, more: More
) -> AttentionResult:
    """``in_place`` of float8 on a CPU, where kernels read such pages beside wider queries alone.

    The scales of q and k multiply scores, so both go into float32 queries. That of v multiplies the
    output.
    """
    sequence, _ = numbered(q, cu_seqlens_q)

    def of_rows(scale: Tensor) -> Tensor:
        wide = scale.float().repeat_interleave(q.shape[-2] // scale.shape[1], 1)
        return wide[sequence][..., None]

    rows, given = q.float(), dict(more.scales)
    for name in ("q_scale", "k_scale"):
        if name in given:
            rows = rows * of_rows(given[name])
    ones = torch.ones(()).expand(cache.k.shape[0], cache.k.shape[2], cache.k.shape[1])
    more = More(more.sinks, more.chunk, {"k_scale": ones, "v_scale": ones}, more.keys)
    out, lse, stats = in_place(rows, cache, options, cu_seqlens_q, more=more)
    out = out * of_rows(given["v_scale"]) if "v_scale" in given else out
    return AttentionResult(out.to(torch.bfloat16), lse, stats)


def with_values(cache: Cache, q: Tensor, qv: Tensor) -> tuple[Cache, Tensor]:
    """Return a cache whose keys are k and v side by side, and its queries, q and qv likewise.

    Where k and v lie side by side in memory, as parts of one latent cache, nothing is copied.
    Otherwise a call copies the keys and values of the blocks that its table names.

    q is [B, M, Hq, D], or packed [Tq, Hq, D]. qv and the values have width Dv.
    """
    k, v, table = cache.k, cache.v, cache.table
    for first, second, ours in ((v, k, (qv, q)), (k, v, (q, qv))):
        wide = None if torch.compiler.is_compiling() else side_by_side(first, second)
        if wide is not None:
            return Cache(wide, v, cache.lengths, table, cache.starts), torch.cat(ours, -1)
    blocks = table.numel()
    if blocks < k.shape[0]:
        named = table.flatten().long().clamp(0, k.shape[0] - 1)  # unread entries may be anything
        k, v = k[named], v[named]
        table = torch.arange(blocks, device=k.device).view(table.shape)
    wide = torch.cat([v, k], -1)  # the order of latent caches, so that a copy gives their bits
    return Cache(wide, v, cache.lengths, table, cache.starts), torch.cat([qv, q], -1)


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


def check_lengths(cache: Cache, name: str, new: int | Tensor = 0) -> None:
    """Lengths and starts are possible, with room for new keys; looked at on the CPU only.

    ``name`` is the caller's argument that the lengths are from. ``new`` is how many keys are new,
    one number or integer [B].
    """
    if not cache.lengths.is_cpu:
        return
    lengths: list[int] = cache.lengths.tolist()
    fresh = new.tolist() if isinstance(new, Tensor) else [new] * len(lengths)
    for b, (length, its) in enumerate(zip(lengths, fresh, strict=True)):
        room = cache.capacity - its
        if not 0 <= length <= room:
            held = f"the cache has {cache.capacity} rows"
            required = f"in [0, {room}]: {held}" + (f", and {its} are new" if its else "")
            raise InvalidArgument(name, f"{length} for sequence {b}", required)
    if cache.starts is not None and bool((cache.starts < 0).any()):
        raise InvalidArgument("cache_leftpad", str(cache.starts.tolist()), "numbers of 0 or more")


def check_blocks(cache: Cache, new: int | Tensor = 0, name: str = "block_table") -> None:
    """The table names blocks that there are, where sequences have keys; on the CPU only.

    ``check_lengths`` has looked at it.
    """
    if not cache.table.is_cpu:
        return
    held, size = cache.k.shape[:2]
    check_entries(name, cache.table, cache.lengths + new, size, held)
