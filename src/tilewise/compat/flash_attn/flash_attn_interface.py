"""flash-attn's calls over whole tensors and packed sequences, by ``tilewise.attention``.

All of them compute, for query row i and key j of a sequence with M rows and N keys::

    s[i, j] = softcap * tanh(softmax_scale * q[i].k[j] / softcap) - slope * |i + N - M - j|
    out[i]  = sum_j dropout(softmax(s[i])[j]) v[j]

The sums run over the keys that these keywords allow:

* ``causal``: j <= i + N - M.
* ``window_size``: i + N - M - left <= j <= i + N - M + right, with -1 for no bound.

A row that sees no key gives 0.

What they share:

* float32 and float64 work besides float16 and bfloat16. Head widths may be any number, v's may
  differ from q's, and strides are free. Dropout works together with softcap.
* ``window_size`` may be an integer tensor [2], or have integers of numpy or of tensors in it.
* ``dropout_p`` draws its seed from the generator of q's device: ``torch.manual_seed`` repeats it.
* ``deterministic`` changes nothing: the same call gives the same bits, gradients too.
* ``return_attn_probs`` gives ``(out, softmax_lse, S_dmask)``. ``softmax_lse`` is float32, the
  natural-log sum of exponentials, with a gradient. For a row without keys it is +inf, as in
  flash-attn 2 (``tilewise.attention`` gives -inf). Without dropout, ``S_dmask`` is empty. With
  dropout, it is the probabilities before dropout in q's dtype, negative where dropped. It takes
  **N x N memory**, because the reference computes it a second time, for tests only. It has no
  gradient.
* Arguments of later versions (descales, ``qv``, sinks) are in ``version_3.py`` and ``cute.py``.

The passes by themselves, ``_flash_attn_forward`` and others, are in ``passes.py``.

Source: Dao, FlashAttention-2 (2023); the signatures are those of flash-attn 2.8.3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tilewise.compat.flash_attn.arguments import WindowSize, check_rank, read
from tilewise.compat.flash_attn.calls import (
    Packing,
    check_dense,
    check_packed,
    paged,
    whole,
)
from tilewise.compat.flash_attn.kv_cache import flash_attn_with_kvcache
from tilewise.compat.flash_attn.passes import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from tilewise.errors import InvalidArgument

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _like(call: Callable[..., Any], **renamed: str | None) -> Callable[[_Function], _Function]:
    """Give a function the signature of a call, with some parameters renamed and some (None) out."""
    named = [
        (renamed.get(name, name), each) for name, each in inspect.signature(call).parameters.items()
    ]
    parameters = [each.replace(name=name) for name, each in named if name is not None]

    def signed(function: _Function) -> _Function:
        function.__dict__["__signature__"] = inspect.Signature(parameters)
        return function

    return signed


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of [B, S, H, D] tensors, with gradients of q, k and v.

    Args:
        q: [B, M, Hq, D].
        k: [B, N, Hk, D]; Hq a multiple of Hk (head h reads h // (Hq/Hk)).
        v: [B, N, Hk, Dv].
        dropout_p: the probability of dropping a pair, in [0, 1).
        softmax_scale: 1/sqrt(D) if None.
        causal: row i sees the keys up to i + N - M (the bottom right corner).
        window_size: (left, right) keys around i + N - M that a row sees; -1 for no bound.
        softcap: above 0, scores are capped to it.
        alibi_slopes: floating [Hq] or [B, Hq]; no gradient.
        deterministic: always so.
        return_attn_probs: ask for ``(out, softmax_lse, S_dmask)``.

    Returns:
        out [B, M, Hq, Dv]; where asked for, with softmax_lse [B, Hq, M] and S_dmask [B, Hq, M, N].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    check_dense(q=q, k=k, v=v)
    flags = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options = read(q.shape[0], q.shape[2], *flags)
    found = whole(q, k, v, None, options, lse=return_attn_probs, signed=return_attn_probs)
    return (found.out, found.lse, found.signed) if return_attn_probs else found.out


@_like(flash_attn_func, k="kv", v=None)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *rest: Any, **flags: Any) -> Any:
    """``flash_attn_func`` of keys and values in one tensor, kv [B, N, 2, Hk, D]."""
    return flash_attn_func(q, *_unpacked("kv", kv, "[B, S, 2, H, D]", 2), *rest, **flags)


@_like(flash_attn_func, q="qkv", k=None, v=None)
def flash_attn_qkvpacked_func(qkv: Tensor, *rest: Any, **flags: Any) -> Any:
    """``flash_attn_func`` of one tensor, qkv [B, S, 3, H, D]."""
    return flash_attn_func(*_unpacked("qkv", qkv, "[B, S, 3, H, D]", 3), *rest, **flags)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: rows of sequence i see the keys of sequence i.

    Args:
        q: [Tq, Hq, D].
        k: [Tk, Hk, D]; with a block_table pages [blocks, page size, Hk, D], of any page size.
        v: as k, with width Dv.
        cu_seqlens_q: integer [sequences + 1], from 0 to Tq.
        cu_seqlens_k: integer [sequences + 1], from 0 to Tk.
        max_seqlen_q: rows of the longest sequence; only S_dmask is sized by it.
        max_seqlen_k: keys of the longest sequence; only S_dmask is sized by it.
        dropout_p: as ``flash_attn_func``, like all up to return_attn_probs.
        softmax_scale: 1/sqrt(D) if None.
        causal: bottom right corner of each sequence.
        window_size: (left, right); -1 for no bound.
        softcap: above 0, scores are capped to it.
        alibi_slopes: floating [Hq] or [sequences, Hq].
        deterministic: always so.
        return_attn_probs: ask for ``(out, softmax_lse, S_dmask)``.
        block_table: integer [sequences, blocks]: the pages of each sequence's keys. Forward only (a
            backward pass raises ``Unsupported``), without dropout.

    Returns:
        out [Tq, Hq, Dv]; where asked for, with softmax_lse [Hq, Tq] and S_dmask
        [sequences, Hq, max_seqlen_q, max_seqlen_k].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: dropout with a block_table.
    """
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    check_packed(packing, block_table is not None, q, k=k, v=v)
    flags = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    options = read(cu_seqlens_q.shape[0] - 1, q.shape[1], *flags)
    if block_table is not None:
        found = paged(q, k, v, packing, options, block_table)
    else:
        found = whole(q, k, v, packing, options, lse=return_attn_probs, signed=return_attn_probs)
    return (found.out, found.lse, found.signed) if return_attn_probs else found.out


@_like(flash_attn_varlen_func, k="kv", v=None, block_table=None)
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *rest: Any, **flags: Any) -> Any:
    """``flash_attn_varlen_func`` of keys and values in one tensor, kv [Tk, 2, Hk, D]."""
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, "[T, 2, H, D]", 2), *rest, **flags)


@_like(
    flash_attn_varlen_func,
    q="qkv",
    k=None,
    v=None,
    cu_seqlens_q="cu_seqlens",
    cu_seqlens_k=None,
    max_seqlen_q="max_seqlen",
    max_seqlen_k=None,
    block_table=None,
)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *rest: Any, **flags: Any
) -> Any:
    """``flash_attn_varlen_func`` of one tensor, qkv [T, 3, H, D], and one set of sequences."""
    q, k, v = _unpacked("qkv", qkv, "[T, 3, H, D]", 3)
    check_rank("cu_seqlens", cu_seqlens, "[sequences + 1]")
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *packing, *rest, **flags)


def _unpacked(name: str, tensor: Tensor, shape: str, count: int) -> Any:
    """Return the views of a packed tensor, whose third dimension from the end counts them."""
    check_rank(name, tensor, shape)
    if tensor.shape[-3] != count:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", shape)
    return tensor.unbind(-3)
