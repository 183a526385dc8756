"""Cut a tensor into the rows that each process holds, and put it together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.layout import Layout, Mesh, Schedule, Standing, standing
from tilewise.distributed.peers import Peers, refuse_second_derivatives
from tilewise.distributed.ring import GRADIENTS
from tilewise.errors import InvalidArgument
from tilewise.variants.lower import statistics_dtype


def shard(x: Tensor, mesh: Mesh, dim: int, schedule: Schedule | Layout = "zigzag") -> Tensor:
    """Return the rows of a whole tensor that this process holds, as a copy.

    Args:
        x: [..., S, ...], the same on every process, with the whole sequence.
        mesh: as in ``context_parallel_attention``.
        dim: the dimension of the sequence.
        schedule: likewise. Lengths need not divide: see ``layout_of``.

    Returns:
        [..., rows, ...]: x with fewer entries along ``dim``, in the order of the sequence; none
        where the sequence is shorter than the number of processes. Its gradient is 0 outside of
        these rows.
    """
    return _rows(x, _own(standing(mesh, schedule), _length(x, dim)), dim)


def unshard(
    x: Tensor, mesh: Mesh, dim: int, schedule: Schedule | Layout = "zigzag", *, length: int
) -> Tensor:
    """Return the whole tensor on every process, from the rows that each holds.

    Args:
        x: [..., rows, ...]: what ``shard`` returned, or a result with these rows.
        mesh: as in ``shard``.
        dim: the dimension of the sequence.
        schedule: as in ``shard``.
        length: of the whole sequence.

    Returns:
        [..., length, ...]: x with ``length`` entries along ``dim``. Its gradient is that of this
        process's rows: every process has the whole tensor, and each takes from its gradient what
        is its own.
    """
    found: Tensor = _Unshard.apply(standing(mesh, schedule), dim, length, x)  # type: ignore[no-untyped-call]
    return found


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stands: Standing, dim: int, length: int, x: Tensor) -> Tensor:
        ctx.own, ctx.dim = _own(stands, length), dim
        if _length(x, dim) != sum(map(len, ctx.own)):
            came = f"{x.shape[dim]} rows in dimension {dim}"
            required = f"the {sum(map(len, ctx.own))} of {length} that this process holds"
            fix = "Cut the whole tensor by shard, with the same mesh and schedule."
            raise InvalidArgument("x", came, required, fix)
        shared = stands.shared(length)
        if stands.ulysses is not None and shared is not None:
            x = _everything(stands.ulysses, shared, x, dim)
        if stands.ring is not None:
            x = _everything(stands.ring, stands.layout(length), x, dim)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, _rows(grad, ctx.own, ctx.dim)


def _everything(peers: Peers, layout: Layout, x: Tensor, dim: int) -> Tensor:
    """Return the rows of all positions, in the order of the sequence."""
    x = x.movedim(dim, 0)
    parts = peers.everywhere(
        "rows", x, [(layout.count(p), *x.shape[1:]) for p in range(peers.count)]
    )
    whole = x.new_empty((layout.length, *x.shape[1:]))
    for p, part in enumerate(parts):
        for chunk, at in layout.spans(p).items():
            rows = layout.rows_of(chunk)
            whole[rows.start : rows.stop] = part[at]
    return whole.movedim(0, dim)


def every_row(peers: Peers, layout: Layout, x: Tensor, dim: int) -> Tensor:
    """Return the rows of all positions, each of which computes with them.

    In the backward pass each row's gradients go back to its owner, who adds them up in the order of
    positions, in the dtype of statistics.
    """
    found: Tensor = _EveryRow.apply(peers, layout, dim, x)  # type: ignore[no-untyped-call]
    return found


class _EveryRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, layout: Layout, dim: int, x: Tensor) -> Tensor:
        ctx.given = peers, layout, dim
        return _everything(peers, layout, x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivatives()
        peers, layout, dim = ctx.given
        sent = {p: _rows(grad, layout.ranges(p), dim).contiguous() for p in range(peers.count)}
        own = sent[peers.position]
        coming = {p: torch.empty_like(own) for p in sent if p != peers.position}
        peers.start(GRADIENTS, sent, coming).wait()
        total = torch.zeros_like(own, dtype=statistics_dtype(own.dtype))
        for p in sorted(coming):
            total += coming[p]
        return None, None, None, total.to(grad.dtype)


def _rows(x: Tensor, ranges: list[range], dim: int) -> Tensor:
    parts = [x.narrow(dim, each.start, len(each)) for each in ranges]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def _own(stands: Standing, length: int) -> list[range]:
    share = 0 if stands.ulysses is None else stands.ulysses.position
    return stands.ranges(length, stands.place, share)


def _length(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InvalidArgument("dim", str(dim), f"a dimension of a tensor of shape {list(x.shape)}")
    return x.shape[dim]
