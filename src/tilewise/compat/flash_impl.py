"""tilewise as a flash-attention implementation of torch's own dispatcher.

``sdpa.py`` puts its name into torch's registry, as the providers of FA3 and FA4 do, and changes
nothing else. ``torch.nn.attention.activate_flash_attention_impl("tilewise")`` then switches our
kernels on, forward and backward, until ``restore_flash_attention_impl()``. They replace the
operator that ``F.scaled_dot_product_attention`` calls where torch chooses its flash path, and those
that ``torch.nn.attention.varlen`` calls, also on the CPU, where torch has no such kernels.

Torch still chooses the path. Calls that its flash path does not take never come here: dropout on
the CPU, Dv != D, masks that want a gradient, float64 on a GPU. ``tilewise.sdpa()`` takes them.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilewise.compat.flash_attn.arguments import as_flash_attn, read
from tilewise.compat.flash_attn.newer import Flags, Sequences, computed
from tilewise.compat.gradients import Forward, gradients_of
from tilewise.engine.call import Keywords, build_operands, cached_plan, read_keywords
from tilewise.errors import Unsupported
from tilewise.kernels import stats_of
from tilewise.plan import Plan
from tilewise.problem import Needs, Operands, Result
from tilewise.variants import masks, scores

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_GPU = "_scaled_dot_product_flash_attention"
_CAUSAL = masks.causal("top_left")
_ROWS_FIRST = (0, 2, 1, 3)  # the memory [B, S, H, D] of torch's gradients


def activate() -> SimpleNamespace:
    """Put our kernels in the place of torch's, until ``remove`` of what torch keeps is called."""
    libraries: Any = torch.library
    library = libraries.Library("aten", "IMPL")
    kernels: tuple[tuple[str, Any, str], ...] = (
        (_CPU, _forward_cpu, "CPU"),
        (f"{_CPU}_backward", _backward_cpu, "CPU"),
    )
    kernels += tuple((name, kernel, "CPU") for name, kernel in OF_SEQUENCES.items())
    if torch.version.cuda is not None or torch.version.hip is not None:
        kernels += tuple((name, kernel, "CUDA") for name, kernel in OF_SEQUENCES.items())
        kernels += (
            (_GPU, _forward_gpu, "CUDA"),
            (f"{_GPU}_backward", _backward_gpu, "CUDA"),
        )
    with warnings.catch_warnings():  # torch's own words on what the caller has just asked for
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel, key in kernels:
            library.impl(name, kernel, key, allow_override=True)
    return SimpleNamespace(remove=library._destroy)


def _planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> tuple[Plan, Operands]:
    if dropout_p:
        raise Unsupported(
            "dropout in the flash-attention implementation 'tilewise' of torch's dispatcher",
            fix="use `with tilewise.sdpa():`, which has it",
        )
    mask: Any = _CAUSAL if is_causal else None
    score: Any = None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        mask = masks.dense(attn_mask) if mask is None else mask & attn_mask
    elif attn_mask is not None:
        score = scores.bias(attn_mask.detach())
    keywords: Keywords = read_keywords(mask, score, scale, 0.0, None, None)
    plan = cached_plan(q, k, v, keywords)
    return plan, build_operands(plan.problem, q, k, v, keywords, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, *keywords: Any) -> Result:
    plan, operands = _planned(q, k, v, *keywords)
    found: Result = plan.forward(operands, "")
    # Torch promises an output in query's memory order.
    return found._replace(out=torch.empty_like(q).copy_(found.out))


def _backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *keywords: Any
) -> tuple[Tensor, ...]:
    plan, operands = _planned(q, k, v, *keywords)
    lse = lse.contiguous()
    needs = Needs(True, True, True, (False,) * len(operands.score_tensors))
    grads = plan.backward(
        operands, Result(out, lse, stats_of(lse, plan.row_max_unit)), grad_out, None, needs, None
    )
    assert grads.q is not None
    assert grads.k is not None
    assert grads.v is not None
    return grads.q, grads.k, grads.v


def _forward_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    found = _forward(query, key, value, dropout_p, is_causal, attn_mask, scale)
    return found.out, found.lse.transpose(1, 2).contiguous().transpose(1, 2)


def _backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    keywords = (dropout_p, is_causal, attn_mask, scale)
    grads = _backward(grad_out, out, logsumexp, query, key, value, *keywords)
    return tuple(
        torch.empty_permuted(x.shape, _ROWS_FIRST, dtype=x.dtype, device=x.device).copy_(x)
        for x in grads
    )


def _forward_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        raise Unsupported("return_debug_mask of torch's flash operator", fix="leave it False")
    found = _forward(query, key, value, dropout_p, is_causal, None, scale)
    seed = torch.zeros((2,), dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    return (found.out, found.lse.contiguous(), *lengths, seed, offset, query.new_empty(0))


def _backward_gpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    keywords = (dropout_p, is_causal, None, scale)
    grads = _backward(grad_out, out, logsumexp, query, key, value, *keywords)
    return tuple(
        torch.empty_like(like).copy_(x) for like, x in zip((query, key, value), grads, strict=True)
    )


def _refuse(dropout_p: float, alibi_slopes: Tensor | None, return_debug_mask: bool) -> None:
    """Refuse what torch's operators of sequences have besides."""
    asked = {
        "dropout_p": bool(dropout_p),
        "alibi_slopes": alibi_slopes is not None,
        "return_debug_mask": return_debug_mask,
    }
    for name, present in asked.items():
        if present:
            what = f"{name} in the flash-attention implementation 'tilewise' of sequences"
            raise Unsupported(what, fix="call tilewise.attention_varlen")


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    """Return a window as flash-attn has it: -1 for no bound."""
    return -1 if left is None else left, -1 if right is None else right


def _forward_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    _refuse(dropout_p, alibi_slopes, return_debug_mask)
    flags = Flags(scale, is_causal, _window(window_size_left, window_size_right), 0.0)
    where = Sequences(cum_seq_q, cum_seq_k, None, seqused_k, block_table)
    with torch.no_grad():
        out, lse = computed(query, key, value, flags, where)
        lse = as_flash_attn(lse).contiguous()
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out.contiguous(), lse, state, query.new_empty(0), query.new_empty(0)


def _forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    **keywords: Any,
) -> Tensor:
    found, lse, *_ = _forward_sequences(query, key, value, *positional, **keywords)
    out.copy_(found)
    return lse


def _backward_sequences(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    _refuse(dropout_p, None, False)
    window = _window(window_size_left, window_size_right)
    packed = None if cum_seq_q is None or cum_seq_k is None else (cum_seq_q, cum_seq_k)
    given = [query, key, value, out, grad_out]
    if packed is None:
        given = [x.transpose(1, 2) for x in given]
    q, k, v, result, dout = given
    with torch.no_grad():
        options = read(1, query.shape[-2], 0.0, scale, is_causal, window, 0.0, None)
        keywords = read_keywords(options.mask, None, scale, 0.0, None, None, packed)
        grads = gradients_of(Forward(q, k, v, result, logsumexp), dout, keywords, None)
    turned = grads if packed else [x.transpose(1, 2) for x in grads]
    return tuple(x.contiguous() for x in turned)


# By the operators' names; torch 2.11 has not all of them.
OF_SEQUENCES: dict[str, Any] = {
    name: kernel
    for name, kernel in {
        "_flash_attention_forward": _forward_sequences,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
        "_flash_attention_backward": _backward_sequences,
    }.items()
    if hasattr(torch.ops.aten, name)
}
