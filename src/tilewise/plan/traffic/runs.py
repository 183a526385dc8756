"""Tiles of keys that a tile of queries visits, where they are one run that arithmetic finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilewise.problem import Problem
from tilewise.variants.program import Instr, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray


def is_run(mask: Program) -> bool:
    """Return whether the tiles of every row are one run: a mask of bands and lengths alone."""
    return all(
        instr.op in ("band", "and") or (instr.op == "below" and not instr.slots) for instr in mask
    )


class Spans(NamedTuple):
    """Of every tile of rows: its rows, and the keys that it visits, none where high <= low."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]


def spans_of(problem: Problem, tile: tuple[int, int]) -> Spans:
    """Return the runs of all tiles of rows: the keys of the tiles that all leaves may see.

    Args:
        problem: what to compute, with a mask that ``is_run``.
        tile: queries and keys of a tile.
    """
    (across, along), queries, keys = tile, problem.queries, problem.keys
    start = np.arange(0, queries, across)
    stop = np.minimum(start + across, queries)
    first, last = np.zeros_like(start), np.full_like(start, -(-keys // along) - 1)
    for instr in problem.mask:
        low, high = _bounds(instr, start, stop, queries, keys)
        first = np.maximum(first, np.where(low < keys, low // along, last + 1))
        last = np.minimum(last, high // along)
    end = np.where(last >= first, np.minimum((last + 1) * along, keys), 0)
    return Spans(start, stop, first * along, end)


def runs_of(problem: Problem, tile: tuple[int, int]) -> list[tuple[range, range]]:
    """Return the same row tile by row tile: its rows, and its keys."""
    found = zip(*(each.tolist() for each in spans_of(problem, tile)), strict=True)
    return [(range(start, stop), range(low, high)) for start, stop, low, high in found]


def _bounds(instr: Instr, start: Any, stop: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """Return the first and last key that any row of each tile may see by one leaf."""
    if instr.op == "below":
        return 0, int(instr.params[0]) - 1
    if instr.op != "band":
        return 0, keys - 1
    left, right, anchor = (int(number) for number in instr.params)
    shift = keys - queries if anchor else 0
    low = np.maximum(start + shift - left, 0) if left >= 0 else 0
    return low, stop - 1 + shift + right if right >= 0 else keys - 1
