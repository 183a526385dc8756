"""A case's operands, and the two calls that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.bench.cases import DROPOUT_P, WINDOW, Case
from tilewise import masks, scores

__all__ = ["SEED", "Operands", "Pair", "build", "operands"]

SEED = 1234  # of what our dropout drops; torch draws its own

Call = Callable[[], Any]


class Operands(NamedTuple):
    """The tensors of a case.

    Args:
        q, k, v: as in the case's shape, contiguous; they require grad for a backward case.
        bias: what is added to the scores, [M, N]; None unless that is the variant.
        grad: the gradient of the output; None unless it is a backward case.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    grad: Tensor | None


class Pair(NamedTuple):
    """Our call and torch's, ready to be timed: forward gives the output, backward three grads."""

    ours: Call
    torch: Call


def operands(case: Case) -> Operands:
    """Standard normal numbers, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = case.shape, getattr(torch, case.dtype)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    q = draw(shape.batch, shape.heads, shape.queries, shape.head_dim)
    k, v = (draw(shape.batch, shape.kv_heads, shape.keys, shape.head_dim) for _ in range(2))
    for tensor in (q, k, v):
        tensor.requires_grad_(case.backward)
    bias = draw(shape.queries, shape.keys) if case.variant == "bias" else None
    return Operands(q, k, v, bias, draw(*q.shape) if case.backward else None)


def build(case: Case, given: Operands) -> Pair:
    """Return the two calls; what both could prepare once (masks, the forward pass) is prepared."""
    ours, theirs = _ours(case, given), _theirs(case, given)
    if given.grad is None:
        return Pair(ours, theirs)
    return Pair(_gradients(ours(), given), _gradients(theirs(), given))


def _gradients(out: Tensor, given: Operands) -> Call:
    leaves = (given.q, given.k, given.v)
    return lambda: torch.autograd.grad(out, leaves, given.grad, retain_graph=True)


def _ours(case: Case, given: Operands) -> Call:
    keywords: dict[str, Any] = {}
    if case.variant == "causal":
        keywords["mask"] = masks.causal()
    elif case.variant == "window":
        keywords["mask"] = masks.window(WINDOW - 1, 0)
    elif case.variant == "dropout":
        keywords |= {"dropout_p": DROPOUT_P, "seed": SEED}
    elif given.bias is not None:
        keywords["score"] = scores.bias(given.bias)
    return lambda: tilewise.attention(given.q, given.k, given.v, **keywords)


def _theirs(case: Case, given: Operands) -> Call:
    keywords: dict[str, Any] = {}
    if case.variant == "causal":
        keywords["is_causal"] = True
    elif case.variant == "window":
        # torch has no window: it needs the whole boolean matrix.
        row = torch.arange(case.shape.queries)[:, None]
        past = row - torch.arange(case.shape.keys)
        keywords["attn_mask"] = (past >= 0) & (past < WINDOW)
    elif case.variant == "dropout":
        keywords["dropout_p"] = DROPOUT_P
    elif given.bias is not None:
        keywords["attn_mask"] = given.bias
    if case.shape.heads != case.shape.kv_heads:
        keywords["enable_gqa"] = True
    return lambda: scaled_dot_product_attention(given.q, given.k, given.v, **keywords)
