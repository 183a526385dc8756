"""Convert a call of scaled_dot_product_attention to the shapes of ``tilewise.attention``.

Letters: L queries, S keys, E query/key width, Ev value width. The dimensions before the last two
broadcast as in torch's plain path, which is a product of matrices. The last of them is the heads,
the rest is the batch. Three-dimensional tensors are the heads of one batch item.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engine.run import autocast
from tilewise.functional import attention
from tilewise.variants import masks, scores
from tilewise.variants.values import Mask, Score

_CAUSAL = masks.causal("top_left")
_NOTHING = ~Mask(())


class Call(NamedTuple):
    """The arguments of torch's function, by its names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def cast(call: Call) -> Call:
    """The call as autocast hands it to torch's function: in its dtype, but for a float32 mask."""
    q, k, v = autocast(call.query, call.key, call.value)
    attn_mask = call.attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.dtype in (torch.bfloat16, torch.float16):
        attn_mask = autocast(call.query, attn_mask)[1]
    return Call(q, k, v, attn_mask, *call[4:])


def attend(call: Call, more: tuple[Score, ...] = ()) -> Tensor:
    """Attention as the call means it; ``sdpa_mistakes`` found nothing wrong with its shapes.

    Scores in ``more`` apply after the call's mask.

    Returns:
        [.., L, Ev].

    Raises:
        Unsupported: nothing here can do it, with each backend's reason.
    """
    q, k, v, attn_mask, *_, enable_gqa = call
    if q.is_nested:
        found: Tensor = attention(q, k, v, **_keywords(call, None, more))
        return found
    heads = q.shape[:-2] if enable_gqa else joint(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    lead = joint(q.shape[:-3], k.shape[:-3], v.shape[:-3]) + tuple(heads[-1:])
    shape = (*lead, q.shape[-2], v.shape[-1])
    if 0 in shape:
        return _nothing(call, shape)
    if q.shape[-1] == 0:  # every product is a sum of nothing
        q, k = torch.nn.functional.pad(q, (0, 1)), torch.nn.functional.pad(k, (0, 1))
        call = call._replace(scale=1.0)
    q, k, v = _four_dims(q, k, v, lead, enable_gqa)
    if attn_mask is not None and attn_mask.dim() > 3 and len(lead) > 2:
        attn_mask = _flat_batch(attn_mask, lead[:-1])
    out: Tensor = attention(q, k, v, **_keywords(call, attn_mask, more))
    return out if len(shape) == 4 else out.reshape(shape)


def joint(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that shapes broadcast to."""
    rank = max(len(shape) for shape in shapes)
    found = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                found[at] = size
    return tuple(found)


def _keywords(call: Call, attn_mask: Tensor | None, more: tuple[Score, ...]) -> dict[str, Any]:
    """Return what the call says beside q, k and v, in the words of ``tilewise.attention``."""
    found: dict[str, Any] = {"scale": call.scale, "dropout_p": float(call.dropout_p)}
    if call.is_causal:
        found["mask"] = _CAUSAL
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        found["mask"] = masks.dense(attn_mask)
    elif attn_mask is not None:
        found["score"] = scores.bias(attn_mask) if not more else [scores.bias(attn_mask), *more]
    if more and "score" not in found:
        found["score"] = more
    if call.dropout_p == 1.0:
        found |= {"mask": _NOTHING, "dropout_p": 0.0}
    return found


def _nothing(call: Call, shape: tuple[int, ...]) -> Tensor:
    """Return an output without elements, whose gradients are zeros."""
    out = call.query.new_zeros(shape)
    for x in (call.query, call.key, call.value, call.attn_mask):
        if x is not None and x.requires_grad:
            out = out + x.reshape(-1)[:0].sum().to(out.dtype)
    return out


def _four_dims(
    q: Tensor, k: Tensor, v: Tensor, lead: tuple[int, ...], grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, k and v as [B, H, S, D], the heads of k and v one number that divides q's."""
    if not lead:
        return q[None, None], k[None, None], v[None, None]
    heads = lead[-1]
    q, k, v = (x if x.dim() > 2 else x[None] for x in (q, k, v))
    if k.shape[-3] != v.shape[-3]:
        k, v = (_repeated(x, heads) for x in (k, v))
    if not grouped:
        q = _expanded(q, heads)
    return _batched(q, lead), _batched(k, lead), _batched(v, lead)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Each head as often as it takes to have so many."""
    own = x.shape[-3]
    return _expanded(x, heads) if own in (1, heads) else x.repeat_interleave(heads // own, -3)


def _expanded(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-3] == heads else x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def _batched(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Make one dimension for the batch; a tensor that does not broadcast keeps its memory."""
    batch = lead[:-1]
    own = x.shape[-3:]
    if len(batch) == 1 and x.dim() == 4 and x.shape[0] == batch[0]:
        return x
    return x.expand(*batch, *own).reshape(_product(batch), *own)


def _flat_batch(attn_mask: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return a mask with one dimension for the batch; copied where only some of it broadcasts."""
    own = attn_mask.shape[-3:]
    if _product(attn_mask.shape[:-3]) == 1:
        return attn_mask.reshape(1, *own)
    return attn_mask.expand(*batch, *own).reshape(_product(batch), *own)


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found = found * size
    return found
