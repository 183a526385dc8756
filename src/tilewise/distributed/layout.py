"""Layouts: which rows of a sequence each process holds, and where a process stands in a mesh.

A sequence is cut into **chunks**, runs of neighbouring rows. A **position** is a process's number
among those that share the sequence. It holds one or more chunks, one after the other in the order
of the sequence. The layout alone decides what is computed and in which order, not which process
holds which position.

``layout_of`` is for schedules; ``balanced_layout`` shares the work of a mask evenly, by the mask's
own count of pairs. ``standing`` reads a mesh: the place of a process in the ring, and among those
that share heads. DTensors bring a mesh along. Their local rows are computed with, and results are
wrapped like q.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.checks import check_whole
from tilewise.distributed.parts import Starts, Whole
from tilewise.distributed.peers import Peers
from tilewise.engine.call import read_keywords
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.functional import MaskLike
from tilewise.problem import Problem
from tilewise.validation import check_cu_seqlens, check_cu_tensors
from tilewise.variants.values import Mask, as_mask

Schedule: TypeAlias = Literal["ring", "zigzag", "gather", "ulysses"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_MOST_TILES = 128  # of rows, and of keys, that are looked at


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


def _assigned(work: Sequence[float], positions: int) -> tuple[int, ...]:
    """Return the position of each chunk by its work; of equals the first comes first."""
    room = len(work) // positions
    owners, loads, counts = [0] * len(work), [0.0] * positions, [0] * positions
    for chunk in sorted(range(len(work)), key=lambda c: (-work[c], c)):
        free = [p for p in range(positions) if counts[p] < room]
        position = min(free, key=lambda p: (loads[p], p))
        owners[chunk] = position
        loads[position] += work[chunk]
        counts[position] += 1
    return tuple(owners)


def balanced_layout(
    length: int,
    positions: int,
    *,
    mask: MaskLike = None,
    cu_seqlens: Tensor | None = None,
    batch: int = 1,
    heads: int = 1,
    chunks: int = 4,
) -> Layout:
    """Return a layout in which all positions have about the same work under a mask.

    The sequence is cut into ``chunks`` runs of rows for each position. The work of a run is the
    number of pairs that its rows see, counted over at most 128 x 128 tiles; a tile of which the
    mask hides some pairs counts half. The heaviest run goes to the position with the least work so
    far that has room for it (Graham, 1969).

    Args:
        length: rows of the sequence, and keys.
        positions: how many share it.
        mask: as in ``attention``, with its tensors for the whole sequence.
        cu_seqlens: int32 or int64 [sequences + 1] of packed sequences, as in ``attention_varlen``;
            None for a dense call.
        batch: B, where the mask tells batch items apart.
        heads: Hq, where it tells heads apart.
        chunks: of each position. More of them share the work better, and make smaller calls.

    Raises:
        InvalidArgument, InvalidType: as ``attention``; counts below 1.
    """
    check_whole("length", length, 0)
    runs = check_whole("chunks", chunks, 1) * check_whole("positions", positions, 1)
    whole = _whole(length, mask, cu_seqlens, batch, heads)
    bounds = even_bounds(length, runs)
    columns = even_bounds(length, min(_MOST_TILES, max(length, 1)))
    work = []
    for run in range(runs):
        tiles = -(-_MOST_TILES // runs)
        rows = [bounds[run] + each for each in even_bounds(bounds[run + 1] - bounds[run], tiles)]
        work.append(sum(_pairs(whole, m, n) for m in _spans(rows) for n in _spans(columns)))
    return Layout(bounds, _assigned(work, positions), positions)


def _spans(bounds: Sequence[int]) -> list[range]:
    return [range(*pair) for pair in pairwise(bounds)]


def _pairs(whole: Whole, rows: range, columns: range) -> float:
    """Return about how many pairs some rows see of some keys."""
    return sum(
        piece.problem.queries * piece.problem.keys / (2 if piece.problem.mask else 1)
        for piece in whole.pieces(rows, columns)
    )


def _whole(length: int, mask: MaskLike, cu_seqlens: Tensor | None, batch: int, heads: int) -> Whole:
    read = Mask(()) if mask is None else as_mask(mask)
    starts = None
    if cu_seqlens is not None:
        check_cu_tensors(cu_seqlens, cu_seqlens)
        found = tuple(check_cu_seqlens("cu_seqlens", cu_seqlens, length))
        starts, batch = Starts(found, found), len(found) - 1
    problem = Problem(
        *(batch, heads, 1, length, length, 1, 1, torch.float32, "cpu"),
        "dense" if starts is None else "varlen",
        *(read.program, (), 1.0, 0.0, False),
    )
    here = Mask(read.program, tuple([each.cpu() for each in read.captured]))
    keywords = read_keywords(here, None, None, 0.0, None, None)
    return Whole.of(problem, keywords, starts, 0, torch.device("cpu"))


Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup


class Standing(NamedTuple):
    """The processes that share the sequence."""

    ring: Peers | None  # those that hold other rows; None where there are no others
    # Those that share the rows of one place in the ring, and exchange them for heads; None where
    # there are no others.
    ulysses: Peers | None
    schedule: Schedule | Layout  # a Schedule or a Layout of the ring

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

    In a mesh of two dimensions, the first one is the ring and the second one shares heads
    (Ulysses). The schedule ``"ulysses"`` shares heads and has no ring.
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
    """Local tensors of a call with DTensors, and how a result becomes one."""

    # All three: of this process.
    q: Tensor
    k: Tensor
    v: Tensor
    # All of them; their gradient is a sum over processes that is still to be taken.
    sinks: Tensor | None
    # Makes a DTensor of a local result, whose sequence is in the given dimension.
    wrap: Callable[[Tensor, int], Tensor]


def is_dtensor(x: object) -> bool:
    """Return whether something is a DTensor; nothing is before torch has loaded them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def unwrap(q: Any, k: Any, v: Any, sinks: Any, dim: int, schedule: Schedule | Layout) -> Wrapped:
    """Return the local tensors of DTensors whose dimension ``dim`` is the sequence.

    q, k and v have to be sharded along it by each dimension of one mesh. ``sinks`` is a replicated
    DTensor, a tensor, or None. A schedule by which a process holds more than one run of rows is
    refused: no DTensor is sharded like that.
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
