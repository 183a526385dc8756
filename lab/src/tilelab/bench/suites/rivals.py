"""Approximate and sparse methods as the bench calls them: what is drawn is drawn before."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilelab.bench.approximate import (
    bigbird,
    linear,
    linformer,
    local,
    longformer,
    performer,
    reformer,
)
from tilelab.bench.approximate.linformer import projection
from tilelab.bench.approximate.performer import directions
from tilelab.bench.suites.methods import Method, block_sparse
from tilelab.bench.suites.work import Attend, Given, Work
from tilewise import patterns

__all__ = ["rivals"]


def rivals() -> list[Method]:
    """Our block-sparse kernel with the paper's pattern, then what others published."""
    return [
        block_sparse("butterfly", lambda _: patterns.butterfly(128)),
        _method("local", local),
        _method("Longformer", longformer),
        _method("BigBird", bigbird),
        _method("Linformer", linformer, project=lambda work: projection(work.length)),
        _method("Reformer", reformer),
        _method("linear attention", linear, drops=False),
        _method("Performer", performer, drops=False, rows=_directions),
    ]


def _directions(work: Work) -> Tensor:
    return directions(max(1, round(work.head_dim * math.log(work.head_dim))), work.head_dim)


def _method(
    name: str,
    attend: Callable[..., Tensor],
    *,
    drops: bool = True,
    **drawn: Callable[[Work], Tensor],
) -> Method:
    """Return a published method.

    Args:
        name: of it.
        attend: the function.
        drops: whether it has probabilities to drop.
        drawn: makes tensors that it takes, in the operands' dtype.
    """

    def make(work: Work, given: Given) -> Attend:
        more: dict[str, Any] = {key: of(work).to(given.q) for key, of in drawn.items()}
        if work.padding:
            keys = torch.arange(work.length, device=given.q.device)
            more["keys"] = keys < work.length - work.padding
        if work.dropout_p:
            more["dropout_p"] = work.dropout_p
        return partial(attend, **more)

    def why_not(work: Work) -> str:
        if work.dropout_p and not drops:
            return "it has no probabilities to drop"
        return "it has no grouped keys" if work.heads != work.kv_heads else ""

    return Method(name, make, exact=False, why_not=why_not)
