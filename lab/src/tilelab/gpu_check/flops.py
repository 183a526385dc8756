"""Operations of attention, counted as everybody counts them.

Forward there are two products, ``q k^T`` and ``p v``: 2 D + 2 Dv operations for a visible pair of
query and key. Backward there are five (the scores again, dP, dV, dK, dQ), 2.5 times that whatever
a kernel does twice. A causal mask shows half of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["backward_flops", "causal_pairs", "forward_flops", "full_pairs", "window_pairs"]


def full_pairs(queries: int, keys: int) -> float:
    """Return the number of all pairs."""
    return float(queries * keys)


def causal_pairs(lengths: Iterable[int]) -> float:
    """Half the pairs of each square problem."""
    return sum(length * length for length in lengths) / 2


def window_pairs(length: int, width: int) -> float:
    """Row m sees itself and the ``width - 1`` keys before it, as far as there are any."""
    ramp = min(width, length)
    return ramp * (ramp + 1) / 2 + (length - ramp) * float(ramp)


def forward_flops(pairs: float, heads: int, head_dim: int, value_dim: int | None = None) -> float:
    """Operations of the forward pass.

    Args:
        pairs: visible pairs of one head, over the whole batch.
        heads: query heads.
        head_dim: D.
        value_dim: Dv; D if None.
    """
    return 2 * pairs * heads * (head_dim + (head_dim if value_dim is None else value_dim))


def backward_flops(pairs: float, heads: int, head_dim: int) -> float:
    """Operations of the backward pass: five products, 2.5 times the forward pass."""
    return 2.5 * forward_flops(pairs, heads, head_dim)
