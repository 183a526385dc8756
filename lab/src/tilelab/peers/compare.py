"""Correctness before speed, for any mask and score: the 2x rule, and the error of approximations.

Some chunks of rows of all heads are computed the plain way, in float64 and in the work's own
dtype. An exact method is held to the 2x rule (``tilelab.common.exactness``).

For gradients the output's gradient is zero in all other rows, so that the sampled rows are all
that the gradients of keys and values gather. Short problems are compared whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilelab.common.exactness import judge
from tilelab.peers.plain import attend_rows, rows_kept, seen_rows
from tilelab.peers.work import Attend, Given, Work, problem_of

_WHOLE = 512  # rows up to which all are compared
_ROWS = 16  # of a chunk
_CHUNKS = 4


class Measured(NamedTuple):
    """The distance of a result from the exact one.

    Args:
        complaint: what breaks the 2x rule; empty if nothing does.
        largest: the largest error of the output (of a backward: of the gradients).
        allowed: what the rule allows it.
        relative: root mean square of the error over that of the exact values.
    """

    complaint: str
    largest: float
    allowed: float
    relative: float


def sampled(length: int) -> list[range]:
    """The chunks of rows that are compared: the first, the last and some between."""
    if length <= _WHOLE:
        return [range(length)]
    starts = [(length - _ROWS) * i // (_CHUNKS - 1) for i in range(_CHUNKS)]
    return [range(start, start + _ROWS) for start in starts]


def compare(work: Work, given: Given, attend: Attend) -> Measured:
    """Run a method once and compare."""
    chunks = sampled(work.rows)
    grad = _only(given.grad, chunks)
    got = _results(work, given, attend, grad, chunks)
    with given.q.device:  # the reference makes what it needs on the default device
        exact = _plain(work, given, grad, chunks, torch.float64)
        plain = _plain(work, given, grad, chunks, given.q.dtype)
    names = {"forward": ("out",), "backward": ("dq", "dk", "dv")}.get(
        work.passes, ("out", "dq", "dk", "dv")
    )
    found = [_judge(*each) for each in zip(names, got, plain, exact, strict=True)]
    wrong = [each.complaint for each in found if each.complaint]
    worst = max(found, key=lambda each: each.largest / each.allowed if each.allowed else math.inf)
    relative = max(each.relative for each in found)
    return worst._replace(complaint="; ".join(wrong), relative=relative)


def _only(grad: Tensor, chunks: Sequence[range]) -> Tensor:
    kept = torch.zeros_like(grad)
    for rows in chunks:
        kept[:, :, rows.start : rows.stop] = grad[:, :, rows.start : rows.stop]
    return kept


def cut(x: Tensor, chunks: Sequence[range]) -> Tensor:
    """Return the rows of some chunks, [B, H, rows, D]."""
    return torch.cat([x[:, :, rows.start : rows.stop] for rows in chunks], dim=2)


def _results(
    work: Work, given: Given, attend: Attend, grad: Tensor, chunks: Sequence[range]
) -> list[Tensor]:
    q, k, v, _ = given
    out = attend(q, k, v)
    found = [] if work.passes == "backward" else [cut(out.detach(), chunks)]
    if work.passes != "forward":
        dq, dk, dv = torch.autograd.grad(out, given.leaves, grad)
        found += [cut(dq, chunks), dk, dv]
    return found


def _plain(
    work: Work,
    given: Given,
    grad: Tensor,
    chunks: Sequence[range],
    dtype: torch.dtype,
) -> list[Tensor]:
    problem, operands = problem_of(work, given)
    seen = seen_rows(problem, operands, chunks)
    leaves = [x.detach().to(dtype).requires_grad_(work.passes != "forward") for x in given.leaves]
    out = attend_rows(problem, operands, leaves, chunks, seen, rows_kept(work, chunks))
    found = [] if work.passes == "backward" else [out.detach()]
    if work.passes != "forward":
        dq, dk, dv = torch.autograd.grad(out, leaves, cut(grad, chunks).to(dtype))
        found += [cut(dq, chunks), dk, dv]
    return found


def _judge(name: str, got: Tensor, plain: Tensor, exact: Tensor) -> Measured:
    verdict = judge(got, plain, exact)
    size = exact.square().mean().sqrt().item()
    error = (got.double() - exact).square().mean().sqrt().item()
    relative = error / size if size else 0.0
    return Measured(verdict.fault(name), verdict.error, verdict.allowed, relative)
