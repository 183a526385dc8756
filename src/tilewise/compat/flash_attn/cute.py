"""FlashAttention-4's calls (its module ``flash_attn.cute``) by ``tilewise.attention``.

The formula is that of flash-attn 2, without dropout and ALiBi. New:

* ``qv`` [..., Hq, Dv]: qv.v is added to q.k, before the scale, which is 1/sqrt(D + Dv) then. The
  lse has the heads last then, as there.
* ``window_size`` has None for no bound.
* ``learnable_sink`` [Hq]: a logit of each head that joins the softmax's denominator; it has a
  gradient.
* ``seqused_q``, ``seqused_k``, integer [sequences]: how many rows and keys of each sequence count.
  Other rows give 0.
* ``page_table``, integer [sequences, P]: keys in pages [blocks, page size, Hk, D], forward only.
* ``num_splits``, ``seqlen_k_per_split``, ``pack_gqa``, ``deterministic``, ``min_seqlen_k`` and
  ``scheduler_metadata`` change nothing: the same call gives the same bits.
* ``mask_mod``, ``score_mod``, what they read, and block sparsity are refused: they are programs of
  CuTe's own language. ``tilewise.attention`` takes masks and scores as plain functions.
* ``gather_kv_indices``, integer [B, M, K] or packed [Tq, K]: the keys that a row reads, in all
  heads. Entries count keys within the sequence. An entry below 0 or beyond the keys is none; other
  masks hide listed keys too. There, the call needs qv, one key head, int32 and K a multiple of 128,
  and takes no pages, window or softcap; here it may have all of them. A key that a list names twice
  counts once.
* ``gather_bwd_recompute_p`` (bool) and ``gather_bwd_token_chunk`` (a positive integer, or None)
  change nothing: the backward never stores probabilities.

Both calls return ``(out, lse)``; the lse is None unless ``return_lse`` asks for it.

Source: the signatures are those of flash-attn-4 4.0.0b36, in flash-attn's folder
``flash_attn/cute``. Its first betas had neither qv nor gather_kv_indices, and so other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from tilewise.checks import check_whole, named
from tilewise.compat.flash_attn.newer import Flags, Found, Sequences, computed, refuse
from tilewise.errors import InvalidArgument, InvalidType

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of [B, S, H, D] tensors, with gradients; the lse is [B, Hq, M].

    See the top of this module for the other arguments.
    """
    refuse(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    _check_backward(gather_kv_indices, gather_bwd_recompute_p, gather_bwd_token_chunk)
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    return _given(computed(q, k, v, flags, qv=qv, lists=gather_kv_indices), qv, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed sequences [T, H, D] where cu_seqlens are there, else [B, S, H, D].

    The lse is [Hq, Tq] or [B, Hq, M]. ``cu_seqlens_q`` and ``cu_seqlens_k`` are integer
    [sequences + 1]. See the top of this module for the other arguments.
    """
    refuse(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    _check_backward(gather_kv_indices, gather_bwd_recompute_p, gather_bwd_token_chunk)
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    where = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    found = computed(q, k, v, flags, where, qv, lists=gather_kv_indices)
    return _given(found, qv, return_lse)


def _given(found: Found, qv: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what a call gives: beside qv the heads of the lse are last."""
    lse = found.lse if qv is None else found.lse.transpose(-1, -2)
    return found.out, lse if return_lse else None


def _check_backward(lists: object, recompute_p: object, token_chunk: Any) -> None:
    """The arguments of the backward with lists are of their types, and None without lists."""
    chunk = "gather_bwd_token_chunk"
    if not isinstance(recompute_p, bool):
        raise InvalidType("gather_bwd_recompute_p", named(recompute_p), "True or False")
    if lists is None:
        for name, value in (("gather_bwd_recompute_p", recompute_p or None), (chunk, token_chunk)):
            if value is not None:
                fix = "Leave it out, or pass the lists of keys."
                raise InvalidArgument(name, str(value), "a call with gather_kv_indices", fix)
    if token_chunk is not None:
        whole = isinstance(token_chunk, Integral) and not isinstance(token_chunk, bool)
        check_whole(chunk, int(token_chunk) if whole else token_chunk, 1)


def _numbers(window_size: Sequence[int | None]) -> list[Any]:
    return [-1 if each is None else each for each in window_size]
