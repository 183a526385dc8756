"""Attention by the plain formula in torch: masks and scores are functions of index tensors.

It shares nothing with the library but the random numbers of dropout. torch's autograd
differentiates it, in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.reference.philox import keep_mask

PairFunction = Callable[..., Any]


class Rows(NamedTuple):
    """Results of a batch, [B, Hq, M, ...]: ``s`` is -inf where hidden, ``p`` before dropout."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    s: Tensor
    p: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    score: PairFunction | None = None,
    mask: PairFunction | None = None,
    sinks: Tensor | None = None,
    dropout: tuple[float, int] = (0.0, 0),
    first_batch: int = 0,
) -> Rows:
    """The formula for q [B, Hq, M, D] and k, v [B, Hk, N, ...]; each function is called once.

    Args:
        q, k, v: the operands.
        scale: None for the default.
        score: ``(s, b, h, m, n) -> s``.
        mask: ``(b, h, m, n) -> bool``.
        sinks: [Hq].
        dropout: probability and seed.
        first_batch: the index of q's first batch item: a sequence of a variable-length call.
    """
    batch, heads, M, width = q.shape
    N = k.shape[2]
    k, v = (each.repeat_interleave(heads // k.shape[1], dim=1) for each in (k, v))
    s = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(width) if scale is None else scale)
    b = first_batch + torch.arange(batch)[:, None, None, None]
    h, m, n = torch.arange(heads)[:, None, None], torch.arange(M)[:, None], torch.arange(N)
    if score is not None and s.numel():
        s = score(s, b, h, m, n).to(s.dtype).expand(batch, heads, M, N)
    if mask is not None and s.numel():
        s = s.masked_fill(~torch.as_tensor(mask(b, h, m, n)), -math.inf)
    logits = s
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None].expand(batch, heads, M, 1)
        logits = torch.cat([s, sink], dim=-1)
    dead = (logits == -math.inf).all(-1)
    safe = logits.masked_fill(dead[..., None], 0.0)
    whole = torch.softmax(safe, dim=-1).masked_fill(dead[..., None], 0.0)
    logs = torch.log_softmax(safe, dim=-1).masked_fill(whole == 0, 0.0)
    top = safe.detach().amax(-1) if safe.size(-1) else safe.new_zeros(dead.shape)
    lse = (top + torch.exp(safe - top[..., None]).sum(-1).log()).masked_fill(dead, -math.inf)
    p = kept = whole[..., :N]
    rate, seed = dropout
    if rate:
        batches = range(first_batch, first_batch + batch)
        span = {"heads": range(heads), "queries": range(M), "keys": range(N)}
        keep = keep_mask(seed, rate, batches=batches, **span)
        kept = torch.where(keep, p / (1 - rate), 0.0)
    highest = s.detach().amax(-1) if N else s.new_full((batch, heads, M), -math.inf)
    return Rows(kept @ v, lse, highest, -(whole * logs).sum(-1), s, p)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[Tensor], **keywords: Any
) -> list[Rows]:
    """The results of each sequence of a variable-length call, as of a batch of one."""
    spans = [[slice(*ends) for ends in pairwise(each.tolist())] for each in starts]
    return [
        attend(
            *(x[span].transpose(0, 1)[None] for x, span in ((q, own_q), (k, own_k), (v, own_k))),
            **keywords,
            first_batch=index,
        )
        for index, (own_q, own_k) in enumerate(zip(*spans, strict=True))
    ]


def joined(parts: Sequence[Rows], q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of sequences in the shapes of the public call: out [T, Hq, Dv], facts [Hq, T].

    Args:
        parts: of ``attend_packed``.
        q, v: its operands, which give the shapes where there is no sequence.

    Returns:
        out, lse, max_logit, entropy.
    """
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    outs += [part.out[0].transpose(0, 1) for part in parts]
    nothing = q.new_zeros(q.shape[1], 0)
    lse, highest, entropy = (
        torch.cat([nothing, *(part[place][0] for part in parts)], dim=1) for place in (1, 2, 3)
    )
    return torch.cat(outs), lse, highest, entropy
