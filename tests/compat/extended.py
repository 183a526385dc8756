"""scaled_dot_product_attention and its gradients in numpy's extended precision, broadcasting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.contract import LongArray, as_long


def attend(qkv: list[Any], mask: Any, weights: Any, keywords: dict[str, Any]) -> list[LongArray]:
    """The output, and the gradients of ``sum(weights * output)`` by q, k, v and a float mask."""
    q, k, v = (as_long(x) for x in qkv)
    scale = keywords.get("scale")
    scale = 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale
    grouped = bool(keywords.get("enable_gqa"))
    wide_k, wide_v = (_repeated(x, q.shape[-3]) if grouped else x for x in (k, v))
    added = _added(mask, keywords, (q.shape[-2], k.shape[-2]))
    scores = scale * (q @ wide_k.swapaxes(-1, -2)) + added
    with np.errstate(invalid="ignore", divide="ignore"):
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        raised = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = raised.sum(-1, keepdims=True)
        p = np.where(total > 0, raised / np.where(total > 0, total, 1), 0)
    out = p @ wide_v
    grad = as_long(weights)
    grad_p = grad @ wide_v.swapaxes(-1, -2)
    grad_s = p * (grad_p - (grad_p * p).sum(-1, keepdims=True))
    of_k, of_v = (
        _summed(_ungrouped(found, x.shape) if grouped else found, x.shape)
        for found, x in (
            (scale * (grad_s.swapaxes(-1, -2) @ q), k),
            (p.swapaxes(-1, -2) @ grad, v),
        )
    )
    found = [out, _summed(scale * (grad_s @ wide_k), q.shape), of_k, of_v]
    if mask is not None and mask.requires_grad:
        found.append(_summed(grad_s, tuple(mask.shape)))
    return found


def _added(mask: Any, keywords: dict[str, Any], sizes: tuple[int, int]) -> LongArray:
    if keywords.get("is_causal"):
        return np.where(np.tri(*sizes, dtype=bool), 0, -np.inf).astype(np.longdouble)
    if mask is None:
        return np.zeros((), np.longdouble)
    values = as_long(mask)
    return values if mask.dtype.is_floating_point else np.where(values != 0, 0, -np.inf)


def _repeated(x: LongArray, heads: int) -> LongArray:
    return np.repeat(x, heads // x.shape[-3], axis=-3)


def _ungrouped(grad: LongArray, shape: tuple[int, ...]) -> LongArray:
    heads = shape[-3]
    return grad.reshape(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)


def _summed(grad: LongArray, shape: tuple[int, ...]) -> LongArray:
    """A gradient summed over what was broadcast."""
    grad = grad.sum(tuple(range(grad.ndim - len(shape))))
    along = tuple(at for at, size in enumerate(shape) if size == 1 and grad.shape[at] != 1)
    return grad.sum(along, keepdims=True)
