"""``flash_attn_with_kvcache``: append to a cache, rotate, attend; forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.checks import check_whole
from tilewise.compat.flash_attn.arguments import (
    WindowSize,
    as_flash_attn,
    bounds,
    check_rank,
    is_local,
    read,
)
from tilewise.compat.flash_attn.cache import (
    Cache,
    attend,
    check_blocks,
    check_integers,
    check_lengths,
)
from tilewise.compat.flash_attn.layers.tables import check_tables, rotate_at
from tilewise.errors import InvalidArgument


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write k and v into a cache in place, then compute attention to the cache.

    The keys of sequence b are the rows cache_leftpad[b] to cache_seqlens[b] of its cache, and then
    the new ones. The new keys are written to the rows from cache_seqlens[b] on. The formula,
    ``causal`` (the last query sees every key), ``window_size``, ``softcap`` and ``alibi_slopes``
    are those of ``flash_attn_func`` over these keys. Tensors may require gradients, but the result
    has none: a backward pass through it raises ``Unsupported`` (flash-attn silently leaves the
    gradients out).

    The cache is read in place. The exception is on the CPU with cache_leftpad: a cache whose rows
    are not evenly spaced in memory is copied.

    Args:
        q: [B, M, Hq, D].
        k_cache: [caches, S, Hk, D]; with a block_table [blocks, page size, Hk, D], of any page
            size (flash-attn: multiples of 256).
        v_cache: as k_cache, with width Dv.
        k: [B, new, Hk, D], to be appended; None for nothing.
        v: [B, new, Hk, Dv], with k.
        rotary_cos: [rows, R/2] with R <= D, any even R, and rows for all of the cache; rotates the
            first R channels of k at its rows of the cache and of q: row i of q at
            cache_seqlens + i where causal or a window is set, and else at cache_seqlens. Needs k.
        rotary_sin: as rotary_cos.
        cache_seqlens: integer [B] or one number: the keys in the cache before k is appended; all
            of its rows if None, which leaves no room for k.
        cache_batch_idx: integer [B]: the cache of each sequence; 0, 1, ... if None. Not with a
            block_table.
        cache_leftpad: integer [B]: the first key of each sequence; 0 if None. A block_table may
            come with it (flash-attn: may not). On a GPU the rows before it must hold finite
            numbers: they are masked there, and 0 times NaN is NaN.
        block_table: integer [B, P]: key n lies in row n % page size of block
            block_table[b, n // page size].
        softmax_scale: 1/sqrt(D) if None.
        causal: row i sees the keys up to i + N - M.
        window_size: (left, right); -1 for no bound.
        softcap: above 0, scores are capped to it.
        rotary_interleaved: pairs are the channels 0 and 1, 2 and 3, ...; False: 0 and R/2, ...
        alibi_slopes: floating [Hq] or [B, Hq].
        num_splits: changes nothing: how keys are split follows from their number alone, so that
            the result does not depend on who else is in the batch.
        return_softmax_lse: ask for (out, softmax_lse).

    Returns:
        out [B, M, Hq, Dv]; where asked for, with softmax_lse [B, Hq, M], +inf for a row that sees
        no key (as flash-attn 2).

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong. Values of tensors are
            looked at on the CPU only.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, tensor, "[B, S, H, D]")
    check_whole("num_splits", num_splits)
    window = bounds(window_size)
    flags = (softmax_scale, causal, window, softcap, alibi_slopes)
    options = read(q.shape[0], q.shape[2], 0.0, *flags)
    cache = _cache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    _check_both("k", k, "v", v)
    _check_both("rotary_cos", rotary_cos, "rotary_sin", rotary_sin)
    if rotary_cos is not None and k is None:
        required = "None without k: what is in the cache is rotated already"
        raise InvalidArgument("rotary_cos", "a tensor", required)
    if k is not None and cache_seqlens is None:
        raise InvalidArgument("cache_seqlens", "None", "where k and v are to be written")
    new = 0 if k is None else _checked_new(k, v, cache)
    check_lengths(cache, "cache_seqlens", new)
    if block_table is not None:
        check_blocks(cache, new)
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            local = is_local(causal, window)
            pair = (rotary_cos, rotary_sin)
            q, k = _rotated(q, k, pair, cache, local, rotary_interleaved)
        cache = _append(cache, k, v)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    result = attend(q, cache, options, {**given, "alibi_slopes": alibi_slopes})
    if not return_softmax_lse:
        return result.out
    return result.out, as_flash_attn(result.lse)


def _check_both(name: str, tensor: Tensor | None, other: str, its: Tensor | None) -> None:
    """They come together or not at all."""
    if (tensor is None) != (its is None):
        missing, there = (name, other) if tensor is None else (other, name)
        raise InvalidArgument(missing, "None", f"a tensor, as {there} is one")


def _cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Cache:
    """Return the cache as it is before anything is appended."""
    batch, device = q.shape[0], q.device
    caches, rows = k_cache.shape[:2]
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype or tensor.device != device:
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"q's, {q.dtype} on {device}")
    heads, width = k_cache.shape[2:]
    if width != q.shape[3] or not heads or q.shape[2] % heads:
        required = f"heads that divide q's {q.shape[2]}, of q's width {q.shape[3]}"
        raise InvalidArgument("k_cache", f"{heads} heads of width {width}", required)
    if tuple(v_cache.shape[:3]) != tuple(k_cache.shape[:3]):
        required = f"{tuple(k_cache.shape[:3])} as k_cache's first sizes"
        raise InvalidArgument("v_cache", f"shape {tuple(v_cache.shape)}", required)
    if rows == 0:
        raise InvalidArgument("k_cache", f"shape {tuple(k_cache.shape)}", "at least one row")
    if block_table is not None:
        if cache_batch_idx is not None:
            required = "None: the block_table says where the keys of a sequence lie"
            raise InvalidArgument("cache_batch_idx", "a tensor with a block_table", required)
        check_integers("block_table", block_table, (batch, None), device.type)
        table = block_table
    elif cache_batch_idx is not None:
        check_integers("cache_batch_idx", cache_batch_idx, (batch,), device.type)
        outside = (cache_batch_idx < 0) | (cache_batch_idx >= caches)
        if cache_batch_idx.is_cpu and bool(outside.any()):
            came, required = str(cache_batch_idx.tolist()), f"numbers of the {caches} caches"
            raise InvalidArgument("cache_batch_idx", came, required)
        table = cache_batch_idx[:, None]
    else:
        if caches < batch:
            required = f"one for each of q's {batch} sequences, or a cache_batch_idx"
            raise InvalidArgument("k_cache", f"{caches} caches", required)
        table = torch.arange(batch, device=device)[:, None]
    if cache_leftpad is not None:
        check_integers("cache_leftpad", cache_leftpad, (batch,), device.type)
    capacity = table.shape[1] * rows
    if cache_seqlens is None:
        cache_seqlens = capacity
    if type(cache_seqlens) is int:
        lengths = torch.full((batch,), cache_seqlens, dtype=torch.int64, device=device)
    else:
        check_integers("cache_seqlens", cache_seqlens, (batch,), device.type)
        assert isinstance(cache_seqlens, Tensor)
        lengths = cache_seqlens
    return Cache(k_cache, v_cache, lengths, table, cache_leftpad)


def _rotated(
    q: Tensor,
    k: Tensor,
    pair: tuple[Tensor, Tensor],
    cache: Cache,
    local: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Queries and new keys at their places: those after what the cache holds."""
    names = ("rotary_cos", "rotary_sin")
    check_tables(names, pair, q.shape[-1])
    rows, needed = pair[0].shape[0], cache.capacity
    if rows < needed:
        raise InvalidArgument("rotary_cos", f"{rows} rows", f"the cache's number of rows, {needed}")
    first = cache.lengths.long()[:, None]
    places = first + torch.arange(k.shape[1], device=q.device)
    own = first + torch.arange(q.shape[1], device=q.device) * int(local)
    if first.is_cpu:
        last = max([int(each.max()) for each in (places, own) if each.numel()], default=0)
        if last >= rows:
            required = f"a row for each position up to {last}"
            raise InvalidArgument("rotary_cos", f"{rows} rows", required)
    return rotate_at(q, *pair, own, interleaved), rotate_at(k, *pair, places, interleaved)


def _checked_new(k: Tensor, v: Tensor | None, cache: Cache) -> int:
    """Return how many keys k and v bring to each sequence; they fit the cache."""
    new: Tensor | None
    for name, new, held in (("k", k, cache.k), ("v", v, cache.v)):
        check_rank(name, new, "[B, S, H, D]")
        assert new is not None
        sizes = (cache.table.shape[0], k.shape[1], *held.shape[2:])
        if tuple(new.shape) != sizes:
            raise InvalidArgument(name, f"shape {tuple(new.shape)}", f"{sizes}, as its cache")
        if new.dtype != held.dtype or new.device != held.device:
            came, due = f"{new.dtype} on {new.device}", f"{held.dtype} on {held.device}"
            raise InvalidArgument(name, came, f"{due}, as its cache")
    return k.shape[1]


def _append(cache: Cache, k: Tensor, v: Tensor) -> Cache:
    """Write k and v behind what the cache holds; the cache with its new lengths."""
    size = cache.k.shape[1]
    rows = cache.lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)
    blocks = cache.table.long()
    if blocks.shape[1] != 1:
        blocks, rows = blocks.gather(1, rows // size), rows % size
    with torch.no_grad():
        cache.k[blocks, rows] = k
        cache.v[blocks, rows] = v
    # Not _replace: torch 2.11's Dynamo cannot hold what that made over a break of the graph.
    return Cache(cache.k, cache.v, cache.lengths + k.shape[1], cache.table, cache.starts)
