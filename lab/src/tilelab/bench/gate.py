"""Correctness before speed: a case whose result is wrong is not timed.

The gate computes a few query rows of the first and the last head the plain way. It does so in
float64 and in the case's own dtype, with every product and the softmax rounded to it. Ours is held
to the 2x rule (``tilelab.common.exactness``).

For a backward case all rows of one head are computed, since keys gather gradients from every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.bench.build import SEED, Operands
from tilelab.bench.cases import DROPOUT_P, WINDOW, Case
from tilelab.common.exactness import judge
from tilewise.inspect.calls import keep_mask

__all__ = ["complaint"]

_ROWS = 48


class _Head(NamedTuple):
    """Operands of some rows of one head: q [R, D], k and v [N, D], visible and keep [R, N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    bias: Tensor | None
    keep: Tensor | None
    grad: Tensor | None


def complaint(case: Case, given: Operands, result: Any) -> str | None:
    """Return what is wrong with our result, or None.

    Args:
        case: the case.
        given: its operands.
        result: the output, or for a backward case the gradients of q, k and v.
    """
    if case.backward:
        return _compare_gradients(case, given, result)
    shape = case.shape
    rows = _sample(shape.queries)
    for batch, head in {(0, 0), (shape.batch - 1, shape.heads - 1)}:
        found = _compare_rows(case, given, result, (batch, head), rows)
        if found:
            return found
    return None


def _sample(queries: int) -> Tensor:
    """The first, the last and some rows between."""
    return torch.linspace(0, queries - 1, min(queries, _ROWS), dtype=torch.float64).long()


def _compare_rows(
    case: Case, given: Operands, out: Tensor, place: tuple[int, int], rows: Tensor
) -> str | None:
    part = _head(case, given, place, rows)
    exact, plain = _plain(part, torch.float64), _plain(part, given.q.dtype)
    return judge(out[place][rows], plain[0], exact[0]).fault("out") or None


def _compare_gradients(case: Case, given: Operands, result: tuple[Tensor, ...]) -> str | None:
    part = _head(case, given, (0, 0), torch.arange(case.shape.queries))
    exact, plain = _plain(part, torch.float64), _plain(part, given.q.dtype)
    for name, ours, own, truth in zip("qkv", result, plain[1:], exact[1:], strict=True):
        found = judge(ours[0, 0], own, truth).fault(f"grad of {name}")
        if found:
            return found
    return None


def _head(case: Case, given: Operands, place: tuple[int, int], rows: Tensor) -> _Head:
    batch, head = place
    kv_place = batch, head // (case.shape.heads // case.shape.kv_heads)
    k = given.k[kv_place].detach()
    return _Head(
        given.q[place].detach()[rows],
        k,
        given.v[kv_place].detach(),
        _visible(case, rows),
        None if given.bias is None else given.bias[rows],
        _keep(case, place, rows) if case.variant == "dropout" else None,
        None if given.grad is None else given.grad[place][rows],
    )


def _visible(case: Case, rows: Tensor) -> Tensor:
    past = rows[:, None] - torch.arange(case.shape.keys)
    if case.variant == "causal":
        return past >= 0
    if case.variant == "window":
        return (past >= 0) & (past < WINDOW)
    return torch.ones_like(past, dtype=torch.bool)


def _keep(case: Case, place: tuple[int, int], rows: Tensor) -> Tensor:
    batch, head = (range(index, index + 1) for index in place)
    keys = range(case.shape.keys)
    blocks = [
        keep_mask(
            SEED, DROPOUT_P, batches=batch, heads=head, queries=range(row, row + 1), keys=keys
        )
        for row in rows.tolist()
    ]
    return torch.cat(blocks, dim=2)[0, 0]


def _plain(part: _Head, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The plain mathematics in a dtype: out [R, D], then for a backward case dq, dk, dv.

    Half types multiply in float32 and round every result, as a matrix unit does.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    q, k, v = (x.to(wide) for x in (part.q, part.k, part.v))
    scale = 1 / math.sqrt(q.shape[-1])
    s = rounded(rounded(q @ k.T) * scale)
    if part.bias is not None:
        s = rounded(s + part.bias.to(wide))
    p = rounded(s.masked_fill(~part.visible, -math.inf).softmax(-1))
    if part.keep is not None:
        p = rounded(p * part.keep / (1 - DROPOUT_P))
    out = rounded(p @ v)
    if part.grad is None:
        return (out,)
    return out, *_plain_gradients(part.grad.to(wide), q, k, v, p, scale, rounded)


def _plain_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    scale: float,
    rounded: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    dv = p^T do;  dp = do v^T;  ds = scale p (dp - sum p dp);  dq = ds k;  dk = ds^T q.
    """
    dp = rounded(grad @ v.T)
    ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)) * scale)
    return rounded(ds @ k), rounded(ds.T @ q), rounded(p.T @ grad)
