"""What the interfaces of FlashAttention-3 and -4 share, beyond that of flash-attn 2."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_both, check_tensor, check_whole
from tilewise.compat.flash_attn.arguments import Options, WindowSize, bounds, check_rank, read
from tilewise.compat.flash_attn.cache import (
    Cache,
    More,
    attend,
    check_blocks,
    check_integers,
    check_starts,
    with_values,
)
from tilewise.compat.flash_attn.cache import check_lengths as check_cache
from tilewise.compat.flash_attn.layers.rotary import numbered
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import attention, attention_varlen
from tilewise.variants import masks
from tilewise.variants.float8 import FLOAT8


class Sequences(NamedTuple):
    """Where the rows and keys of sequences are."""

    # Integer [sequences + 1] of packed queries; None where they are not packed.
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None  # likewise of keys
    # Integer [sequences]: how many queries of each there are, instead of all.
    used_q: Tensor | None = None
    used_k: Tensor | None = None  # likewise of keys
    pages: Tensor | None = None  # integer [sequences, P] of keys in pages; None where they are not


WHOLE = Sequences()


class Flags(NamedTuple):
    """The numbers of a call, and its sinks."""

    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    attention_chunk: int = 0
    sinks: Tensor | None = None


Descales: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_DESCALES: Descales = (None, None, None)


class Found(NamedTuple):
    """A result, and its lse: float32 [B, Hq, M] or [Hq, Tq], -inf for a row without keys."""

    out: Tensor
    lse: Tensor


def computed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    flags: Flags,
    where: Sequences = WHOLE,
    qv: Tensor | None = None,
    descales: Descales = NO_DESCALES,
    lists: Tensor | None = None,
) -> Found:
    """Attention of [B, S, H, D] tensors or packed [T, H, D] ones.

    Queries are packed if ``where`` has their starts; keys and values likewise, or in pages [blocks,
    page size, Hk, D or Dv]. ``qv`` [..., Hq, Dv] is a second part of the queries, whose products
    with the values are added to the scores before the scale. ``descales``, floating [sequences,
    Hk], are what the numbers of float8 q, k and v stand for. All heads of a row read the keys in
    ``lists``, integer [B, M, K] or packed [Tq, K]. Where an entry is no key of the sequence there
    is none.
    """
    packed = where.starts_q is not None
    shape = "[T, H, D]" if packed else "[B, S, H, D]"
    keys = "[blocks, page size, H, D]" if where.pages is not None else shape
    for name, tensor, its in (("q", q, shape), ("k", k, keys), ("v", v, keys)):
        check_rank(name, tensor, its)
    count = q.shape[0] if where.starts_q is None else where.starts_q.shape[0] - 1
    if where.pages is None:
        check_both("cu_seqlens_q", where.starts_q, "cu_seqlens_k", where.starts_k)
    for name, used in (("seqused_q", where.used_q), ("seqused_k", where.used_k)):
        if used is not None:
            check_integers(name, used, (count,), q.device.type)
    _check_used("seqused_q", where.used_q, where.starts_q, q)
    if where.pages is None:
        _check_used("seqused_k", where.used_k, where.starts_k, k)
    options = _read(count, q.shape[-2], flags, where)
    scales = read_descales(descales, q, count, k.shape[-2])
    if qv is not None:
        options = with_qv(q, v.shape[-1], qv, options)
    if where.pages is not None:
        return _over_pages(q, k, v, qv, options, flags.sinks, where, scales, lists)
    if qv is not None:
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    words = options.keywords() | scales | {"sinks": flags.sinks, "return_lse": True}
    if lists is not None:
        words["keys"] = _read_lists(lists, q, k, where)
    if where.starts_q is not None and where.starts_k is not None:
        found = attention_varlen(q, k, v, where.starts_q, where.starts_k, **words)
        return Found(found.out, found.lse)
    found = attention(*(each.transpose(1, 2) for each in (q, k, v)), **words)
    return Found(found.out.transpose(1, 2), found.lse)


def refuse(**given: object) -> None:
    """Refuse arguments that are not None."""
    for name, value in given.items():
        if value is not None:
            raise Unsupported(
                f"{name} of FlashAttention-4, which its own compiler reads",
                fix="pass a mask, score or BlockMask to tilewise.attention",
            )


def _check_used(name: str, used: Tensor | None, starts: Tensor | None, rows: Tensor) -> None:
    """Sequences have as many rows as are used; looked at on the CPU only."""
    if used is None or not used.is_cpu:
        return
    lengths = torch.full_like(used, rows.shape[1]) if starts is None else starts.diff()
    if bool(((used < 0) | (used > lengths)).any()):
        required = f"from 0 to the sequences' lengths, {lengths.tolist()}"
        raise InvalidArgument(name, str(used.tolist()), required)


def _read(count: int, heads: int, flags: Flags, where: Sequences) -> Options:
    """Return the flags as a mask and a score; places count within what is used."""
    chunk = check_whole("attention_chunk", flags.attention_chunk, 0)
    numbers = (flags.softmax_scale, flags.causal, flags.window_size, flags.softcap, None)
    options = read(count, heads, 0.0, *numbers)
    used_q, used_k = where.used_q, where.used_k if where.pages is None else None
    if not chunk and used_q is None and used_k is None:
        return options
    left, right = bounds(flags.window_size)
    right = 0 if flags.causal else right

    def seen(b: Any, h: Any, m: Any, n: Any) -> Any:
        rows = m.length if used_q is None else used_q[b]
        keys = n.length if used_k is None else used_k[b]
        at = m + keys - rows
        found = (m < rows) & (n < keys)
        if left >= 0:
            found = found & (n >= at - left)
        if right >= 0:
            found = found & (n <= at + right)
        if chunk:
            found = found & (n // chunk == at // chunk)
        return found

    return options._replace(mask=masks.function(seen))


def with_qv(q: Tensor, width: int, qv: Tensor, options: Options) -> Options:
    """Return the options of a call beside qv, which fits q and values of this width."""
    sizes = (*q.shape[:-1], width)
    check_tensor("qv", qv, f"a tensor {list(sizes)} in {q.dtype}", (q.dtype,), shape=sizes)
    if q.dtype.itemsize == 1:
        raise Unsupported("qv in float8, whose scale may differ from q's", fix="pass 16 bits")
    scale = (q.shape[-1] + width) ** -0.5 if options.scale is None else options.scale
    return options._replace(scale=scale)


def read_descales(descales: Descales, q: Tensor, count: int, kv_heads: int) -> dict[str, Tensor]:
    """Return the descales that are there, [count, kv_heads], as the scales of heads."""
    found = {}
    for letter, each in zip("qkv", descales, strict=True):
        if each is not None:
            name, shape = f"{letter}_descale", (count, kv_heads)
            required = f"a floating tensor [{count}, {kv_heads}] on {q.device}"
            check_tensor(name, each, required, FLOATING, shape=shape, device=q.device.type)
            if q.dtype is not FLOAT8:
                fix = f"Multiply {letter} by it."
                raise InvalidArgument(name, f"one for {letter} of {q.dtype}", f"{FLOAT8}", fix)
            times = q.shape[-2] // kv_heads if letter == "q" else 1
            found[f"{letter}_scale"] = each.repeat_interleave(times, 1)
    return found


def _read_lists(lists: Tensor, q: Tensor, k: Tensor, where: Sequences) -> Tensor:
    """Return lists of keys as ``tilewise.attention`` takes them: [B, 1, M, K] or [1, Tq, K].

    They come as integer [B, M, K] or [Tq, K]. What is no key of its sequence becomes -1.
    """
    check_integers("gather_kv_indices", lists, (*q.shape[:-2], None), q.device.type)
    limits: int | Tensor = k.shape[1]
    if where.starts_q is not None:
        check_starts("cu_seqlens_q", where.starts_q, None, q)
    if where.starts_k is not None and where.starts_q is not None and where.pages is None:
        check_starts("cu_seqlens_k", where.starts_k, where.starts_q.shape[0] - 1, k)
        limits = where.starts_k.diff()
    limits = limits if where.used_k is None else where.used_k
    if isinstance(limits, Tensor):
        limits = limits[numbered(q, where.starts_q)[0]][..., None]
    return lists.masked_fill((lists < 0) | (lists >= limits), -1).unsqueeze(-3)


def _over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    options: Options,
    sinks: Tensor | None,
    where: Sequences,
    scales: dict[str, Tensor],
    lists: Tensor | None,
) -> Found:
    assert where.pages is not None
    device, starts = q.device.type, where.starts_q
    count = q.shape[0] if starts is None else starts.shape[0] - 1
    check_integers("page_table", where.pages, (count, None), device)
    used = where.used_k
    if used is None:
        used = torch.full((count,), where.pages.shape[1] * k.shape[1], device=q.device)
    cache = Cache(k, v, used, where.pages)
    check_cache(cache, "seqused_k")
    check_blocks(cache, name="page_table")
    given = {"q": q, "k": k, "v": v, "qv": qv, "learnable_sink": sinks}
    keys = None if lists is None else _read_lists(lists, q, k, where._replace(used_k=used))
    if qv is not None:
        with torch.no_grad():
            cache, q = with_values(cache, q, qv)
    found = attend(q, cache, options, given, starts, More(sinks, 0, scales, keys))
    assert found.lse is not None
    return Found(found.out, found.lse)
