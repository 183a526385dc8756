"""LSH attention in the manner of Reformer: rows attend within buckets of a hash."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from tilelab.bench.approximate.local import neighbours

__all__ = ["hashes", "reformer"]


def reformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int = 64,
    buckets: int = 0,
    rounds: int = 2,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Sort rows and keys by their hash; a chunk of rows sees the keys of its bucket nearby.

    In each round a chunk of sorted rows sees the sorted keys of the same chunk and of its two
    neighbours, where the hashes agree. The denominators of their softmax weight the rounds
    (equations 4 to 6). The cost is O(rounds N (chunk + log N)).

    Source: Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer", ICLR 2020, section
    2. There queries and keys are the same vectors. Here the same rotations hash both, and each is
    sorted apart, so a row looks at three chunks and not two. A pair found in several rounds counts
    in each.

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        chunk: rows of a chunk.
        buckets: of the hash, an even number or 1; 0 for N / chunk.
        rounds: hashes.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.

    Returns:
        [B, H, N, Dv]; a row that finds no key of its bucket in any round gives 0.
    """
    length = q.shape[2]
    if not buckets:
        buckets = max(2, length // chunk // 2 * 2)
    outs, sums = [], []
    for number in range(rounds):
        of_q, of_k = (hashes(x, buckets, number) for x in (q, k))
        out, lse = _round(q, k, v, (of_q, of_k), chunk, keys, dropout_p)
        outs.append(out)
        sums.append(lse)
    every = torch.stack(sums)  # [rounds, B, H, N]
    nothing = torch.finfo(every.dtype).min
    weights = every.softmax(0).masked_fill(every == nothing, 0.0)
    return (torch.stack(outs) * weights[..., None]).sum(0)


def hashes(x: Tensor, buckets: int, number: int) -> Tensor:
    """Return the bucket of each row: the largest of ``[x R, -x R]`` for random directions R.

    Args:
        x: [B, H, N, D].
        buckets: how many, even; 1 puts all rows into one.
        number: of the round: its directions.
    """
    if buckets == 1:
        return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    generator = torch.Generator().manual_seed(number)
    rotation = torch.randn(x.shape[-1], buckets // 2, generator=generator).to(x)
    turned = x.detach() @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


def _round(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: tuple[Tensor, Tensor],
    chunk: int,
    keys: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithm of the denominator of each row, for one hash."""
    length = q.shape[2]
    count = -(-length // chunk)
    behind = count * chunk - length
    of_q, of_k = found
    if keys is not None:
        of_k = of_k.masked_fill(~keys, -2)  # a bucket that no row has
    order_q, order_k = (x.argsort(dim=-1, stable=True) for x in (of_q, of_k))
    blocks = neighbours(count, 1, q.device)
    near = blocks.clamp(min=0)
    sorted_q = _chunks(_taken(q, order_q), count, chunk)
    own_k, own_v = (_chunks(_taken(x, order_k), count, chunk)[:, :, near] for x in (k, v))
    bucket_q = pad(of_q.gather(-1, order_q), (0, behind), value=-1)
    bucket_k = pad(of_k.gather(-1, order_k), (0, behind), value=-2)
    bucket_q, bucket_k = (x.reshape(*x.shape[:2], count, chunk) for x in (bucket_q, bucket_k))
    listed = bucket_k[:, :, near].masked_fill((blocks < 0)[:, :, None], -2).flatten(3)
    hidden = bucket_q[..., None] != listed[:, :, :, None]
    s = (sorted_q @ own_k.flatten(3, 4).mT) * q.shape[-1] ** -0.5
    nothing = torch.finfo(s.dtype).min
    s = s.masked_fill(hidden, nothing)
    p = dropout(s.softmax(-1).masked_fill(hidden, 0.0), dropout_p)
    out = (p @ own_v.flatten(3, 4)).flatten(2, 3)[:, :, :length]
    lse = s.logsumexp(-1).masked_fill(hidden.all(-1), nothing).flatten(2, 3)[:, :, :length]
    back = order_q.argsort(dim=-1)
    return _taken(out, back), lse.gather(-1, back)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[..., None].expand(*order.shape, x.shape[-1]))


def _chunks(x: Tensor, count: int, chunk: int) -> Tensor:
    """[B, H, N, D] as [B, H, count, chunk, D], with rows of 0 at the end."""
    padded = pad(x, (0, 0, 0, count * chunk - x.shape[2]))
    return padded.reshape(*x.shape[:2], count, chunk, x.shape[-1])
