"""Attention as the doors call it: on this process, or by several that share a sequence.

A door is what hands calls of other code to tilewise: ``nn.Attention``, ``tilewise.sdpa()``, the
function of transformers. It calls these functions. ``tilewise.distributed.context_parallel`` gives
the calls of a block another route. ``tilewise.attention`` itself is always of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise import functional
from tilewise.preference import left_to_torch, slower
from tilewise.variants.masks import causal

_TORCH = torch.nn.functional.scaled_dot_product_attention  # whatever replaces it later
_CAUSAL = causal("top_left").program


class Route(Protocol):
    """Where calls go."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """Compute ``tilewise.attention``."""

    def attention_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **keywords: Any
    ) -> Any:
        """Compute ``tilewise.attention_varlen``."""


# Of the process, not of a context: torch.compile can guard a global, and knows no ContextVar.
_route: Route | None = None


def elsewhere() -> bool:
    """Return whether calls leave this process: then it has to take part, also without rows."""
    return _route is not None


def attention(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """``tilewise.attention``, by the route of the moment."""
    if _route is None:
        return functional.attention(q, k, v, **keywords)
    return _route.attention(q, k, v, **keywords)


def by_the_faster(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """``attention``, or torch's function where that is faster and means the same."""
    if _route is None and not torch.compiler.is_compiling() and (reason := slower(q, k, v)):
        mask = keywords.get("mask")
        if (mask is None or mask.program == _CAUSAL) and _says_no_more(keywords):
            left_to_torch().note(reason)
            return _TORCH(
                q,
                k,
                v,
                is_causal=mask is not None,
                scale=keywords.get("scale"),
                enable_gqa=q.shape[1] != k.shape[1],
            )
    return attention(q, k, v, **keywords)


def _says_no_more(keywords: dict[str, Any]) -> bool:
    """Return whether a call has a mask and a scale at most."""
    return all(
        value is None or (name == "dropout_p" and value == 0.0)
        for name, value in keywords.items()
        if name not in ("mask", "scale")
    )


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **keywords: Any
) -> Any:
    """``tilewise.attention_varlen``, by the route of the moment."""
    if _route is None:
        return functional.attention_varlen(q, k, v, cu_q, cu_k, **keywords)
    return _route.attention_varlen(q, k, v, cu_q, cu_k, **keywords)


@contextmanager
def routed(route: Route) -> Iterator[None]:
    """Calls of the block go by a route, those of other threads of the process too."""
    global _route
    before, _route = _route, route
    try:
        yield
    finally:
        _route = before
