"""Backends: the interface here, and the kernels of each.

The interface says whether a backend can, in which tiles, and has the two passes.

A backend sees Problems and Operands in kernel form and gives Results and Grads. It knows nothing
of autograd, of the user's arguments, or of the other backends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.plan import Tiles
from tilewise.plan.loops import Loops
from tilewise.problem import Grads, Operands, Problem, Result
from tilewise.reference.programs import Grid, covers
from tilewise.variants.program import RAW

Reader: TypeAlias = Callable[[Tensor, Tensor, Tensor], Hashable]


class Places(NamedTuple):
    """Where the keys of key lists lie, and the sums that their gradients are added to.

    Each batch item of a paged problem is a list: its block table names keys, each once.
    """

    # Both: [outer, Hk, n, D], [outer, Hk, n, Dv], any strides: the memory of the pages.
    k: Tensor
    v: Tensor
    lines: Tensor  # int64 [B], where the keys of each item are: outer * Hk + h
    # int32 [B, N], contiguous: of each key of an item its row there, rising. Beyond an item's keys
    # it has any numbers.
    inner: Tensor
    # Both: float32, shaped as k and v, contiguous; None where not wanted.
    grad_k: Tensor | None
    grad_v: Tensor | None


class Prepared(NamedTuple):
    """A backend's passes bound to one problem; a Plan holds them.

    Args:
        forward: ``(operands, statistics="") -> Result``, with the requested statistics.
        backward: ``(operands, result, grad_out, grad_lse, needs, grad_entropy=None) -> Grads``: the
            gradients that ``needs`` names, from what ``forward`` gave for these operands. The
            incoming gradients are shaped as ``result.out``, ``result.lse`` and ``result.entropy``,
            of any strides; None where lse or the entropy was not used.
        output: ``(q, k, v) -> out``, the quickest way to the output of a call that has no tensor
            and no seed beside these and wants nothing else; None where ``forward`` is. Of keys in
            pages ``(q, k, v, block_table, key_lengths, cu_seqlens_q) -> out``.
        row_max_unit: of ``Result.stats[0]``, in natural units.
        in_place: ``(operands, result, grad_out, grad_lse, needs, places, grad_entropy=None) ->
            Grads``: the backward of a paged problem whose items are key lists, as ``backward``. The
            gradients of keys and values are added to the sums of ``Places``. None where a
            backend gains by multiplying copies.
    """

    forward: Callable[..., Result]
    backward: Callable[..., Grads]
    output: Callable[..., Tensor] | None = None
    row_max_unit: float = math.log(2)
    in_place: Callable[..., Grads] | None = None


def raw_reasons(problem: Problem) -> list[str]:
    """Return why a backend that does not run Triton code cannot do a problem."""
    names = [str(instr.params[0]) for instr in problem.score if instr.op == RAW]
    remedy = "a function of (s, b, h, m, n) runs on every backend"
    return [f"the score {name!r} is Triton code, for 'gpu' alone; {remedy}" for name in names]


class Backend(ABC):
    """One way of computing attention."""

    name: ClassVar[str]
    # A slow reference is taken by itself only where no other backend is there at all.
    last_resort: ClassVar[bool] = False
    # Its kernels read lengths, pages and seeds on q's device, so the host never waits for these.
    reads_on_device: ClassVar[bool] = False

    def absence(self) -> str | None:
        """Return why this backend is absent (not built, no device); None if it is there."""
        return None

    def tensor_reader(self) -> Reader | None:
        """Return a quick reading of what a plan depends on in q, k and v; None if it has none.

        The reading has dtypes, devices and sizes. The tensors need memory: it raises what torch
        does for tensors that have none, and a TypeError for what is no tensor.
        """
        return None

    def in_question(self, problem: Problem) -> bool:
        """Return whether it is asked at all where the caller names no backend."""
        return True

    @abstractmethod
    def why_not(self, problem: Problem) -> list[str]:
        """Return why this backend cannot do the problem, one reason a line; empty if it can."""

    def notes(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """Return what else there is to say of how it does the problem, as (name, text) pairs."""
        return ()

    @abstractmethod
    def tiles(self, problem: Problem) -> Tiles:
        """Return the blocks in which it would be done."""

    def loops(self, problem: Problem, family: str = "") -> Loops:
        """Return which loops it would run, for the account of bytes: those of the reference here.

        ``family`` is of chips, for which it would be; "" for the chip of the problem's device.
        """
        found = self.tiles(problem)
        tile = (found.query_tile, found.key_tile)
        return Loops(tile, "rows_outside", tile)

    def covers(self, problem: Problem, operands: Operands, grid: Grid) -> Tensor:
        """Return for each rectangle of a grid whether the mask hides all (0), some (1) or none (2).

        ``why_not`` has nothing to say of the problem. Of the operands q, k and v are not read.

        Returns:
            uint8 [grid.batches, grid.heads, grid.rows, grid.columns].
        """
        return covers(problem, operands, grid)

    @abstractmethod
    def prepare(self, problem: Problem) -> Prepared:
        """Return both passes, with what can be computed once."""


def stats_of(lse: Tensor, unit: float) -> Tensor:
    """Return the stats of rows: [2, *lse.shape], base and weight with exp(s - lse) in mind.

    The kernels compute exp(s - unit * stats[0]) / stats[1]. The weight is that of the base as it is
    stored, so the base's rounding costs nothing, and the weight's own is relative: lse costs no
    accuracy beyond its own.

    ``lse`` is in natural units, contiguous; -inf for a row that sees no key. NaN gives NaN
    gradients. ``unit`` is that of ``stats[0]`` in natural units, above 0 (``Prepared``).
    """
    exponent = lse.double()
    base = (exponent / unit).to(lse.dtype)
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(exponent - base.double() * unit))
    return torch.stack((base, weight.to(lse.dtype)))
