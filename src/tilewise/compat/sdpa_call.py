"""Convert a call of scaled_dot_product_attention to the shapes of ``tilewise.attention``.

``mistake`` finds what torch refuses in a call, and ``raise_as_torch`` raises torch's error.

Letters: L queries, S keys, E query/key width, Ev value width. The dimensions before the last two
broadcast as in torch's plain path, which is a product of matrices. The last of them is the heads,
the rest is the batch. Three-dimensional tensors are the heads of one batch item.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.engine.run import autocast
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.routes import attention, elsewhere
from tilewise.variants import masks, scores
from tilewise.variants.values import Mask, Score

_CAUSAL = masks.causal("top_left")
_NOTHING = ~Mask(())
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_SCALE = torch.finfo(torch.float32).max / 2


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


def is_usual(call: Call) -> bool:
    """Return whether ``attend_usual`` computes a call: nothing but its sizes is to be looked at.

    Most calls are such: q, k and v [B, H, S, E] without a mask or dropout. What the others are
    looked at for takes longer than a small call.
    """
    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    if attn_mask is not None or type(dropout_p) is not float or dropout_p != 0.0:
        return False
    if not (type(q) is type(k) is type(v) is Tensor) or q.is_nested or k.is_nested or v.is_nested:
        return False
    if not (q.dtype is k.dtype is v.dtype and q.dtype in _DTYPES) or type(is_causal) is not bool:
        return False
    if scale is not None and not (type(scale) is float and abs(scale) <= _LARGEST_SCALE):
        return False
    a, b, c = q.shape, k.shape, v.shape
    if not (len(a) == len(b) == len(c) == 4 and a[0] == b[0] == c[0] and b[1] == c[1]):
        return False
    heads = a[1] == b[1] or (enable_gqa is True and b[1] > 0 and a[1] % b[1] == 0)
    if not (heads and a[3] == b[3] and b[2] == c[2]) or 0 in a or 0 in c:
        return False
    return q.device == k.device == v.device and not torch.is_autocast_enabled(q.device.type)


def attend_usual(call: Call) -> Tensor:
    """Attention as a call means it that ``is_usual``."""
    mask = _CAUSAL if call.is_causal else None
    out: Tensor = attention(call.query, call.key, call.value, mask=mask, scale=call.scale)
    return out


def cast(call: Call) -> Call:
    """The call as autocast hands it to torch's function: in its dtype, but for a float32 mask."""
    q, k, v = autocast(call.query, call.key, call.value)
    attn_mask = call.attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.dtype in (torch.bfloat16, torch.float16):
        attn_mask = autocast(call.query, attn_mask)[1]
    return Call(q, k, v, attn_mask, *call[4:])


def attend(call: Call, more: tuple[Score, ...] = ()) -> Tensor:
    """Attention as the call means it, [.., L, Ev]; ``mistake`` found nothing wrong with its shapes.

    Scores in ``more`` apply after the call's mask. ``Unsupported`` has each backend's reason.
    """
    q, k, v, attn_mask, *_, enable_gqa = call
    if q.is_nested:
        found: Tensor = attention(q, k, v, **_keywords(call, None, more))
        return found
    heads = q.shape[:-2] if enable_gqa else joint(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    lead = joint(q.shape[:-3], k.shape[:-3], v.shape[:-3]) + tuple(heads[-1:])
    shape = (*lead, q.shape[-2], v.shape[-1])
    if 0 in shape and not elsewhere():
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


TORCH = torch.nn.functional.scaled_dot_product_attention  # whatever replaces it later

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def mistake(call: Call) -> str | None:
    """Return briefly why torch would reject a call, or None if it would not."""
    q, k, v, attn_mask, dropout_p, is_causal, _, enable_gqa = call
    if not _typed(call):
        return "types"
    if not (q.dtype is k.dtype is v.dtype and q.device == k.device == v.device):
        return "dtypes or devices"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        return "rank"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return "dtype of attn_mask"
    if is_causal and attn_mask is not None:
        return "attn_mask with is_causal"
    if q.is_nested or k.is_nested or v.is_nested:
        return None  # of ragged shapes tilewise.attention says what is wrong
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return "sizes of query, key and value"
    if not _leads(q, k, v, enable_gqa):
        return "heads or batches of query, key and value"
    if attn_mask is not None and _misfit(call):
        return "shape of attn_mask"
    return None if 0.0 <= dropout_p <= 1.0 else "dropout_p"


def why_not(call: Call) -> str | None:
    """Return why ``tilewise.attention`` does not take a call without mistakes; None if it does."""
    if call.query.dtype not in _DTYPES:
        return f"{call.query.dtype}"
    if call.scale is not None and not abs(call.scale) <= _LARGEST_SCALE:
        return "a scale that is not finite"
    if call.attn_mask is not None and call.attn_mask.device != call.query.device:
        return "attn_mask on another device"
    return _why_not_nested(call)


def _why_not_nested(call: Call) -> str | None:
    tensors = (call.query, call.key, call.value)
    if not any(x.is_nested for x in tensors):
        return None
    if not all(x.is_nested and x.layout is torch.jagged and x.dim() == 4 for x in tensors):
        return "nested tensors that are not all jagged and [B, H, j, E]"
    if call.attn_mask is not None:
        return "nested tensors with attn_mask"
    if not call.enable_gqa and call.query.shape[1] != call.key.shape[1]:
        return "nested tensors of different numbers of heads without enable_gqa"
    return None


def raise_as_torch(call: Call, what: str) -> NoReturn:
    """Raise what torch raises for a mistake, without computing anything of the call's size.

    Torch's paths do not all look at everything; the error is that of its plain path (``MATH``).
    """
    q, k, v, attn_mask, dropout_p, *rest = call
    if what in ("types", "dtypes or devices", "rank", "dtype of attn_mask"):
        _call(q, k, v, attn_mask, dropout_p, *rest)  # checked before anything is computed
    if what == "dropout_p":
        torch.dropout(q.new_empty(0), dropout_p, True)
    if what == "shape of attn_mask":
        assert attn_mask is not None
        _misfit(call, told=True)
    light = [x.new_empty(x.shape, device="meta") for x in (q, k, v)]
    mask = None
    if what == "attn_mask with is_causal":
        mask = light[0].new_empty((1, 1))
    _call(*light, mask, dropout_p, *rest)
    raise InvalidArgument(what, "what torch's plain path would refuse", "what its page says")


def raise_unsupported(call: Call, what: str) -> NoReturn:
    """Raise torch's own error for what it does not compute either, else ours."""
    if call.query.dtype not in _DTYPES:
        one = torch.ones((1, 1, 1, 1), device=call.query.device).to(call.query.dtype)
        TORCH(one, one, one)
    raise Unsupported(
        f"scaled_dot_product_attention of tilewise with {what}",
        fix="call torch.nn.functional.scaled_dot_product_attention for it",
    )


def _call(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, *rest: Any) -> None:
    is_causal, scale, enable_gqa = rest
    named = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    TORCH(q, k, v, attn_mask, dropout_p=dropout_p, **named)


def _typed(call: Call) -> bool:
    q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    return (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (attn_mask is None or isinstance(attn_mask, Tensor))
        and isinstance(dropout_p, _NUMBERS)
        and isinstance(is_causal, bool)
        and (scale is None or isinstance(scale, _NUMBERS))
        and isinstance(enable_gqa, bool)
    )


def _leads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    """Return whether what stands before the last two dimensions goes together."""
    if not grouped:
        return _broadcast(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if min(q.dim(), k.dim(), v.dim()) < 3:
        return False
    heads, of_keys, of_values = q.shape[-3], k.shape[-3], v.shape[-3]
    fits = heads == of_keys == of_values or (
        of_keys > 0 and of_values > 0 and heads % of_keys == 0 and heads % of_values == 0
    )
    return fits and _broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])


def _broadcast(*shapes: Sequence[int]) -> bool:
    whole = joint(*shapes)
    return all(
        size == 1 or size == whole[at]
        for shape in shapes
        for at, size in enumerate(shape, len(whole) - len(shape))
    )


def _misfit(call: Call, told: bool = False) -> bool:
    """Return whether the mask fails to broadcast to the scores; ``told`` raises torch's error."""
    q, k, mask = call.query, call.key, call.attn_mask
    assert mask is not None
    lead = q.shape[:-2] if call.enable_gqa else joint(q.shape[:-2], k.shape[:-2])
    if call.enable_gqa:
        lead = (*joint(q.shape[:-3], k.shape[:-3]), q.shape[-3])
    scores = (*lead, q.shape[-2], k.shape[-2])
    both = _broadcast(scores, mask.shape)
    if told and not both:
        one = torch.zeros(())
        one.expand(scores) + one.expand(mask.shape)  # raises before it computes
    if told:
        whole = list(joint(scores, mask.shape))
        raise RuntimeError(
            f"output with shape {list(scores)} doesn't match the broadcast shape {whole}"
        )
    return not both or joint(scores, mask.shape) != scores
