"""Calls of xformers in the terms of tilewise: layouts, biases, and the three ways to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.checks import FLOATING, check_tensor
from tilewise.compat.flash_attn.arguments import Options
from tilewise.compat.flash_attn.cache import Cache, attend, check_blocks, check_lengths
from tilewise.compat.gradients import Forward, gradients_of
from tilewise.compat.xformers.reading import Keys, Reading, read
from tilewise.engine.call import read_keywords
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import attention, attention_varlen
from tilewise.validation import check_probability, check_real
from tilewise.variants import scores

_LAYOUTS = "[B, M, K], [B, M, H, K] or [B, M, G, H, K]"


class Call(NamedTuple):
    """The arguments of a call, read."""

    q: Tensor  # [B, M, Hq, K]
    k: Tensor  # [B, N, Hk, K], of fewer heads where they were expanded
    v: Tensor  # [B, N, Hk, Kv]
    heads: tuple[int, ...]  # the sizes that the heads have at the caller's: (), (H,) or (G, H)
    said: Reading  # the bias
    p: float  # the probability of dropping a pair
    scale: float | None  # of q.k; None for 1/sqrt(K)

    def words(self) -> dict[str, Any]:
        """Return the keywords of ``tilewise.attention`` without dropout."""
        added = self.said.added
        score = None if added is None else scores.bias(added)
        return {"mask": self.said.band.mask(), "score": score, "scale": self.scale}


def read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any,
    p: float = 0.0,
    scale: float | None = None,
    wider: torch.dtype | None = None,
    shared: bool = True,
) -> Call:
    """Return the arguments of a call, checked.

    ``wider`` is a dtype to compute in, if it has more bits than query's. ``shared``: heads that
    were expanded from one are read as one.
    """
    said = read(attn_bias)
    _check_tensors(query, key, value)
    check_probability("p", p)
    if scale is not None:
        check_real("scale", scale, "a finite number, or None for 1/sqrt(K)")
    heads = tuple(query.shape[2:-1])
    q, k, v = query, key, value
    if wider is not None and wider.itemsize > q.dtype.itemsize:
        q, k, v = q.to(wider), k.to(wider), v.to(wider)
    if shared and all(_may_share(x) for x in (key, value)):
        k, v = _shared(k, v)
    q, k, v = (x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, -2) for x in (q, k, v))
    said = _with_heads(said, query, key)
    _check_sequences(said, query, key)
    return Call(q, k, v, heads, said, float(p), scale)


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output in the caller's layout, and lse [B, heads..., M]; [B, 1, M] without."""
    q, k, v, heads, said, p, _ = call
    words = call.words() | {"return_lse": True}
    if said.starts_q is None:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        found = attention(*turned, dropout_p=p, **words)
        out, lse = found.out.transpose(1, 2), found.lse
    else:
        q, k, v = q[0], k[0], v[0]
        if said.keys is not None and not p and not _wants_gradient(q, k, v):
            found = _in_place(call, said.keys)
        else:
            k, v, starts = _packed(said, k, v)
            found = attention_varlen(q, k, v, said.starts_q, starts, dropout_p=p, **words)
        out, lse = found.out[None], found.lse[None]
    if not heads:
        return out.squeeze(2), lse
    return divided(out, 2, heads), divided(lse, 1, heads)


def backward(call: Call, grad: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v of a call that shares no heads, in their shapes there."""
    q, k, v, _, said, _, scale = call
    of_rows = (x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, -2) for x in (grad, output))
    dout, out = (x.to(q.dtype) for x in of_rows)
    lse = lse.flatten(1, -2)[..., : q.shape[1]]
    words, starts, packed = call.words(), None, said.starts_q is not None
    if said.starts_q is None:
        q, k, v, dout, out = (x.transpose(1, 2) for x in (q, k, v, dout, out))
    else:
        q, k, v, dout, out = (x[0] for x in (q, k, v, dout, out))
        lse = lse[0]
        k, v, starts_k = _packed(said, k, v)
        starts = (said.starts_q, starts_k)
    keywords = read_keywords(words["mask"], words["score"], scale, 0.0, None, None, starts)
    dq, dk, dv = gradients_of(Forward(q, k, v, out, lse), dout, keywords, None)
    if not packed:
        return tuple(x.transpose(1, 2) for x in (dq, dk, dv))
    if said.keys is not None:
        rows, like = said.keys.rows(), (call.k[0], call.v[0])
        dk, dv = (
            torch.zeros_like(x).index_add(0, rows, dx) for x, dx in zip(like, (dk, dv), strict=True)
        )
    return dq[None], dk[None], dv[None]


def _packed(said: Reading, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of sequences one after the other, and the starts of sequences."""
    if said.keys is None:
        assert said.starts_k is not None
        return k, v, said.starts_k
    rows = said.keys.rows()
    if k.is_cpu:
        _check_rows(rows, k)
    starts = pad(said.keys.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return k.index_select(0, rows), v.index_select(0, rows), starts


def _in_place(call: Call, keys: Keys) -> Any:
    """Attention to the keys where they lie, in pages or in rows. Forward only."""
    k, v = call.k[0], call.v[0]
    if k.shape[0] % keys.page:
        fix = "The mask is for another cache, or for other pages."
        required = f"a multiple of the {keys.page} of a sequence or page"
        raise InvalidArgument("key", f"{k.shape[0]} rows", required, fix)
    table, starts, lengths = keys.table, None, keys.lengths
    if table is not None:
        starts, lengths = keys.starts, keys.lengths + keys.starts
    elif keys.page > 1:
        table = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    else:
        if k.is_cpu:
            _check_rows(keys.rows(), k)
        steps = torch.arange(max(keys.longest, 1), device=lengths.device)
        table = (keys.starts[:, None] + steps).clamp(max=max(k.shape[0] - 1, 0))
    pages = [divided(x, 0, (-1, keys.page)) for x in (k, v)]
    cache = Cache(pages[0], pages[1], lengths, table, starts)
    check_lengths(cache, "attn_bias")
    check_blocks(cache, name="attn_bias")
    said = call.said
    options = Options(said.band.mask(), 0.0, None, call.scale, 0.0)
    return attend(call.q[0], cache, options, {}, said.starts_q)


def _check_rows(rows: Tensor, k: Tensor) -> None:
    """There are as many rows as the bias names."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < k.shape[0]:
        required = f"the rows that attn_bias names, to {int(rows.max())}"
        raise InvalidArgument("key", f"{k.shape[0]} rows", required)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _may_share(x: Tensor) -> bool:
    """Return whether one head may get the gradient of all: ``expand`` adds them up anyway."""
    if not _wants_gradient(x):
        return True
    return not torch.compiler.is_compiling() and "Expand" in type(x.grad_fn).__name__


def _shared(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with one head for those that are expanded from one."""
    for dim in range(k.dim() - 2, 1, -1):
        if any(x.stride(dim) != 0 and x.shape[dim] != 1 for x in (k, v)):
            break
        k, v = (x.narrow(dim, 0, min(1, x.shape[dim])) for x in (k, v))
    return k, v


def _with_heads(said: Reading, query: Tensor, key: Tensor) -> Reading:
    """Return a bias whose added tensor, if there is one, is [B, Hq, M, N] or broadcasts to it."""
    if said.added is None:
        return said
    due = (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])
    required = f"a floating tensor {list(due)}, or 1 where it is the same for all"
    fix = "A boolean mask is torch.zeros_like(mask, dtype=...).masked_fill(~mask, -torch.inf)."
    added = check_tensor("attn_bias", said.added, required, FLOATING, fix=fix)
    if added.dim() == len(due) + 1 == 4:  # of one head, as of [B, M, 1, K]
        added = added.squeeze(1)
    fits = added.dim() == len(due)
    if not fits or any(came not in (1, size) for came, size in zip(added.shape, due, strict=True)):
        raise InvalidArgument("attn_bias", f"shape {tuple(said.added.shape)}", required)
    if len(due) == 3:
        added = added.unsqueeze(1)
    elif len(due) == 5:
        if 1 in added.shape[1:3]:
            added = added.expand(-1, *due[1:3], -1, -1)
        added = added.flatten(1, 2)
    return said._replace(added=added)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, f"a tensor {_LAYOUTS}", dims=(3, 4, 5))
        if hasattr(tensor, "dequant_func"):
            fix = "call tilewise.attention with q_scale, k_scale and v_scale"
            raise Unsupported(f"{name} as a ScaledTensor of xformers", fix=fix)
        if tensor.dtype is torch.int32:
            fix = "call tilewise.attention_paged, which takes pages in 8 bits with their scales"
            raise Unsupported(f"{name} in int32, xformers' packed 4 bits", fix=fix)
    for name, tensor in (("key", key), ("value", value)):
        like, came = key if name == "value" else query, tensor.shape
        due = [*query.shape[:1], key.shape[1], *query.shape[2:-1], "any"]
        if name == "key":
            due[-1] = query.shape[-1]
        if tensor.dim() != query.dim() or any(
            size not in ("any", its) for size, its in zip(due, came, strict=True)
        ):
            fix = "xformers does not broadcast: expand the heads of keys and values."
            raise InvalidArgument(name, f"shape {tuple(came)}", f"{due}, as of query", fix)
        if tensor.dtype != like.dtype or tensor.device != query.device:
            came_as = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came_as, f"{like.dtype} on {query.device}, as of query")


def _check_sequences(said: Reading, query: Tensor, key: Tensor) -> None:
    if said.starts_q is None:
        return
    for name, tensor in (("query", query), ("key", key)):
        if tensor.shape[0] != 1:
            fix = "Put the sequences one after the other: BlockDiagonalMask.from_tensor_list."
            required = "a batch of 1 beside a block diagonal bias"
            raise InvalidArgument(name, f"a batch of {tensor.shape[0]}", required, fix)
    if said.starts_q.device != query.device:
        came, required = f"a bias on {said.starts_q.device}", f"one on {query.device}, as of query"
        raise InvalidArgument("attn_bias", came, required, "Call attn_bias.to(query.device).")


def divided(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Return a tensor with one dimension divided into several."""
    found: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return found


def as_list(name: str, parts: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return parts that are stacked, or in a list, as a list."""
    if isinstance(parts, Tensor):
        return list(parts.unbind(0))
    return [check_tensor(f"{name}[{i}]", part, "a tensor") for i, part in enumerate(parts)]
