"""FlashAttention-3's calls (its module ``flash_attn_interface``) by ``tilewise.attention``.

The formula is that of ``flash_attn_interface`` of flash-attn 2, without dropout and ALiBi. New:

* ``qv`` [..., Hq, Dv]: qv.v is added to q.k, before the scale, which is 1/sqrt(D + Dv) then.
* ``attention_chunk``: a row sees the keys of its own chunk, with its place counted from the end of
  the keys, as for ``causal``.
* ``q_descale``, ``k_descale``, ``v_descale``, floating [sequences, Hk]: what float8 numbers stand
  for. Forward only.
* ``seqused_q``, ``seqused_k``, integer [sequences]: how many rows and keys of each sequence count.
  Other rows give 0.
* ``num_splits``, ``pack_gqa``, ``sm_margin``, ``deterministic`` and ``scheduler_metadata`` change
  nothing: the same call gives the same bits.

The lse is -inf for a row without keys, as there.

Source: Shah et al., FlashAttention-3 (2024); the signatures are those of its ``hopper`` folder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.checks import FLOATING, INDICES, check_tensor
from tilewise.compat.flash_attn import kv_cache
from tilewise.compat.flash_attn.arguments import WindowSize, check_rank
from tilewise.compat.flash_attn.newer import Flags, Sequences, computed
from tilewise.errors import InvalidArgument
from tilewise.reference.merge import merge_partial
from tilewise.variants.lower import statistics_dtype

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of [B, S, H, D] tensors, with gradients of q, k, v and qv.

    See the top of this module for the arguments. ``return_attn_probs`` asks for ``(out, lse)``, lse
    [B, Hq, M].
    """
    flags = Flags(softmax_scale, causal, window_size, softcap, attention_chunk)
    descales = (q_descale, k_descale, v_descale)
    found = computed(q, k, v, flags, qv=qv, descales=descales)
    return tuple(found) if return_attn_probs else found.out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of one tensor, [B, S, 3, H, D].

    With ``num_heads_q`` the heads are one after the other, [B, S, Hq + 2 Hk, D].
    """
    if num_heads_q is None:
        check_rank("qkv", qkv, "[B, S, 3, H, D]")
        q, k, v = qkv.unbind(2)
    else:
        check_rank("qkv", qkv, "[B, S, H, D]")
        both = qkv.shape[2] - num_heads_q
        if both <= 0 or both % 2:
            required = f"heads of q and as many of k as of v, of {qkv.shape[2]} in all"
            raise InvalidArgument("num_heads_q", str(num_heads_q), required)
        q, k, v = torch.split(qkv, [num_heads_q, both // 2, both // 2], dim=2)
    flags = Flags(softmax_scale, causal, window_size, softcap, attention_chunk)
    found = computed(q, k, v, flags, descales=(q_descale, k_descale, v_descale))
    return tuple(found) if return_attn_probs else found.out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences [T, H, D], likewise; the lse is [Hq, Tq].

    ``cu_seqlens_q`` and ``cu_seqlens_k`` are integer [sequences + 1], ``seqused_q`` and
    ``seqused_k`` integer [sequences].
    """
    flags = Flags(softmax_scale, causal, window_size, softcap, attention_chunk)
    where = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    descales = (q_descale, k_descale, v_descale)
    found = computed(q, k, v, flags, where, qv, descales)
    return tuple(found) if return_attn_probs else found.out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write k and v into a cache in place, then compute attention to the cache. Forward only.

    Row i of a sequence sees some of its N keys n, counted from cache_leftpad on::

        out[i] = softmax_n(cap(softmax_scale (q[i].k[n] + qv[i].v[n]))) v[n]

    ``causal``, ``window_size`` and ``attention_chunk`` choose the keys, as in ``flash_attn_func``.
    The call is that of flash-attn 2 with more arguments. All of them may be combined, unless a line
    below says otherwise.

    Args:
        q: [B, M, Hq, D], or packed [Tq, Hq, D] with cu_seqlens_q.
        k_cache: [caches, S, Hk, D]; with a page_table [blocks, page size, Hk, D].
        v_cache: as k_cache, with width Dv.
        k: [B, new, Hk, D] to be appended, or packed [Tnew, Hk, D] with cu_seqlens_k_new; or None.
        v: as k, with width Dv.
        qv: as q, with width Dv, 16 bits or wider. Where k_cache and v_cache are the parts of one
            tensor, side by side, they are read in place; else a call copies the caches or pages of
            its sequences.
        rotary_cos: [rows, R/2]; rotates q and k, not qv, at the positions from cache_seqlens on.
            Not for float8.
        rotary_sin: as rotary_cos.
        cache_seqlens: integer [B] or one number: the keys in the cache before k is appended.
        cache_batch_idx: integer [B]: the cache of each sequence. Not with a page_table.
        cache_leftpad: integer [B]: the first key of each sequence. Chunks count from there.
        page_table: integer [B, P].
        cu_seqlens_q: integer [B + 1]: where packed queries start.
        cu_seqlens_k_new: integer [B + 1]: where packed new keys start; each sequence may have
            another number of them.
        max_seqlen_q: not looked at: cu_seqlens_q says it.
        rotary_seqlens: integer [B]: where rotary positions start, instead of at cache_seqlens. The
            tables need rows for these positions alone.
        q_descale: floating [B, Hk], what float8 numbers of q are to be multiplied by; None is 1.
            The caches, k and v are float8 too then, and the output is bfloat16.
        k_descale: likewise of keys, in the cache and new.
        v_descale: likewise of values.
        softmax_scale: 1/sqrt(D) if None, beside qv 1/sqrt(D + Dv).
        causal: row i sees the keys up to i + N - M.
        window_size: (left, right); -1 for no bound.
        attention_chunk: above 0, a row sees the keys of its own chunk of so many. q is rotated as
            beside a window then.
        softcap: above 0, scores are capped to it.
        rotary_interleaved: pairs are the channels 0 and 1, ...; False: 0 and R/2, ...
        scheduler_metadata: int32 [0] of ``get_scheduler_metadata``; changes nothing.
        num_splits: changes nothing.
        pack_gqa: changes nothing.
        sm_margin: changes nothing.
        return_softmax_lse: ask for (out, lse).

    Returns:
        out [B, M, Hq, Dv] or [Tq, Hq, Dv]; where asked for with the lse [B, Hq, M] or [Hq, Tq].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: qv or a rotation in float8.
    """
    found = kv_cache.over_cache(
        q,
        (k_cache, v_cache),
        (k, v),
        kv_cache.Where(
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            cu_seqlens_q,
            cu_seqlens_k_new,
            "page_table",
        ),
        kv_cache.Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        Flags(softmax_scale, causal, window_size, softcap, attention_chunk),
        qv=qv,
        descales=(q_descale, k_descale, v_descale),
    )
    return (found.out, found.lse) if return_softmax_lse else found.out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Join attention over separate sets of keys, the splits, into that over all of them.

    Of one row::

        lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

    A split with lse -inf has seen no key of the row: its output is not read. A row that none saw
    has 0 and -inf. ``tilewise.merge`` is the same for results of ``tilewise.attention``.

    Args:
        out_partial: floating [splits, B, S, H, Dv].
        lse_partial: floating [splits, B, S, H], natural logarithms, on the same device.
        out: [B, S, H, Dv] to be written; None makes one.
        out_dtype: of a new one; None takes that of out_partial.

    Returns:
        out [B, S, H, Dv] and lse [B, S, H], in float32 (float64 for lse_partial in float64).

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, or no split.
        InvalidType: what is no tensor.
    """
    required = "a floating tensor [splits, B, S, H, Dv], 1 split or more"
    check_tensor("out_partial", out_partial, required, FLOATING)
    if out_partial.dim() != 5 or len(out_partial) == 0:
        raise InvalidArgument("out_partial", f"shape {tuple(out_partial.shape)}", required)
    shape, device = tuple(out_partial.shape[:-1]), out_partial.device.type
    required = f"a floating tensor {list(shape)} on {out_partial.device}"
    check_tensor("lse_partial", lse_partial, required, FLOATING, shape=shape, device=device)
    wide = statistics_dtype(lse_partial.dtype)
    by_heads = out_partial.to(wide).transpose(2, 3), lse_partial.to(wide).transpose(2, 3)
    found, lse = (x.transpose(1, 2) for x in merge_partial(*(list(x) for x in by_heads)))
    if out is None:
        return found.to(out_dtype or out_partial.dtype), lse
    required = f"a floating tensor {list(found.shape)} on {out_partial.device}"
    check_tensor("out", out, required, FLOATING, shape=tuple(found.shape), device=device)
    return out.copy_(found), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Return an empty int32 [0] on the device of ``cache_seqlens``, int32 or int64 [B].

    Calls need no plan: how they split keys follows from the number of keys alone. They take this
    tensor as ``scheduler_metadata``.

    Raises:
        InvalidArgument, InvalidType: cache_seqlens is no such tensor.
    """
    check_tensor("cache_seqlens", cache_seqlens, "an int32 or int64 tensor [B]", INDICES)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
