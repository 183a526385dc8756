"""The account of bytes: what attention moves between slow and fast memory, predicted.

The whole account of a problem is here: ours beside plain attention, forward and backward. It is
what a plan and ``tilewise explain`` say. It is made of

    count     operands, passes and their sums; what a cache in between saves; seconds on a chip
    visits    which tiles a walk visits, for any mask, and what those of bands and lengths share
    tiled     the tiled algorithm in every loop order, byte for byte
    plain     attention that writes its matrix, pass by pass
    memory    what has to be held at once, and what fits

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tilewise.chips import Chip
from tilewise.plan.loops import Loops
from tilewise.plan.traffic import memory, plain, tiled
from tilewise.plan.traffic.count import Operand, Pass, Seconds, Traffic, predict
from tilewise.plan.traffic.visits import Visits, lengths_of, visits_of
from tilewise.problem import Operands, Problem

__all__ = [
    "Account",
    "Comparison",
    "Operand",
    "Pass",
    "Traffic",
    "Visits",
    "account",
    "visits_of",
]


class Comparison(NamedTuple):
    """Traffic of one direction, for tilewise and for plain attention."""

    ours: Traffic
    plain: Traffic


class Account(NamedTuple):
    """Account of what an attention moves.

    Args:
        problem: what was computed.
        loops: how it is walked.
        visits: of the forward's tiles.
        forward, backward: both ways of doing it. Of the operands between fast memory and what is
            next to it: ``Traffic.behind`` takes the caches into account.
        lists_bytes: of key lists, which a call holds besides.
    """

    problem: Problem
    loops: Loops
    visits: Visits
    forward: Comparison
    backward: Comparison
    lists_bytes: int = 0

    @property
    def both(self) -> Comparison:
        """Forward and backward."""
        (ours, other), (ours_after, other_after) = self.forward, self.backward
        return Comparison(ours.plus(ours_after), other.plus(other_after))

    def reaching(self, traffic: Traffic, chip: Chip) -> Traffic:
        """Return what of an account reaches the memory of a chip."""
        return traffic.behind(chip.last_cache_bytes, chip.cores)

    @property
    def dtype(self) -> str:
        """Return the name of the dtype in which ours multiplies."""
        return self.loops.products or str(self.problem.dtype).removeprefix("torch.")

    def seconds(self, traffic: Traffic, chip: Chip) -> Seconds:
        """Return how long it takes there.

        Raises:
            InvalidArgument: the chip's row lacks a figure.
        """
        return predict(self.reaching(traffic, chip), chip, self.dtype)

    def held(self, training: bool = True) -> tuple[int, int] | None:
        """Bytes held at the highest, ours and plain; None where sequences differ in length."""
        if self.problem.layout != "dense" or self.problem.page_size:
            return None
        ours = memory.tiled_held(self.problem, training).peak() + self.lists_bytes
        return ours, memory.plain_held(self.problem, training).peak()


def account(
    problem: Problem,
    loops: Loops,
    operands: Operands | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> Account:
    """Return the account of a problem.

    Args:
        problem: what to compute.
        loops: of the backend that does it.
        operands: with what; may be left out where mask and score capture no tensor.
        lengths: of a variable-length call without operands.

    Raises:
        InvalidArgument, Unsupported: as ``visits_of``.
    """
    if operands is not None:
        lengths = lengths_of(problem, operands) or lengths
    found: dict[tuple[int, int], Visits] = {}

    def of(tile: tuple[int, int]) -> Visits:
        if tile not in found:
            found[tile] = visits_of(problem, tile, operands, lengths)
        return found[tile]

    visited = of(loops.forward)
    if not trains(problem):
        nothing = Traffic(())
        backward = Comparison(nothing, nothing)
    else:
        backward = Comparison(_backward(problem, loops, of), plain.backward(problem, lengths))
    if loops.split_keys:
        forward = tiled.forward_in_parts(problem, visited, loops.split_keys, loops.shared)
    else:
        forward = tiled.forward(problem, visited)
    ours = Comparison(forward, plain.forward(problem, lengths))
    return Account(problem, loops, visited, ours, backward)


def trains(problem: Problem) -> bool:
    """Return whether there is a backward pass: not with pages, and not of eight bits."""
    return problem.page_size == 0 and problem.dtype.itemsize > 1


def _backward(problem: Problem, loops: Loops, of: Callable[[tuple[int, int]], Visits]) -> Traffic:
    if loops.order == "by_tiles":
        held = of(loops.keys or loops.backward)
        return tiled.backward_by_tiles(problem, of(loops.backward), held)
    if loops.order == "in_turns":
        return tiled.backward_in_turns(problem, of(loops.backward))
    if loops.order == "keys_outside":
        computed = of(loops.blocks or loops.backward)
        return tiled.backward_keys_outside(problem, of(loops.backward), computed=computed)
    return tiled.backward_rows_outside(problem, of(loops.backward))


@lru_cache(maxsize=256)
def cached(problem: Problem, loops: Loops) -> Account:
    """Return the account of a problem without tensors in its mask and score, made once."""
    return account(problem, loops)


def cost(problem: Problem, loops: Loops) -> int | None:
    """Return the cost for choosing a backend: the forward's bytes per head of one batch item.

    A choice decides how rows are rounded, and so may depend on a row's own sequence but not on the
    batch or the heads. None where tensors would have to be looked at.
    """
    if (
        problem.layout != "dense"
        or problem.page_size
        or any(instr.slots for instr in problem.mask + problem.score)
    ):
        return None
    one = problem._replace(batch=1, heads=1, kv_heads=1)
    return cached(one, loops).forward.ours.bytes
