"""``flash_attn_with_kvcache``: append to a cache, rotate, attend; forward only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import check_both, check_whole
from tilewise.compat.flash_attn.arguments import (
    WindowSize,
    as_flash_attn,
    bounds,
    check_computed_in,
    check_rank,
    is_local,
    read,
)
from tilewise.compat.flash_attn.cache import (
    Cache,
    More,
    attend,
    check_blocks,
    check_integers,
    check_lengths,
    check_starts,
    with_values,
)
from tilewise.compat.flash_attn.layers.rotary import check_tables, numbered, rotate_at
from tilewise.compat.flash_attn.newer import (
    NO_DESCALES,
    Descales,
    Flags,
    read_descales,
    with_qv,
)
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import AttentionResult


class Where(NamedTuple):
    """Where the queries, new keys and cached keys of B sequences are."""

    # Integer [B] or one number: the keys in the cache; None for all of its rows.
    lengths: int | Tensor | None
    caches: Tensor | None  # integer [B], the cache of each sequence, or None
    leftpad: Tensor | None  # integer [B], the first key of each sequence, or None
    table: Tensor | None  # integer [B, P] of pages, or None
    starts_q: Tensor | None = None  # integer [B + 1] of packed queries, or None
    starts_new: Tensor | None = None  # integer [B + 1] of packed new keys, or None
    table_name: str = "block_table"  # the caller's name of ``table``


class Rotary(NamedTuple):
    """The tables of positions, [rows, R/2] each, and how to read them."""

    cos: Tensor | None  # or None for no rotation
    sin: Tensor | None  # with cos
    interleaved: bool  # pairs are neighbours
    # Integer [B], the position of the first new key; None for the cache's length.
    starts: Tensor | None = None


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
    check_whole("num_splits", num_splits)
    result = over_cache(
        q,
        (k_cache, v_cache),
        (k, v),
        Where(cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        Rotary(rotary_cos, rotary_sin, rotary_interleaved),
        Flags(softmax_scale, causal, window_size, softcap),
        alibi_slopes=alibi_slopes,
    )
    if not return_softmax_lse:
        return result.out
    return result.out, as_flash_attn(result.lse)


def over_cache(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    where: Where,
    rotary: Rotary,
    flags: Flags,
    *,
    alibi_slopes: Tensor | None = None,
    qv: Tensor | None = None,
    descales: Descales = NO_DESCALES,
) -> AttentionResult:
    """``flash_attn_with_kvcache`` of flash-attn 2 and 3: see there for the arguments.

    Everything that may be refused is refused before anything is written.

    Returns:
        out as q, with width Dv; lse [B, Hq, M] or [Hq, Tq], -inf for a row without keys.
    """
    (k_cache, v_cache), (k, v), starts = caches, new, where.starts_q
    check_rank("q", q, "[B, S, H, D]" if starts is None else "[T, H, D]")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, tensor, "[B, S, H, D]")
    if starts is not None:
        check_starts("cu_seqlens_q", starts, None, q)
    count = q.shape[0] if starts is None else starts.shape[0] - 1
    window = bounds(flags.window_size)
    numbers = (flags.softmax_scale, flags.causal, window, flags.softcap, alibi_slopes)
    options = read(count, q.shape[-2], 0.0, *numbers)
    chunk = check_whole("attention_chunk", flags.attention_chunk, 0)
    check_computed_in(q.dtype, options)
    cache = _cache(q, count, k_cache, v_cache, where)
    scales = read_descales(descales, q, count, k_cache.shape[2])
    if qv is not None:
        options = with_qv(q, v_cache.shape[3], qv, options)
    check_both("k", k, "v", v)
    check_both("rotary_cos", rotary.cos, "rotary_sin", rotary.sin)
    if k is None:
        for name, unwanted, why in (
            ("rotary_cos", rotary.cos, "what is in the cache is rotated already"),
            ("cu_seqlens_k_new", where.starts_new, "there is nothing to append"),
        ):
            if unwanted is not None:
                raise InvalidArgument(name, "a tensor", f"None without k: {why}")
    if rotary.starts is not None:
        if rotary.cos is None:
            raise InvalidArgument("rotary_seqlens", "a tensor", "None without rotary_cos")
        check_integers("rotary_seqlens", rotary.starts, (count,), q.device.type)
    if k is not None and where.lengths is None:
        raise InvalidArgument("cache_seqlens", "None", "where k and v are to be written")
    fresh: int | Tensor = 0
    if k is not None:
        fresh = _checked_new(k, v, cache, where.starts_new)
        for name, held in (("k_cache", k_cache), ("v_cache", v_cache)):
            _check_writable(name, held)
    check_lengths(cache, "cache_seqlens", fresh)
    if where.table is not None:
        check_blocks(cache, fresh, where.table_name)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "qv": qv}
    if k is not None and v is not None:
        if rotary.cos is not None and rotary.sin is not None:
            local = is_local(flags.causal, window) or chunk > 0
            q, k = _rotated(q, k, (rotary.cos, rotary.sin), cache, where, local, rotary)
        cache = _append(cache, k, v, where.starts_new, fresh)
    if qv is not None:
        with torch.no_grad():
            cache, q = with_values(cache, q, qv)
    given["alibi_slopes"] = alibi_slopes
    return attend(q, cache, options, given, starts, More(None, chunk, scales))


def _cache(q: Tensor, batch: int, k_cache: Tensor, v_cache: Tensor, where: Where) -> Cache:
    """Return the cache of so many sequences as it is before anything is appended."""
    device, index, lengths = q.device, where.caches, where.lengths
    caches, rows = k_cache.shape[:2]
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype or tensor.device != device:
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"q's, {q.dtype} on {device}")
    heads, width = k_cache.shape[2:]
    if width != q.shape[-1] or not heads or q.shape[-2] % heads:
        required = f"heads that divide q's {q.shape[-2]}, of q's width {q.shape[-1]}"
        raise InvalidArgument("k_cache", f"{heads} heads of width {width}", required)
    if tuple(v_cache.shape[:3]) != tuple(k_cache.shape[:3]):
        required = f"{tuple(k_cache.shape[:3])} as k_cache's first sizes"
        raise InvalidArgument("v_cache", f"shape {tuple(v_cache.shape)}", required)
    if rows == 0:
        raise InvalidArgument("k_cache", f"shape {tuple(k_cache.shape)}", "at least one row")
    if where.table is not None:
        if index is not None:
            required = f"None: the {where.table_name} says where the keys of a sequence lie"
            raise InvalidArgument(
                "cache_batch_idx", f"a tensor with a {where.table_name}", required
            )
        check_integers(where.table_name, where.table, (batch, None), device.type)
        table = where.table
    elif index is not None:
        check_integers("cache_batch_idx", index, (batch,), device.type)
        outside = (index < 0) | (index >= caches)
        if index.is_cpu and bool(outside.any()):
            came, required = str(index.tolist()), f"numbers of the {caches} caches"
            raise InvalidArgument("cache_batch_idx", came, required)
        table = index[:, None]
    else:
        if caches < batch:
            required = f"one for each of q's {batch} sequences, or a cache_batch_idx"
            raise InvalidArgument("k_cache", f"{caches} caches", required)
        table = torch.arange(batch, device=device)[:, None]
    if where.leftpad is not None:
        check_integers("cache_leftpad", where.leftpad, (batch,), device.type)
    if lengths is None:
        lengths = table.shape[1] * rows
    if type(lengths) is int:
        lengths = torch.full((batch,), lengths, dtype=torch.int64, device=device)
    else:
        check_integers("cache_seqlens", lengths, (batch,), device.type)
    assert isinstance(lengths, Tensor)
    return Cache(k_cache, v_cache, lengths, table, where.leftpad)


def _rotated(
    q: Tensor,
    k: Tensor,
    pair: tuple[Tensor, Tensor],
    cache: Cache,
    where: Where,
    local: bool,
    rotary: Rotary,
) -> tuple[Tensor, Tensor]:
    """Queries and new keys at their places: those after what the cache holds, or from starts on."""
    if q.dtype.itemsize == 1:
        fix = "rotate q and k in 16 bits, then quantise them"
        raise Unsupported("rotary_cos beside float8, which would be rounded again", fix=fix)
    check_tables(("rotary_cos", "rotary_sin"), pair, q.shape[-1])
    rows, needed = pair[0].shape[0], cache.capacity
    if rotary.starts is None and rows < needed:
        raise InvalidArgument("rotary_cos", f"{rows} rows", f"the cache's number of rows, {needed}")
    first = (cache.lengths if rotary.starts is None else rotary.starts).long()
    (its_k, at_k), (its_q, at_q) = numbered(k, where.starts_new), numbered(q, where.starts_q)
    places, own = first[its_k] + at_k, first[its_q] + at_q * int(local)
    if first.is_cpu:
        if rotary.starts is not None and bool((first < 0).any()):
            raise InvalidArgument("rotary_seqlens", str(first.tolist()), "numbers of 0 or more")
        last = max([int(each.max()) for each in (places, own) if each.numel()], default=0)
        if last >= rows:
            required = f"a row for each position up to {last}"
            raise InvalidArgument("rotary_cos", f"{rows} rows", required)
    interleaved = rotary.interleaved
    return rotate_at(q, *pair, own, interleaved), rotate_at(k, *pair, places, interleaved)


def _checked_new(k: Tensor, v: Tensor | None, cache: Cache, starts: Tensor | None) -> int | Tensor:
    """Return how many keys k and v bring to each sequence: one number, or integer [B]."""
    new: Tensor | None
    for name, new, held in (("k", k, cache.k), ("v", v, cache.v)):
        check_rank(name, new, "[B, S, H, D]" if starts is None else "[T, H, D]")
        assert new is not None
        lead = (cache.table.shape[0], k.shape[1]) if starts is None else (k.shape[0],)
        sizes = (*lead, *held.shape[2:])
        if tuple(new.shape) != sizes:
            raise InvalidArgument(name, f"shape {tuple(new.shape)}", f"{sizes}, as its cache")
        if new.dtype != held.dtype or new.device != held.device:
            came, due = f"{new.dtype} on {new.device}", f"{held.dtype} on {held.device}"
            raise InvalidArgument(name, came, f"{due}, as its cache")
    if starts is None:
        return k.shape[1]
    check_starts("cu_seqlens_k_new", starts, cache.table.shape[0], k)
    return starts.diff()


def _check_writable(name: str, held: Tensor) -> None:
    """No two rows of a cache that is written to are one in memory."""
    if any(size > 1 and step == 0 for size, step in zip(held.shape, held.stride(), strict=True)):
        came = f"shape {tuple(held.shape)} with strides {held.stride()}, an expanded tensor"
        required = "memory of its own for each element, as k and v are written to it: .contiguous()"
        raise InvalidArgument(name, came, required)


def _append(cache: Cache, k: Tensor, v: Tensor, starts: Tensor | None, new: int | Tensor) -> Cache:
    """Write k and v behind what the cache holds; the cache with its new lengths.

    ``new`` is how many keys they bring to each sequence, [B] where ``starts`` packs them.
    """
    sequence, number = numbered(k, starts)
    rows = cache.lengths.long()[sequence] + number
    slots = torch.zeros_like(rows)
    if cache.table.shape[1] != 1:
        size = cache.k.shape[1]
        slots, rows = rows // size, rows % size
    blocks = cache.table.long()[sequence, slots]
    with torch.no_grad():
        cache.k[blocks, rows] = k
        cache.v[blocks, rows] = v
    # Not _replace: torch 2.11's Dynamo cannot hold what that made over a break of the graph.
    return Cache(cache.k, cache.v, cache.lengths + new, cache.table, cache.starts)
