"""Attention of blocks of queries with listed blocks of keys: what the sparse patterns share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

__all__ = ["gathered", "softmax_seen", "with_global_rows"]

Visible = Callable[[Tensor, Tensor, Tensor], Tensor]


def gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    size: int,
    *,
    visible: Visible | None = None,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend from each block of queries to its L listed blocks of keys: O(N L size).

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        blocks: int64 [N / size rounded up, L], numbers of blocks of keys; -1 for none.
        size: queries and keys of a block.
        visible: which pairs attend, of integer tensors that broadcast: rows m, keys n, and the
            place of the key's block in the list; None for all.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.

    Returns:
        [B, H, N, Dv]; a row that sees nothing gives 0.
    """
    length = q.shape[2]
    count, listed = blocks.shape
    q, k, v = (pad(x, (0, 0, 0, count * size - length)) for x in (q, k, v))
    q_blocks, k_blocks, v_blocks = (
        x.reshape(*x.shape[:2], count, size, x.shape[-1]) for x in (q, k, v)
    )
    take = blocks.clamp(min=0)
    own_k, own_v = (x[:, :, take].flatten(3, 4) for x in (k_blocks, v_blocks))
    s = (q_blocks @ own_k.mT) * q.shape[-1] ** -0.5  # [B, H, count, size, L size]
    inside = torch.arange(size, device=q.device)
    n = (take[:, :, None] * size + inside).flatten(1)[:, None]  # [count, 1, L size]
    m = torch.arange(count * size, device=q.device).view(count, size, 1)
    seen = (blocks >= 0).repeat_interleave(size, dim=1)[:, None] & (n < length)
    if keys is not None:
        seen = seen & pad(keys, (0, count * size - length))[n]
    if visible is not None:
        slot = torch.arange(listed, device=q.device).repeat_interleave(size)
        seen = seen & visible(m, n, slot)
    p = dropout(softmax_seen(s, seen), dropout_p)
    out: Tensor = (p @ own_v).flatten(2, 3)[:, :, :length]
    return out


def softmax_seen(s: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax over what is seen; 0 in a row that sees nothing.

    Args:
        s: scores.
        seen: bool, broadcasts to ``s``.
    """
    hidden = ~seen
    # Not -inf: the gradient of a row of -inf alone is NaN.
    p = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1)
    return p.masked_fill(hidden, 0.0)


def with_global_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: int,
    keys: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Return the output with its first rows replaced by those that see every key.

    Args:
        q: all queries.
        k: all keys.
        v: all values.
        out: of the pattern.
        rows: how many.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.
    """
    if rows == 0:
        return out
    s = (q[:, :, :rows] @ k.mT) * q.shape[-1] ** -0.5
    seen = torch.ones_like(k[0, 0, :, 0], dtype=torch.bool) if keys is None else keys
    whole = dropout(softmax_seen(s, seen), dropout_p) @ v
    return torch.cat([whole, out[:, :, rows:]], dim=2)
