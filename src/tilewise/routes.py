"""Attention as the doors call it: on this process, or by several that share a sequence.

A door is what hands calls of other code to tilewise: ``nn.Attention``, ``tilewise.sdpa()``, the
function of transformers. It calls these functions. ``tilewise.distributed.context_parallel`` gives
the calls of a block another route. ``tilewise.attention`` itself is always of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from tilewise import functional


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
