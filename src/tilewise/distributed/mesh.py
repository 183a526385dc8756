"""Where a process stands in a mesh: its place in the ring, and among those that share heads."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.layout import (
    Layout,
    Schedule,
    check_schedule,
    even_bounds,
    fitting,
    shared_rows,
)
from tilewise.distributed.peers import Peers
from tilewise.errors import InvalidArgument, InvalidType

Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup


class Standing(NamedTuple):
    """The processes that share the sequence.

    Args:
        ring: those that hold other rows; None where there are no others.
        ulysses: those that share the rows of one place in the ring, and exchange them for heads;
            None where there are no others.
        schedule: a Schedule or a Layout of the ring.
    """

    ring: Peers | None
    ulysses: Peers | None
    schedule: Schedule | Layout

    @property
    def places(self) -> int:
        """Places in the ring."""
        return 1 if self.ring is None else self.ring.count

    @property
    def place(self) -> int:
        """This process's."""
        return 0 if self.ring is None else self.ring.position

    @property
    def gathers(self) -> bool:
        """Whether all keys come at once."""
        return self.schedule == "gather"

    @property
    def groups(self) -> list[Peers]:
        """The groups of this process: those that share heads, then the ring."""
        return [peers for peers in (self.ulysses, self.ring) if peers is not None]

    def counts(self, length: int) -> tuple[int, ...]:
        """Return how many rows of a sequence each process holds, place by place."""
        return _counts(self.layout(length), 1 if self.ulysses is None else self.ulysses.count)

    def layout(self, length: int) -> Layout:
        """Return the layout of a sequence over the places in the ring."""
        return fitting(self.schedule, length, self.places)

    def shared(self, length: int) -> Layout | None:
        """Return how the rows of this place in the ring lie among those that share them."""
        if self.ulysses is None:
            return None
        return shared_rows(self.layout(length), self.place, self.ulysses.count)

    def ranges(self, length: int, place: int, share: int) -> list[range]:
        """Return which rows of a sequence a process holds, by its place and its share of it."""
        ranges = self.layout(length).ranges(place)
        if self.ulysses is None:
            return ranges
        bounds = even_bounds(sum(map(len, ranges)), self.ulysses.count)
        first, last = bounds[share : share + 2]
        found, start = [], 0
        for each in ranges:
            part = each[max(first - start, 0) : max(last - start, 0)]
            found += [part] if part else []
            start += len(each)
        return found


@lru_cache(maxsize=256)
def _counts(layout: Layout, shares: int) -> tuple[int, ...]:
    bounds = [even_bounds(layout.count(place), shares) for place in range(layout.positions)]
    return tuple([last - first for each in bounds for first, last in pairwise(each)])


def groups_of(mesh: Mesh | None, timeout: timedelta | None) -> list[Peers]:
    """Return the groups of this process along the dimensions of a mesh, its last one first."""
    if isinstance(mesh, dist.ProcessGroup):
        return [Peers(mesh, timeout)]
    if isinstance(mesh, DeviceMesh):
        found = [Peers(group, timeout) for group in mesh.get_all_groups()[::-1]]
        for each in found:
            each.groups = found
        return found
    required = "a DeviceMesh or a ProcessGroup of torch.distributed"
    raise InvalidType("mesh", f"a {type(mesh).__name__}", required)


def standing(
    mesh: Mesh | None, schedule: Schedule | Layout, timeout: timedelta | None = None
) -> Standing:
    """Return where this process stands.

    Args:
        mesh: a process group or a DeviceMesh of one dimension; or of two, whose first one is the
            ring and whose second one shares heads (Ulysses).
        schedule: of the ring. ``"ulysses"`` shares heads and has no ring.
        timeout: of a message; None for the group's own.
    """
    if not isinstance(schedule, Layout):
        check_schedule(schedule)
    peers = groups_of(mesh, timeout)[::-1]
    if len(peers) > 2 or (len(peers) == 2 and schedule == "ulysses"):
        required = "one dimension" + (", or two: ring and heads" if len(peers) > 2 else "")
        fix = "Take the dimensions of the sequence: mesh['ring', 'heads']."
        raise InvalidArgument("mesh", f"{len(peers)} dimensions", required, fix)
    if schedule == "ulysses":
        return Standing(None, peers[0], schedule)
    return Standing(peers[0], peers[1] if len(peers) == 2 else None, schedule)
