"""Layouts: which rows of a sequence each process holds.

A sequence is cut into **chunks**, runs of neighbouring rows. A **position** is a process's number
among those that share the sequence. It holds one or more chunks, one after the other in the order
of the sequence. The layout alone decides what is computed and in which order, not which process
holds which position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

from tilewise.errors import InvalidArgument

Schedule: TypeAlias = Literal["ring", "zigzag", "gather", "ulysses"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


class Layout(NamedTuple):
    """Which rows each position holds.

    Args:
        bounds: chunk c has the rows from ``bounds[c]`` on, up to ``bounds[c + 1]``.
        owners: the position of each chunk.
        positions: how many there are.
    """

    bounds: tuple[int, ...]
    owners: tuple[int, ...]
    positions: int

    @property
    def length(self) -> int:
        """Rows of the sequence."""
        return self.bounds[-1]

    def rows_of(self, chunk: int) -> range:
        """Return the rows of a chunk."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def chunks(self, position: int) -> tuple[int, ...]:
        """Return the chunks of a position that have rows, in the order of the sequence."""
        return tuple(
            [c for c, owner in enumerate(self.owners) if owner == position and self.rows_of(c)]
        )

    def ranges(self, position: int) -> list[range]:
        """Return the rows of a position: those of its chunks."""
        return [self.rows_of(chunk) for chunk in self.chunks(position)]

    def count(self, position: int) -> int:
        """Return how many rows a position holds."""
        return sum(map(len, self.ranges(position)))

    def spans(self, position: int) -> dict[int, slice]:
        """Return where each chunk of a position lies among its own rows."""
        found, start = {}, 0
        for chunk in self.chunks(position):
            stop = start + len(self.rows_of(chunk))
            found[chunk] = slice(start, stop)
            start = stop
        return found


@lru_cache(maxsize=256)
def layout_of(schedule: Schedule, length: int, positions: int) -> Layout:
    """Return the layout of a schedule.

    Of ``C`` chunks, chunk ``c`` has the rows from ``c * length // C`` on: lengths need not divide.
    ``zigzag`` has two chunks for each position, p and ``2 * positions - 1 - p``, so that all have
    the same work under a causal mask. The others have one.
    """
    check_schedule(schedule)
    owners = list(range(positions))
    if schedule == "zigzag":
        owners += owners[::-1]
    return Layout(even_bounds(length, len(owners)), tuple(owners), positions)


def fitting(schedule: Schedule | Layout, length: int, positions: int) -> Layout:
    """Return the layout of a schedule, or the one that was given, if it is of these sizes."""
    if not isinstance(schedule, Layout):
        return layout_of(schedule, length, positions)
    if (schedule.length, schedule.positions) != (length, positions):
        raise InvalidArgument(
            "schedule",
            f"a Layout of {schedule.length} rows over {schedule.positions} positions",
            f"one of {length} rows over {positions}",
        )
    return schedule


def shared_rows(layout: Layout, place: int, count: int) -> Layout:
    """Return how the rows of a place in the ring lie among the ``count`` that share them."""
    return Layout(even_bounds(layout.count(place), count), tuple(range(count)), count)


def check_schedule(schedule: object) -> None:
    """Refuse what is no schedule."""
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise InvalidArgument("schedule", repr(schedule), f"{names}, or a Layout")


def even_bounds(length: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of parts that differ by one row at the most."""
    return tuple([part * length // parts for part in range(parts + 1)])


def assigned(work: Sequence[float], positions: int) -> tuple[int, ...]:
    """Return the position of each chunk: as many chunks for each, and about the same work.

    The heaviest chunk goes to the position with the least work so far that still has room; of
    equals, to the first.

    Args:
        work: of each chunk, a multiple of the positions.
        positions: how many.
    """
    room = len(work) // positions
    owners, loads, counts = [0] * len(work), [0.0] * positions, [0] * positions
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        free = [p for p in range(positions) if counts[p] < room]
        position = min(free, key=lambda p: (loads[p], p))
        owners[chunk] = position
        loads[position] += work[chunk]
        counts[position] += 1
    return tuple(owners)
