"""FlashAttention-4's calls (its module ``flash_attn.cute``) by ``tilewise.attention``.

The formula is that of flash-attn 2, without dropout and ALiBi. New:

* ``window_size`` has None for no bound.
* ``learnable_sink`` [Hq]: a logit of each head that joins the softmax's denominator; it has a
  gradient.
* ``seqused_q``, ``seqused_k``: how many rows and keys of each sequence count. Other rows give 0.
* ``page_table``: keys in pages, forward only.
* ``num_splits``, ``pack_gqa`` and ``deterministic`` change nothing: the same call gives the same
  bits.
* ``mask_mod``, ``score_mod``, ``aux_tensors`` and block sparsity are refused: they are programs of
  CuTe's own language. ``tilewise.attention`` takes masks and scores as plain functions.

Both calls return ``(out, lse)``; the lse is None unless ``return_lse`` asks for it.

Source: the signatures are those of flash-attn's folder ``flash_attn/cute``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilewise.compat.flash_attn.newer import Flags, Sequences, computed, refuse

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    mask_mod: Callable[..., Any] | None = None,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    mask_block_cnt: Tensor | None = None,
    mask_block_idx: Tensor | None = None,
    block_size: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of [B, S, H, D] tensors, with gradients; the lse is [B, Hq, M]."""
    refuse(
        mask_mod=mask_mod,
        full_block_cnt=full_block_cnt,
        full_block_idx=full_block_idx,
        mask_block_cnt=mask_block_cnt,
        mask_block_idx=mask_block_idx,
        block_size=block_size,
    )
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    found = computed(q, k, v, flags)
    return found.out, found.lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
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
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    cu_total_m_blocks: Tensor | None = None,
    cu_total_n_blocks: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed sequences [T, H, D] where cu_seqlens are there, else [B, S, H, D].

    The lse is [Hq, Tq] or [B, Hq, M].
    """
    refuse(
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        cu_total_m_blocks=cu_total_m_blocks,
        cu_total_n_blocks=cu_total_n_blocks,
        aux_tensors=aux_tensors,
    )
    flags = Flags(softmax_scale, causal, _numbers(window_size), softcap, sinks=learnable_sink)
    where = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    found = computed(q, k, v, flags, where)
    return found.out, found.lse if return_lse else None


def _numbers(window_size: Sequence[int | None]) -> list[Any]:
    return [-1 if each is None else each for each in window_size]
