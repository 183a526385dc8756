"""Where a process stands in a mesh: its place in the ring, and among those that share heads.

DTensors bring a mesh along. Their local rows are computed with, and results are wrapped like q.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor
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


class Wrapped(NamedTuple):
    """Local tensors of a call with DTensors, and how a result becomes one.

    Args:
        q, k, v: of this process.
        sinks: all of them; their gradient is a sum over processes that is still to be taken.
        wrap: makes a DTensor of a local result, whose sequence is in the given dimension.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    wrap: Callable[[Tensor, int], Tensor]


def is_dtensor(x: object) -> bool:
    """Return whether something is a DTensor; nothing is before torch has loaded them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def unwrap(q: Any, k: Any, v: Any, sinks: Any, dim: int, schedule: Schedule | Layout) -> Wrapped:
    """Return the local tensors of DTensors.

    Args:
        q: a DTensor, sharded along the sequence by each dimension of its mesh.
        k: sharded likewise, over the same mesh.
        v: likewise.
        sinks: a replicated DTensor, a tensor, or None.
        dim: of the sequence, in q, k and v.
        schedule: of the call.

    Raises:
        InvalidArgument: naming one that is no DTensor, or is sharded otherwise; a schedule by which
            a process holds more than one run of rows, as no DTensor is sharded like that.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x):
            raise InvalidArgument(name, "a plain tensor", "a DTensor, as the others are")
        mesh, placements = x.device_mesh, tuple(x.placements)
        if mesh != q.device_mesh or any(each != Shard(dim) for each in placements):
            required = f"q's mesh, and Shard({dim}) in each of its dimensions"
            raise InvalidArgument(name, f"{mesh} with {placements}", required)
    if schedule == "zigzag" or isinstance(schedule, Layout):
        came = "a Layout" if isinstance(schedule, Layout) else repr(schedule)
        required = "'ring', 'gather' or 'ulysses' with DTensors: Shard gives a process one run"
        fix = "For 'zigzag' or a Layout, pass plain tensors that tilewise.distributed.shard cut."
        raise InvalidArgument("schedule", came, required, fix)
    if is_dtensor(sinks):
        if any(each != Replicate() for each in sinks.placements):
            raise InvalidArgument("sinks", str(sinks.placements), "Replicate")
        sinks = sinks.to_local(grad_placements=[Partial()] * sinks.device_mesh.ndim)
    mesh = q.device_mesh

    def wrap(x: Tensor, of: int) -> Tensor:
        found: Tensor = DTensor.from_local(x, mesh, [Shard(of)] * mesh.ndim, run_check=False)
        return found

    return Wrapped(q.to_local(), k.to_local(), v.to_local(), sinks, wrap)
