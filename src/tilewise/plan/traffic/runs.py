"""Tiles of keys that a tile of queries visits, where they are one run that arithmetic finds."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.problem import Problem
from tilewise.variants.program import Instr, Program

__all__ = ["fetched", "is_run", "runs_of"]


def is_run(mask: Program) -> bool:
    """Return whether the tiles of every row are one run: a mask of bands and lengths alone."""
    return all(
        instr.op in ("band", "and") or (instr.op == "below" and not instr.slots) for instr in mask
    )


def runs_of(problem: Problem, tile: tuple[int, int]) -> list[tuple[range, range]]:
    """Row tile by row tile: its rows, and the keys of the tiles that all leaves may see.

    Args:
        problem: what is asked, with a mask that ``is_run``.
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


def fetched(walks: Sequence[range], key_bytes: int, room: int) -> int:
    """Count the keys that successive walks over the same memory bring into a cache.

    The second of two walks finds their common keys in the cache if there is room. Between two
    visits of a key lie the rest of the first walk and the beginning of the second. So everything
    from the second walk's first key to the first walk's last key must fit. Keys that only an
    earlier walk had are gone, unless all keys fit.

    Args:
        walks: in order.
        key_bytes: of what is walked over, for a key.
        room: bytes of the cache available for the keys.
    """
    seen = {key for walk in set(walks) for key in walk}
    if len(seen) * key_bytes <= room:
        return len(seen)
    total, before = 0, range(0)
    for walk in walks:
        if len(walk) == 0:
            continue
        common = min(walk.stop, before.stop) - max(walk.start, before.start)
        fits = (before.stop - walk.start) * key_bytes <= room
        total += len(walk) - (max(0, common) if fits else 0)
        before = walk
    return total
