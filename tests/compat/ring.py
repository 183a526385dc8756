"""Ring attention in one process, over flash-attn's forward and backward passes.

Each of R ranks holds two pieces of the sequence, the i-th and the i-th from the end ("zigzag"), so
that causal attention gives all of them the same work. Keys travel around the ring; a rank merges
what it finds by its lse, and its backward passes take the merged output and lse. Here the ranks are
rounds of a loop, and what would be sent is handed over.

Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)


class Share(NamedTuple):
    """What a rank holds of q, k and v: two pieces of the sequence, one behind the other."""

    rank: int
    rows: Tensor


class Block(NamedTuple):
    """One block of a rank's work: which of its rows, which of the keys' rows, causal or not."""

    rows: slice
    keys: slice
    causal: bool


def shares(length: int, ranks: int) -> list[Share]:
    """The rows of each rank; ``length`` is a multiple of 2 ``ranks``."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return [Share(r, torch.cat((pieces[r], pieces[-1 - r]))) for r in range(ranks)]


def block(rank: int, source: int, half: int) -> Block:
    """What of the keys of ``source`` a rank's rows see, in causal attention."""
    whole, first, second = slice(None), slice(None, half), slice(half, None)
    if source == rank:
        return Block(whole, whole, True)
    return Block(whole, first, False) if source < rank else Block(second, whole, False)


def merge(found: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over disjoint keys as one, in float32; lse is laid out as the rows of out."""
    if found is None:
        return out.float(), lse
    past, its = found
    both = torch.logaddexp(its, lse)
    return past * (its - both).exp() + out.float() * (lse - both).exp(), both


class Ring(torch.autograd.Function):
    """Causal attention of [B, S, H, D] tensors over ranks."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: int, scale: float) -> Tensor:
        """Each rank's rows against the keys of all ranks, one after the other."""
        own, half = shares(q.shape[1], ranks), q.shape[1] // (2 * ranks)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
        for rank, rows in own:
            merged = (
                torch.zeros(q.shape[0], len(rows), *q.shape[2:]),
                torch.full((q.shape[0], len(rows), q.shape[2], 1), -torch.inf),
            )
            for step in range(ranks):
                source = (rank - step) % ranks
                there = own[source].rows
                part = block(rank, source, half)
                one = q[:, rows][:, part.rows], k[:, there][:, part.keys], v[:, there][:, part.keys]
                found = _flash_attn_forward(*one, 0.0, scale, part.causal, -1, -1, 0.0, None, False)
                place = found[1].transpose(1, 2)[..., None]
                now = merge((merged[0][:, part.rows], merged[1][:, part.rows]), found[0], place)
                merged[0][:, part.rows], merged[1][:, part.rows] = now
            out[:, rows] = merged[0].to(q.dtype)
            lse[:, :, rows] = merged[1][..., 0].transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ranks, ctx.scale = ranks, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """The same blocks again, each with the merged output and lse of its rows."""
        q, k, v, out, lse = ctx.saved_tensors
        own, half = shares(q.shape[1], ctx.ranks), q.shape[1] // (2 * ctx.ranks)
        sums = [torch.zeros(x.shape) for x in (q, k, v)]
        buffers = [torch.empty_like(x[:, own[0].rows]) for x in (q, k, v)]
        for rank, rows in own:
            for step in range(ctx.ranks):
                source = (rank - step) % ctx.ranks
                there = own[source].rows
                part = block(rank, source, half)
                mine, theirs = rows[part.rows], there[part.keys]
                dq, dk, dv = buffers
                room = dq[:, : len(mine)], dk[:, : len(theirs)], dv[:, : len(theirs)]
                given = dout[:, mine], q[:, mine], k[:, theirs], v[:, theirs], out[:, mine]
                _flash_attn_backward(
                    *given, lse[:, :, mine].contiguous(), *room, 0.0, ctx.scale, part.causal,
                    -1, -1, 0.0, None, True,
                )  # fmt: skip
                for total, where, gradient in zip(sums, (mine, theirs, theirs), room, strict=True):
                    total[:, where] += gradient.float()
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None


class PackedRing(torch.autograd.Function):
    """Full attention of packed sequences [T, H, D] whose keys are split among ranks by thirds."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, ranks: int
    ) -> Tensor:
        """The rows against each rank's keys."""
        parts = split(cu_k, ranks)
        found = None
        rows = int(cu_q.diff().max())
        for keys, cu in parts:
            longest = int(cu.diff().max())
            out, lse, *_ = _flash_attn_varlen_forward(
                q, k[keys], v[keys], cu_q, cu, rows, longest, 0.0, 0.3, False
            )
            found = merge(found, out, lse.transpose(0, 1)[..., None])
        assert found is not None
        ctx.save_for_backward(q, k, v, found[0].to(q.dtype), found[1][..., 0].T.contiguous(), cu_q)
        ctx.parts, ctx.rows = parts, rows
        return found[0].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Each rank's keys again."""
        q, k, v, out, lse, cu_q = ctx.saved_tensors
        total, grads = torch.zeros(q.shape), (torch.empty_like(k), torch.empty_like(v))
        for keys, cu in ctx.parts:
            dq, dk, dv = (torch.empty_like(x) for x in (q, k[keys], v[keys]))
            longest = int(cu.diff().max())
            _flash_attn_varlen_backward(
                dout, q, k[keys], v[keys], out, lse, dq, dk, dv, cu_q, cu, ctx.rows, longest,
                0.0, 0.3, False, -1, -1, 0.0, None, True,
            )  # fmt: skip
            total += dq.float()
            grads[0][keys], grads[1][keys] = dk, dv
        return total.to(q.dtype), *grads, None, None, None


def split(cu: Tensor, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """For each rank the packed keys of its share of every sequence, and their cu_seqlens."""
    found = []
    sequences = [torch.arange(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
    for rank in range(ranks):
        own = [keys.tensor_split(ranks)[rank] for keys in sequences]
        lengths = torch.tensor([0, *(len(keys) for keys in own)], dtype=torch.int32)
        found.append((torch.cat(own), lengths.cumsum(0, dtype=torch.int32)))
    return found
