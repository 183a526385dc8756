"""Approximate and sparse attention as published: small references to measure exact attention with.

Each method takes ``Operands`` and gives [B, H, N, Dv]. Autograd can differentiate it. Its cost is
that of its paper, not N x N. None is tuned: each is what a reader of the paper would write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, elu, pad

from tilewise import patterns

Visible = Callable[[Tensor, Tensor, Tensor], Tensor]


class Operands(NamedTuple):
    """What a method attends with."""

    q: Tensor  # [B, H, N, D]
    k: Tensor  # [B, H, N, D]
    v: Tensor  # [B, H, N, Dv]
    # Bool [N], which keys there are, the others are padding; None for all.
    keys: Tensor | None = None
    dropout_p: float = 0.0  # the probability of dropping a pair, of methods that have probabilities

    @property
    def length(self) -> int:
        """N."""
        return self.q.shape[2]


def gathered(given: Operands, blocks: Tensor, size: int, visible: Visible | None = None) -> Tensor:
    """Attend from each block of queries to its L listed blocks of keys: O(N L size).

    ``blocks`` are numbers of blocks of keys, -1 for none: int64 [N / size rounded up, L].
    ``visible`` says which pairs attend, of integer tensors that broadcast: rows m, keys n, and the
    place of the key's block in the list; None for all. A row that sees nothing gives 0.
    """
    length, keys = given.length, given.keys
    count, listed = blocks.shape
    q, k, v = (pad(x, (0, 0, 0, count * size - length)) for x in given[:3])
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
    p = dropout(softmax_seen(s, seen), given.dropout_p)
    out: Tensor = (p @ own_v).flatten(2, 3)[:, :, :length]
    return out


def softmax_seen(s: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax over what is seen; 0 in a row that sees nothing."""
    hidden = ~seen
    # Not -inf: the gradient of a row of -inf alone is NaN.
    p = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1)
    return p.masked_fill(hidden, 0.0)


def with_global_rows(given: Operands, out: Tensor, rows: int) -> Tensor:
    """Return the output with its first rows replaced by those that see every key."""
    if rows == 0:
        return out
    q, k, v, keys, dropout_p = given
    s = (q[:, :, :rows] @ k.mT) * q.shape[-1] ** -0.5
    seen = torch.ones_like(k[0, 0, :, 0], dtype=torch.bool) if keys is None else keys
    whole = dropout(softmax_seen(s, seen), dropout_p) @ v
    return torch.cat([whole, out[:, :, rows:]], dim=2)


def local(given: Operands, window: int = 128) -> Tensor:
    """Row m sees the keys with ``|m - n| <= window``: O(N window).

    Source: Parmar et al., "Image Transformer", ICML 2018, section 3.2 (local self-attention in
    blocks of queries with their neighbourhood of keys).
    """
    size = max(1, min(window, given.length))
    blocks = neighbours(-(-given.length // size), 1, given.q.device)

    def near(m: Tensor, n: Tensor, _: Tensor) -> Tensor:
        return (m - n).abs() <= window

    return gathered(given, blocks, size, near)


def neighbours(count: int, reach: int, device: torch.device) -> Tensor:
    """Return the blocks up to ``reach`` away from each, itself included: [count, 2 reach + 1]."""
    own = torch.arange(count, device=device)[:, None]
    found = own + torch.arange(-reach, reach + 1, device=device)
    return found.masked_fill((found < 0) | (found >= count), -1)


def longformer(given: Operands, window: int = 256, tokens: int = 64) -> Tensor:
    """Rows see a window and the global tokens, which see everything: O(N (window + tokens)).

    ``window`` keys on either side, and the first ``tokens`` are global: the mask is
    ``patterns.local_global(window, tokens)``.

    Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section
    3.1 (its window of width w is ``window = w / 2``; one set of projections serves both parts).
    """
    length, device = given.length, given.q.device
    tokens = min(tokens, length)
    size = max(1, min(window, length))
    near = neighbours(-(-length // size), 1, device)
    first = -(-tokens // size)  # blocks in which the global tokens lie
    everywhere = torch.arange(first, device=device).expand(near.shape[0], first)

    def visible(m: Tensor, n: Tensor, slot: Tensor) -> Tensor:
        # A global key is seen where its own block is listed, and not again in the window.
        is_global = n < tokens
        return torch.where(slot < first, is_global, ~is_global & ((m - n).abs() <= window))

    blocks = torch.cat([everywhere, near], dim=1)
    return with_global_rows(given, gathered(given, blocks, size, visible), tokens)


def bigbird(given: Operands, block: int = 64) -> Tensor:
    """Let each block of rows see 3 blocks around it, 2 global and 3 random ones: O(8 N block).

    The mask is ``patterns.bigbird(N, block=block)``, whose global blocks see everything.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020, section 2
    and appendix D (blocks are gathered, as there).
    """
    blocks = _blocks(given.length, block).to(given.q.device)
    out = gathered(given, blocks, block)
    return with_global_rows(given, out, min(_GLOBALS * block, given.length))


_GLOBALS = 2


@lru_cache(maxsize=8)
def _blocks(length: int, block: int) -> Tensor:
    """Return the blocks that each block of rows sees, -1 behind the last of them."""
    (tiles,) = patterns.bigbird(length, block=block, globals=_GLOBALS).captured
    seen = tiles[0, 0].clone()
    seen[:_GLOBALS] = False  # they are done apart
    listed = int(seen.sum(-1).max().item())
    # Those that are seen sort first, in order.
    number = torch.arange(seen.shape[1]).expand_as(seen)
    ordered = number.masked_fill(~seen, seen.shape[1]).sort(-1).values[:, : max(1, listed)]
    return ordered.masked_fill(ordered == seen.shape[1], -1)


def linformer(given: Operands, project: Tensor) -> Tensor:
    """``out = softmax(q (E k)^T / sqrt(D)) (E v)`` with E = ``project`` [rows, N]: O(N rows).

    Source: Wang, Li, Khabsa, Fang and Ma, "Linformer: Self-Attention with Linear Complexity", 2020,
    equation 7, with one projection for keys and values and all heads (its section 4). E is learnt
    there; ``projection`` draws it as theorem 2's proof does.
    """
    q, k, v, keys, dropout_p = given
    made = project.to(q)
    if keys is not None:
        made = made * keys.to(made.dtype)
    s = (q @ (made @ k).mT) * q.shape[-1] ** -0.5
    out: Tensor = dropout(s.softmax(-1), dropout_p) @ (made @ v)
    return out


@lru_cache(maxsize=8)
def projection(length: int, rows: int = 256) -> Tensor:
    """Normal numbers of variance 1 / rows: float32 [rows, N], always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn: Tensor = torch.randn(rows, length, generator=generator) * rows**-0.5
    return drawn


def reformer(given: Operands, chunk: int = 64, buckets: int = 0, rounds: int = 2) -> Tensor:
    """Sort rows and keys by their hash; a chunk of rows sees the keys of its bucket nearby.

    In each round a chunk of sorted rows sees the sorted keys of the same chunk and of its two
    neighbours, where the hashes agree. The denominators of their softmax weight the rounds
    (equations 4 to 6). The cost is O(rounds N (chunk + log N)).

    Source: Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer", ICLR 2020, section
    2. There queries and keys are the same vectors. Here the same rotations hash both, and each is
    sorted apart, so a row looks at three chunks and not two. A pair found in several rounds counts
    in each.

    ``buckets`` of the hash are an even number or 1; 0 for N / chunk.

    Returns:
        [B, H, N, Dv]; a row that finds no key of its bucket in any round gives 0.
    """
    if not buckets:
        buckets = max(2, given.length // chunk // 2 * 2)
    outs, sums = [], []
    for number in range(rounds):
        of_q, of_k = (hashes(x, buckets, number) for x in (given.q, given.k))
        out, lse = _round(given, of_q, of_k, chunk)
        outs.append(out)
        sums.append(lse)
    every = torch.stack(sums)  # [rounds, B, H, N]
    nothing = torch.finfo(every.dtype).min
    weights = every.softmax(0).masked_fill(every == nothing, 0.0)
    return (torch.stack(outs) * weights[..., None]).sum(0)


def hashes(x: Tensor, buckets: int, number: int) -> Tensor:
    """Return the bucket of each row: the largest of ``[x R, -x R]`` for random directions R.

    ``x`` is [B, H, N, D], and R of the round of that number. Buckets are an even number, or 1.
    """
    if buckets == 1:
        return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    generator = torch.Generator().manual_seed(number)
    rotation = torch.randn(x.shape[-1], buckets // 2, generator=generator).to(x)
    turned = x.detach() @ rotation
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


def _round(given: Operands, of_q: Tensor, of_k: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithm of the denominator of each row, for one hash."""
    (q, k, v, keys, dropout_p), length = given, given.length
    count = -(-length // chunk)
    behind = count * chunk - length
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


def linear(given: Operands) -> Tensor:
    """``out = f(q) (f(k)^T v) / (f(q) sum f(k))`` with ``f = elu + 1``: O(N D Dv).

    Source: Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs", ICML 2020, equations
    4 to 7. It has no matrix of probabilities, so nothing is dropped.
    """
    q, k, v, keys, _ = given
    return by_features(elu(q) + 1, elu(k) + 1, v, keys)


def by_features(f_q: Tensor, f_k: Tensor, v: Tensor, keys: Tensor | None) -> Tensor:
    """Attention whose weights are products of features [B, H, N, F] >= 0, by associativity."""
    if keys is not None:
        f_k = f_k * keys[:, None].to(f_k.dtype)
    summed = f_k.sum(dim=2, keepdim=True)
    total = (f_q * summed).sum(-1, keepdim=True)
    return (f_q @ (f_k.mT @ v)) / total.clamp(min=1e-9)


def performer(given: Operands, rows: Tensor) -> Tensor:
    """Linear attention with FAVOR+ features, whose products are exp(q.k / sqrt(D)) on average.

    O(N F D) for F features, with random directions ``rows`` [F, D]. It has no matrix of
    probabilities, so nothing is dropped.

    Source: Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, lemma 1 (positive
    features) and section 2.4 (orthogonal directions).
    """
    q, k, v, keys, _ = given
    rows = rows.to(q)
    shrunk = q.shape[-1] ** -0.25  # the root of the scale, on either side
    of_q = features(q * shrunk, rows, together=False)
    return by_features(of_q, features(k * shrunk, rows, together=True), v, keys)


def directions(count: int, width: int) -> Tensor:
    """Normal rows, orthogonal within every ``width`` of them: float32 [count, width]."""
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(-(-count // width)):
        # Its signs prefer no direction (Mezzadri, 2007), as those of a QR alone would.
        square = torch.nn.init.orthogonal_(torch.empty(width, width), generator=generator)
        lengths = torch.randn(width, width, generator=generator).norm(dim=1, keepdim=True)
        blocks.append(square * lengths)
    return torch.cat(blocks)[:count]


def features(x: Tensor, rows: Tensor, *, together: bool) -> Tensor:
    """``exp(rows x - |x|^2 / 2 - c) / sqrt(F)``; c keeps it finite and cancels in the division.

    x is [B, H, N, D], rows are [F, D]. ``together``: all rows of x have one c, because features of
    keys are summed over them.
    """
    s = x @ rows.mT - x.square().sum(-1, keepdim=True) / 2
    c = s.detach().amax((-2, -1) if together else -1, keepdim=True)
    return (s - c).exp() / math.sqrt(rows.shape[0])
