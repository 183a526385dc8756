"""Merging attention over separate sets of keys into attention over their union.

If ``(out_i, lse_i)`` is the attention of one query row over key set i, then over the union::

    lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

The operation is associative and commutative up to rounding, and the empty set (out 0, lse -inf)
is its neutral element. Split-key decoding, ring attention, shared prefixes and chunked prefill
all use it. Partial results must not include a sink: it is one key set of its own, added once.

Source: Milakov and Gimelshein, 2018, section 3.1; Dao et al., FlashAttention, 2022, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument


def merge_partial(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges outputs by their logsumexp; differentiable in both.

    Args:
        outs: partial outputs, ``[B, H, M, Dv]`` or packed ``[T, H, Dv]``.
        lses: their natural logsumexp, ``[B, H, M]`` or packed ``[H, T]``. A row with lse -inf has
            seen no key: its output is not read.

    Returns:
        out in the dtype of the first output, and lse.

    Raises:
        InvalidArgument: nothing to merge, or shapes that differ.
    """
    check_partials(outs, lses)
    lse = torch.stack(list(lses))
    # The largest lse only keeps exp in range; the result does not depend on it.
    top = lse.detach().amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    safe_total = torch.where(total == 0, 1.0, total)
    weights = weights / safe_total
    merged_lse = torch.where(total == 0, -math.inf, top + torch.log(safe_total))
    out: Tensor | None = None
    for piece, weight, piece_lse in zip(outs, weights, lses, strict=True):
        empty = _per_row(piece_lse == -math.inf, piece)
        term = _per_row(weight, piece) * torch.where(empty, 0.0, piece.to(lse.dtype))
        out = term if out is None else out + term
    assert out is not None
    return out.to(outs[0].dtype), merged_lse


def as_partial(sinks: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return sinks ``[H]`` as the result of one more set of keys, shaped as out and lse."""
    return out.new_zeros(()).expand(out.shape), sinks.to(lse.dtype)[:, None].expand(lse.shape)


def _per_row(rows: Tensor, out: Tensor) -> Tensor:
    """A number per query row, shaped to broadcast against an output (packed ones swap H and T)."""
    return (rows.transpose(0, 1) if out.dim() == 3 else rows)[..., None]


def check_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """Raises InvalidArgument where there is nothing to merge, or shapes are not as they must be."""
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(
            "results", f"{len(outs)} outputs and {len(lses)} lses", "as many of each, at least one"
        )
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != lses[0].shape:
            raise InvalidArgument(
                f"results[{i}]",
                f"out {tuple(out.shape)} and lse {tuple(lse.shape)}",
                f"the shapes of the first, {tuple(outs[0].shape)} and {tuple(lses[0].shape)}",
            )
        rows = (out.shape[1], out.shape[0]) if out.dim() == 3 else tuple(out.shape[:-1])
        if out.dim() not in (3, 4) or tuple(lse.shape) != rows:
            raise InvalidArgument(
                f"results[{i}]",
                f"out {tuple(out.shape)} and lse {tuple(lse.shape)}",
                "out [B, H, M, Dv] with lse [B, H, M], or packed [T, H, Dv] with [H, T]",
            )
