"""xformers' attention functions: their names, orders, defaults and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.compat.gradients import forward_only
from tilewise.compat.xformers.calls import as_list, backward, divided, read_call, run
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import AttentionResult
from tilewise.merging import merge

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

_FIX = "call memory_efficient_attention, or memory_efficient_attention_backward yourself"


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return softmax(scale q k^T + bias) v, without a tensor of M x N.

    Heads of keys and values that are expanded from one (stride 0) are read as that one.

    Args:
        query: [B, M, H, K], [B, M, K] for one head, or [B, M, G, H, K] for G groups of H heads.
        key: [B, N, ..., K], with the heads of query.
        value: [B, N, ..., Kv].
        attn_bias: None; a floating tensor to add, [B, heads, M, N] in the layout's heads; or a bias
            of ``attn_bias``, of xformers itself or of tilewise. A row that sees no key gives 0.
        p: the probability in [0, 1) of dropping a pair.
        scale: 1/sqrt(K) if None.
        op: names kernels of xformers: of no effect here.
        output_dtype: of the output. A wider one than query's is computed in.

    Returns:
        [B, M, ..., Kv]. Gradients are defined for query, key, value and a tensor in the bias.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: numbers in 4 or 8 bits, or a class that derives from a bias.

    Source: Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021; Lefaudeux et al.,
    xFormers, 2022.
    """
    out, _ = run(read_call(query, key, value, attn_bias, p, scale, output_dtype))
    return out if output_dtype is None else out.to(output_dtype)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``memory_efficient_attention`` without a gradient: a backward pass raises.

    Returns:
        [B, M, ..., Kv].
    """
    given = {"query": query, "key": key, "value": value}
    with torch.no_grad():
        call = (query, key, value, attn_bias, p, scale)
        out = memory_efficient_attention(*call, output_dtype=output_dtype)
    return forward_only("memory_efficient_attention_forward", _FIX, (out,), given)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and lse, for ``memory_efficient_attention_backward``.

    Returns:
        The output of ``memory_efficient_attention``, and its natural-log sums of exponentials
        [B, H, M] or [B, G, H, M], in float32 (float64 for float64); -inf for a row without keys.
        Of sequences in a batch of one: [1, H, rows].

    Raises:
        Unsupported: dropout, or a backward pass through the results.
    """
    _refuse_dropout(p)
    given = {"query": query, "key": key, "value": value}
    with torch.no_grad():
        out, lse = run(read_call(query, key, value, attn_bias, 0.0, scale, output_dtype))
        out = out if output_dtype is None else out.to(output_dtype)
    what = "memory_efficient_attention_forward_requires_grad"
    out, lse = forward_only(what, _FIX, (out, lse), given)
    return out, lse


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients, shaped as query, key and value.

    Args:
        grad: [B, M, ..., Kv], of the output.
        output: [B, M, ..., Kv], of the forward pass; it and lse may be of more keys than these,
            merged.
        lse: [B, H, M] or [B, G, H, M], of the forward pass; what it has behind the last row is not
            read.
        query: [B, M, ..., K], as in the forward pass, and so the rest.
        key: as there.
        value: as there.
        attn_bias: as there; a tensor gets no gradient.
        p: 0.
        scale: as there.
        op: of no effect.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: dropout.
    """
    _refuse_dropout(p)
    due = (*query.shape[:-1], value.shape[-1])
    for name, tensor in (("grad", grad), ("output", output)):
        if tuple(tensor.shape) != due:
            raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", f"{due}, as of the output")
    rows = (query.shape[0], *(query.shape[2:-1] or (1,)))
    if tuple(lse.shape[:-1]) != rows or lse.shape[-1] < query.shape[1]:
        required = f"{(*rows, query.shape[1])}, as of the rows"
        raise InvalidArgument("lse", f"shape {tuple(lse.shape)}", required)
    with torch.no_grad():
        call = read_call(query, key, value, attn_bias, 0.0, scale, output.dtype, shared=False)
        found = backward(call, grad, output, lse)
        of_q, of_k, of_v = (
            x.reshape(like.shape).to(like.dtype)
            for x, like in zip(found, (query, key, value), strict=True)
        )
    return of_q, of_k, of_v


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and lse over a part of the keys, for ``merge_attentions``.

    Both have gradients. The output is float32 where output_dtype is None and query is not float64,
    and is then computed in float32.

    Returns:
        The output [B, M, ..., Kv], and lse [B, H, M] or [B, G, H, M].

    Raises:
        Unsupported: dropout.
    """
    _refuse_dropout(p)
    if output_dtype is None:
        output_dtype = torch.promote_types(query.dtype, torch.float32)
    out, lse = run(read_call(query, key, value, attn_bias, 0.0, scale, output_dtype))
    return out.to(output_dtype), lse


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return attention over the union of disjoint keys from the attention over each of them.

    Args:
        attn_split: outputs [B, M, H, K] or [B, M, G, H, K], in a list or stacked.
        lse_split: their lse [B, H, M] or [B, G, H, M], likewise; what one has behind the last row
            is not read.
        write_lse: False gives None for the lse.
        output_dtype: of the output; that of the parts if None.

    Returns:
        The output and lse over all keys, as each part has them; with gradients.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    outs, lses = as_list("attn_split", attn_split), as_list("lse_split", lse_split)
    if not outs or len(outs) != len(lses):
        came = f"{len(lses)} for {len(outs)} outputs"
        raise InvalidArgument("lse_split", came, "one for each output, and at least one")
    first = outs[0]
    if first.dim() not in (4, 5):
        required = "[B, M, H, K] or [B, M, G, H, K]"
        raise InvalidArgument("attn_split[0]", f"shape {tuple(first.shape)}", required)
    heads = tuple(first.shape[2:-1])
    due = (first.shape[0], *heads, first.shape[1])
    wide = first.dtype if output_dtype is None else torch.promote_types(first.dtype, output_dtype)
    parts = []
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape:
            required = f"{tuple(first.shape)}, as of the first"
            raise InvalidArgument(f"attn_split[{i}]", f"shape {tuple(out.shape)}", required)
        if lse.dim() != len(due) or tuple(lse.shape[:-1]) != due[:-1] or lse.shape[-1] < due[-1]:
            raise InvalidArgument(f"lse_split[{i}]", f"shape {tuple(lse.shape)}", f"{due}")
        rows = out.to(wide).flatten(2, -2).transpose(1, 2)
        parts.append(AttentionResult(rows, lse.flatten(1, -2)[..., : due[-1]], None))
    found = merge(*parts)
    assert found.lse is not None
    out = divided(found.out.transpose(1, 2), 2, heads).to(output_dtype or first.dtype)
    return out, divided(found.lse, 1, heads) if write_lse else None


def _refuse_dropout(p: float) -> None:
    if p:
        fix = "call memory_efficient_attention, which has dropout"
        raise Unsupported(f"p = {p} without autograd", fix=fix)
