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
* ``gather_kv_indices`` is refused: ``tilewise.attention`` takes lists of keys.

Both calls return ``(out, lse)``; the lse is None unless ``return_lse`` asks for it.

Source: the signatures are those of flash-attn-4 4.0.0b36, in flash-attn's folder
``flash_attn/cute``. Its first betas had neither qv nor gather_kv_indices, and so other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilewise.compat.flash_attn.newer import Flags, Found, Sequences, computed, refuse

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
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    return _given(computed(q, k, v, flags, qv=qv), qv, return_lse)


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
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        gather_bwd_recompute_p=gather_bwd_recompute_p or None,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    where = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    return _given(computed(q, k, v, flags, where, qv), qv, return_lse)


def _given(found: Found, qv: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return what a call gives: beside qv the heads of the lse are last."""
    lse = found.lse if qv is None else found.lse.transpose(-1, -2)
    return found.out, lse if return_lse else None


def _numbers(window_size: Sequence[int | None]) -> list[Any]:
    return [-1 if each is None else each for each in window_size]
