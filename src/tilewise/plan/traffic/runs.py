"""Tiles of keys that a tile of queries visits, where they are one run that arithmetic finds."""

from __future__ import annotations

from tilewise.problem import Problem
from tilewise.variants.program import Instr, Program


def is_run(mask: Program) -> bool:
    """Return whether the tiles of every row are one run: a mask of bands and lengths alone."""
    return all(
        instr.op in ("band", "and") or (instr.op == "below" and not instr.slots) for instr in mask
    )


def runs_of(problem: Problem, tile: tuple[int, int]) -> list[tuple[range, range]]:
    """Row tile by row tile: its rows, and the keys of the tiles that all leaves may see.

    Args:
        problem: what to compute, with a mask that ``is_run``.
        tile: queries and keys of a tile.
    """
    (across, along), queries, keys = tile, problem.queries, problem.keys
    found = []
    for start in range(0, queries, across):
        rows = range(start, min(start + across, queries))
        first, last = 0, -(-keys // along) - 1
        for instr in problem.mask:
            low, high = _bounds(instr, rows, queries, keys)
            first = max(first, low // along if low < keys else last + 1)
            last = min(last, high // along)
        some = last >= first
        found.append((rows, range(first * along, min((last + 1) * along, keys) if some else 0)))
    return found


def _bounds(instr: Instr, rows: range, queries: int, keys: int) -> tuple[int, int]:
    """Return the first and last key that any of the rows may see by one leaf."""
    if instr.op == "below":
        return 0, int(instr.params[0]) - 1
    if instr.op != "band":
        return 0, keys - 1
    left, right, anchor = (int(number) for number in instr.params)
    shift = keys - queries if anchor else 0
    low = max(0, rows.start + shift - left) if left >= 0 else 0
    return low, rows.stop - 1 + shift + right if right >= 0 else keys - 1
