"""What attention over several processes will cost, by the IO model: nothing is run or sent.

The layouts, the pieces that each process computes, and who shares which heads are those that run
(``layout``, ``Whole.pieces``, ``share_heads``). So the bytes are exact. Times are lower bounds: the
account of every piece on a chip (``plan.traffic``), replayed with its messages (``replay``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.chips import Chip, named
from tilewise.distributed.attention import check_starts, starts_of
from tilewise.distributed.heads import Heads, block, share_heads
from tilewise.distributed.layout import Layout, Schedule, check_schedule, fitting, shared_rows
from tilewise.distributed.parts import Piece, Stated, Whole, stated
from tilewise.distributed.replay import (
    Compute,
    Event,
    Leg,
    Link,
    Message,
    Numbers,
    Replay,
    Start,
    Times,
    Wait,
    link_named,
)
from tilewise.distributed.ring import KEYS, What, owner_of, reader_of, ring_events
from tilewise.engine import dispatch
from tilewise.engine.call import build_problem, read_keywords
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import Account, account, cached, trains
from tilewise.plan.traffic.report import amount, duration
from tilewise.problem import Operands, Problem
from tilewise.reference.programs import Cover
from tilewise.variants.placing import Place

_ALIKE = 1.01


class PassCost(NamedTuple):
    """One pass of a layer, forward or backward.

    Args:
        seconds: until the last rank has ended: a lower bound.
        sent, received: bytes, by rank. These are exact.
        computing: seconds, by rank.
        hidden: the share of the time that messages take which no rank waits for; 1 where there
            are none.
        path: the critical path.
    """

    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    computing: tuple[float, ...]
    hidden: float
    path: tuple[Leg, ...]

    @property
    def unevenness(self) -> float:
        """Return the work of the busiest rank over the mean."""
        mean = sum(self.computing) / len(self.computing)
        return max(self.computing) / mean if mean else 1.0


class RankMemory(NamedTuple):
    """Bytes that the fullest rank holds of attention, without what a kernel or a merge holds.

    Args:
        q, keys, out: q; k and v; out and lse. In training every layer keeps them.
        in_flight: keys and values of other ranks, and copies that are on their way to them.
        sums: unfinished outputs or gradients, in float32, and gradients on their way.
        gradients: of out, q, k and v.
    """

    q: int
    keys: int
    out: int
    in_flight: int
    sums: int
    gradients: int

    def peak(self, layers: int = 1) -> int:
        """Return the peak of a model with this many layers, of which one is at work."""
        return layers * (self.q + self.keys + self.out) + sum(self[3:])


class Forecast(NamedTuple):
    """What a layer costs.

    Args:
        schedule: who holds which rows.
        mesh: places in the ring, and ranks that share heads at each of them.
        forward: its forward pass.
        backward: its backward pass; None without one.
        memory: of the fullest rank.
    """

    schedule: Schedule | Layout
    mesh: tuple[int, int]
    forward: PassCost
    backward: PassCost | None
    memory: RankMemory

    @property
    def name(self) -> str:
        """The schedule in a word, with the mesh where it has two dimensions."""
        name = "layout" if isinstance(self.schedule, Layout) else self.schedule
        ring, heads = self.mesh
        return name if 1 in self.mesh else f"{name} {ring} x ulysses {heads}"

    @property
    def passes(self) -> tuple[PassCost, ...]:
        """The passes that there are."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def seconds(self) -> float:
        """Of all passes."""
        return sum(each.seconds for each in self.passes)


def forecast(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    mesh: int | tuple[int, int],
    schedule: Schedule | Layout = "zigzag",
    chip: Chip | str,
    link: Link | str,
    training: bool = True,
    lse_gradient: bool = False,
    mask: Any = None,
    score: Any = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Forecast:
    """Predict a call of ``context_parallel_attention``: time, bytes and memory of every rank.

    Args:
        q: [B, Hq, M, D] of the whole sequence, or packed [T, Hq, D]. Only its shape and dtype
            are read: ``torch.empty(..., device="meta")`` takes no memory.
        k: [B, Hk, N, D] likewise.
        v: [B, Hk, N, Dv] likewise.
        cu_seqlens_q: as in ``context_parallel_attention``.
        cu_seqlens_k: likewise.
        mesh: ranks, or (places in the ring, ranks that share heads at each of them).
        schedule: as in ``context_parallel_attention``.
        chip: of every rank: a row or a name of ``tilewise.chips``.
        link: between any two ranks: a row or a name of ``LINKS``, or "25GB/s".
        training: whether there is a backward, with gradients of q, k and v.
        lse_gradient: whether lse has a gradient too.
        mask: as in ``context_parallel_attention``.
        score: likewise.
        scale: likewise.
        sinks: likewise.
        dropout_p: likewise.
        backend: likewise.

    Raises:
        InvalidArgument, Unsupported: as ``context_parallel_attention``; or a chip without a
            figure, a mask with so many tiles to look at that it would take minutes.

    Source: the IO model (docs/io-model.md), with latency and bandwidth of links as in Hockney's
    model, 1994.
    """
    if not isinstance(schedule, Layout):
        check_schedule(schedule)
    chip = named(chip) if isinstance(chip, str) else chip
    link = link_named(link) if isinstance(link, str) else link
    starts = starts_of(cu_seqlens_q, cu_seqlens_k)
    packed = None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        packed = cu_seqlens_q, cu_seqlens_k
    keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, packed)
    problem = build_problem(q, k, v, keywords)._replace(sinks=False, device="cpu")
    check_starts(starts, problem.queries, problem.keys)
    device = torch.device("cpu") if q.device.type == "meta" else q.device
    whole = Whole.of(problem, keywords, starts, 0, device)
    if chip.kind == "gpu":
        whole = whole._replace(problem=whole.problem._replace(device="cuda"))
    split = _Split(whole, _mesh(mesh, schedule), schedule, chip, training and trains(problem))
    back = lse_gradient or (sinks is not None and not split.alone)
    forward = _cost(split.forward(), split, link)
    backward = _cost(split.backward(back), split, link) if split.training else None
    return Forecast(schedule, split.mesh, forward, backward, split.memory())


class Comparison(NamedTuple):
    """Schedules, the one to take first; those that do not fit into memory last.

    Args:
        forecasts: of each.
        reasons: in words, why the first is taken, and why each of the others is not.
    """

    forecasts: tuple[Forecast, ...]
    reasons: tuple[str, ...]


def compare(
    q: Tensor, k: Tensor, v: Tensor, *starts: Tensor, ranks: int, layers: int = 1, **call: Any
) -> Comparison:
    """Predict every schedule over some ranks, and say which one to take.

    These are ring, zigzag, gather, ulysses, and the faster of the first two with ulysses inside,
    for every number of ranks that divides ``ranks`` and the key heads.

    Args:
        q: [B, Hq, M, D] or packed [T, Hq, D], as in ``forecast``.
        k: [B, Hk, N, D] likewise.
        v: [B, Hk, N, Dv] likewise.
        starts: cu_seqlens_q and cu_seqlens_k of packed sequences, [sequences + 1].
        ranks: how many.
        layers: of the model: in training each of them keeps its q, k, v, out and lse.
        call: other arguments of ``forecast``.

    Raises:
        InvalidArgument, Unsupported: as ``forecast``.
    """
    chip = named(call["chip"]) if isinstance(call["chip"], str) else call["chip"]

    def of(schedule: Schedule, mesh: int | tuple[int, int]) -> Forecast:
        return forecast(q, k, v, *starts, mesh=mesh, schedule=schedule, **call | {"chip": chip})

    names: tuple[Schedule, ...] = ("ring", "zigzag", "gather", "ulysses")
    found = [of(name, ranks) for name in names]
    kv_heads = k.shape[1]
    inner = names[0] if found[0].seconds <= found[1].seconds else names[1]
    found += [
        of(inner, (ranks // heads, heads))
        for heads in range(2, min(ranks, kv_heads + 1))
        if ranks % heads == kv_heads % heads == 0
    ]
    room = chip.memory_bytes or float("inf")
    found.sort(key=lambda each: (each.memory.peak(layers) > room, each.seconds))
    # Times that are within a hundredth are the same for a lower bound: memory decides.
    alike = [each for each in found if each.seconds <= _ALIKE * found[0].seconds]
    small = [each for each in alike if each.memory.peak(layers) <= room]
    best = min(small or found[:1], key=lambda each: each.memory.peak(layers))
    found.remove(best)
    reasons = [_reason(best)]
    for each in found:
        peak = each.memory.peak(layers)
        if peak > room:
            reasons.append(f"it holds {amount(peak)} a rank of {amount(room)}")
        else:
            reasons.append(_against(each, best, layers))
    return Comparison((best, *found), tuple(reasons))


def _reason(best: Forecast) -> str:
    took = f"{duration(best.seconds)} a layer"
    if not sum(best.forward.sent):
        return f"{took}; nothing is sent"
    return (
        f"{took}; its busiest rank has {_unevenness(best):.3g} times the mean work, and ranks wait "
        f"{duration(_waiting(best))} for messages"
    )


def _against(other: Forecast, best: Forecast, layers: int) -> str:
    """Return why another schedule is not taken."""
    if other.seconds <= _ALIKE * best.seconds:
        held = amount(other.memory.peak(layers))
        return f"as fast, and it holds {held} a rank instead of {amount(best.memory.peak(layers))}"
    why, uneven = [], _unevenness(other)
    if uneven > 1.02 * _unevenness(best):
        why.append(f"its busiest rank has {uneven:.3g} times the mean work")
    waiting, computing = _waiting(other), other.seconds - _waiting(other)
    if waiting > max(_waiting(best), 0.02 * other.seconds):
        why.append(f"ranks wait {duration(waiting)} for messages")
    if not why:
        why.append(f"it computes {duration(computing)}, with smaller pieces or more sums")
    return f"{other.seconds / best.seconds:.3g} times as long: {', and '.join(why)}"


def _unevenness(found: Forecast) -> float:
    return max(each.unevenness for each in found.passes)


def _waiting(found: Forecast) -> float:
    """Return the seconds that are beyond the busiest rank's work."""
    return sum(each.seconds - max(each.computing) for each in found.passes)


def _mesh(mesh: int | tuple[int, int], schedule: Schedule | Layout) -> tuple[int, int]:
    """Return places in the ring, and ranks at each."""
    if not isinstance(mesh, int):
        if schedule == "ulysses" and mesh[0] > 1:
            raise InvalidArgument(
                "mesh", repr(mesh), "one dimension for ulysses, which has no ring"
            )
        ring, heads = mesh
    else:
        ring, heads = (1, mesh) if schedule == "ulysses" else (mesh, 1)
    if ring < 1 or heads < 1:
        raise InvalidArgument("mesh", repr(mesh), "at least one rank")
    return ring, heads


def _cost(events: Sequence[Event], split: _Split, link: Link) -> PassCost:
    ranks = split.ranks
    sent, received = (np.zeros(ranks, dtype=np.int64) for _ in range(2))
    busy, computing = np.zeros((2, ranks)), np.zeros(ranks)
    for event in events:
        if isinstance(event, Compute):
            computing += event.seconds
        elif isinstance(event, Start):
            for to, sizes in event.messages:
                sent += sizes
                received[to] += sizes
                seconds = sizes / link.bytes_s + (sizes > 0) * link.latency_s
                busy[0] += seconds
                busy[1, to] += seconds
    replayed = Replay(events, ranks, link)
    at_best = Replay(events, ranks, Link("no time at all", float("inf")))
    travelling = float(busy.max())
    waited = replayed.seconds - at_best.seconds
    return PassCost(
        replayed.seconds,
        tuple(sent.tolist()),
        tuple(received.tolist()),
        tuple(computing.tolist()),
        max(0.0, 1 - waited / travelling) if travelling else 1.0,
        replayed.critical_path(),
    )


class _Split:
    """A call among ranks: rank r is at place ``r // heads`` of the ring, with share ``r % heads``.

    Attributes:
        numbers: [share, place, place]: of the keys and values of the second place, those that rows
            of the first one see.
        seconds: [forward or backward, share, place, place]: of the rows of the first place over
            the keys of the second one; of gather, over all keys, in the diagonal.
    """

    def __init__(
        self,
        whole: Whole,
        mesh: tuple[int, int],
        schedule: Schedule | Layout,
        chip: Chip,
        training: bool,
    ) -> None:
        self.whole, self.mesh, self.training = whole, mesh, training
        self.alone, self.gathers = schedule == "ulysses", schedule == "gather"
        ring, count = mesh
        self.ranks = ring * count
        self.place, self.share = np.divmod(np.arange(self.ranks), count)
        problem = whole.problem
        self.rows, self.columns = (
            fitting("ring" if self.alone else schedule, length, ring)
            for length in (problem.queries, problem.keys)
        )
        self.of_heads = share_heads(problem.heads, problem.kv_heads, count)
        self.numbers = np.zeros((count, ring, ring), dtype=np.int64)
        self.seconds = np.zeros((2, count, ring, ring))
        for share in range(count):
            mine = self.of_heads.of(share)
            if not mine:
                continue
            own = whole.of_heads(mine, len(self.of_heads.keys[share]))
            speed = _Speed(own, chip, merges=not self.alone)
            if self.alone:
                self.seconds[:, share, 0, 0] = speed.of(own.everything())
                continue
            self.numbers[share], self.seconds[:, share] = self._of_share(own, speed)

    def _of_share(self, own: Whole, speed: _Speed) -> tuple[Numbers, Times]:
        columns = self.columns
        by_rows, by_columns = (
            np.equal.outer(np.arange(self.mesh[0]), each.owners) for each in (self.rows, columns)
        )
        sizes = np.diff(columns.bounds)
        if self.gathers:
            every = Layout((0, columns.length), (0,), 1)
            seconds = by_rows @ _Cells(own, self.rows, every, speed).seconds[..., 0, None]
            numbers = np.tile(by_columns @ sizes, (self.mesh[0], 1))
            return numbers * own.key_numbers, seconds * np.eye(self.mesh[0])
        cells = _Cells(own, self.rows, columns, speed)
        seen = by_rows @ cells.seen
        numbers = (seen * sizes) @ by_columns.T.astype(np.int64)
        return numbers * own.key_numbers, by_rows @ cells.seconds @ by_columns.T

    # ---- events

    def forward(self) -> list[Event]:
        return [
            *self._heads("q k v", to_rows=False),
            *self._ring(backward=False),
            *self._heads("out lse", to_rows=True),
        ]

    def backward(self, lse: bool) -> list[Event]:
        return [
            *self._heads("lse out" if lse else "out", to_rows=False),
            *self._ring(backward=True),
            *self._heads("v k q", to_rows=True),
        ]

    def _message(self, what: What, distance: int) -> Message:
        """Return what every rank sends of keys, or of their gradients, over a distance."""
        gives = what == KEYS
        other = (reader_of if gives else owner_of)(self.place, distance, self.mesh[0])
        reader, owner = (other, self.place) if gives else (self.place, other)
        dtype = self.whole.problem.dtype if gives else self.whole.floats
        sizes = self.numbers[self.share, reader, owner] * dtype.itemsize
        return Message(other * self.mesh[1] + self.share, sizes)

    def _ring(self, backward: bool) -> Iterator[Event]:
        count = self.mesh[0]
        seconds = self.seconds[int(backward)]
        for kind, what, distances in ring_events(count, self.gathers, gradients=backward):
            name = f"{what} {distances[0]}"
            if kind == "start":
                yield Start(name, tuple([self._message(what, each) for each in distances if each]))
            elif kind == "wait":
                yield Wait(name)
            else:
                owners = (owner_of(self.place, each, count) for each in distances)
                yield Compute(sum(seconds[self.share, self.place, each] for each in owners))

    def _heads(self, names: str, to_rows: bool) -> Iterator[Event]:
        """Yield the exchanges of rows for heads, or of heads for rows."""
        if self.mesh[1] == 1:
            return
        problem, e = self.whole.problem, self.whole.problem.dtype.itemsize
        widths = {
            "q": (problem.head_dim * e, self.rows, self.of_heads.queries),
            "k": (problem.head_dim * e, self.columns, self.of_heads.keys),
            "v": (problem.value_dim * e, self.columns, self.of_heads.keys),
            "out": (problem.value_dim * e, self.rows, self.of_heads.queries),
            "lse": (self.whole.floats.itemsize, self.rows, self.of_heads.queries),
        }
        for name in names.split():
            row, layout, heads = widths[name]
            blocks = self._blocks(layout, heads) * (row * self.whole.items)
            messages = []
            for step in range(1, self.mesh[1]):
                to = (self.share + step) % self.mesh[1]
                pair = (to, self.share) if to_rows else (self.share, to)
                sizes = blocks[(self.place, *pair)]
                messages.append(Message(self.place * self.mesh[1] + to, sizes))
            yield Start(name, tuple(messages))
            yield Wait(name)

    def _blocks(self, layout: Layout, heads: Heads) -> Numbers:
        """Return [place, rows of, heads of]: how many heads times rows these are."""
        ring, count = self.mesh
        found = np.zeros((ring, count, count), dtype=np.int64)
        for place in range(ring):
            shared = shared_rows(layout, place, count)
            # One of both sides is enough: neither depends on the other.
            rows = [block(shared, heads, each, 0)[1] for each in range(count)]
            numbers = [block(shared, heads, 0, each)[0] for each in range(count)]
            found[place] = np.outer(rows, numbers)
        return found

    # ---- memory

    def memory(self) -> RankMemory:
        """Return what the fullest rank holds."""
        every = [
            self._held(place, share) for place, share in zip(self.place, self.share, strict=True)
        ]
        return max(every, key=RankMemory.peak)

    def _held(self, place: int, share: int) -> RankMemory:
        problem, items, count = self.whole.problem, self.whole.items, self.mesh[1]
        e, f = problem.dtype.itemsize, self.whole.floats.itemsize
        widths = problem.head_dim, problem.head_dim + problem.value_dim, problem.value_dim

        def held(rows: int, columns: int, heads: int, kv: int) -> list[int]:
            """Return numbers of q, of k and v, and of out."""
            counts = rows * heads, columns * kv, rows * heads
            return [items * each * width for each, width in zip(counts, widths, strict=True)]

        rows, columns = self.rows.count(place), self.columns.count(place)
        heads, kv = len(self.of_heads.queries[share]), len(self.of_heads.keys[share])
        q, keys, out = held(rows, columns, heads, kv)
        lse = items * rows * heads
        in_flight, sums = self._in_ring(place, share, keys)
        if self.alone:
            sums = 0
        elif self.training:
            sums += q + keys
        else:
            sums = 2 * (out + lse)
        found = RankMemory(q * e, keys * e, out * e + lse * f, in_flight * e, sums * f, 0)
        gradients = (q + keys + out) * e
        if count > 1:
            # Rows of all heads lie beside all rows of some heads, and an exchange copies both.
            own_rows, own_columns = (
                shared_rows(each, place, count).count(share) for each in (self.rows, self.columns)
            )
            own = held(own_rows, own_columns, problem.heads, problem.kv_heads)
            exchanged = max(own[0] + q, own[1] + keys, own[2] + out) * e
            in_flight = max(found.in_flight, exchanged - found.sums)
            found = found._replace(
                out=found.out + own[2] * e, in_flight=in_flight + (own[0] + own[1]) * e
            )
            gradients += own[2] * e
        return found._replace(gradients=gradients) if self.training else found

    def _in_ring(self, place: int, share: int, own: int) -> tuple[int, int]:
        """Return numbers of keys in flight, and of gradients of keys beside the own ones' sum."""
        steps = np.arange(1, self.mesh[0])
        owners, readers = (each(place, steps, self.mesh[0]) for each in (owner_of, reader_of))
        coming, going = self.numbers[share, place, owners], self.numbers[share, readers, place]
        if self.gathers:
            every, came, went = own + int(coming.sum()), int(coming.sum()), int(going.sum())
            return came + max(went, every), every + came + went
        now, after, sent = np.append(0, coming), np.append(coming, 0), np.append(going, 0)
        return int((now + after + sent).max()), max(own, int((2 * coming + going).max(initial=0)))


class _Speed:
    """Seconds of pieces of a call on a chip, forward and backward.

    ``merges``: partial outputs and gradients are added up, and three numbers move for each.
    """

    def __init__(self, whole: Whole, chip: Chip, merges: bool) -> None:
        self._whole, self._chip, self._merges = whole, chip, merges
        self._known: dict[Problem, tuple[float, float]] = {}

    def of(self, piece: Piece) -> tuple[float, float]:
        own = stated(self._whole, piece)
        if own.mask_tensors or own.score_tensors or piece.starts is not None:
            return self._seconds(own, piece)
        if own.problem not in self._known:
            self._known[own.problem] = self._seconds(own, piece)
        return self._known[own.problem]

    def _seconds(self, own: Stated, piece: Piece) -> tuple[float, float]:
        found = self._account(own, piece)
        forward, backward = (
            found.seconds(each.ours, self._chip).total for each in (found.forward, found.backward)
        )
        if not self._merges:
            return forward, backward
        problem, visits = own.problem, found.visits
        moved = 3 * self._whole.floats.itemsize / (self._chip.bandwidth_bytes_s or 1.0)
        keys = visits.keys * (problem.head_dim + problem.value_dim)
        # Gradients of keys are added up here, and once more by their owner.
        of_gradients = visits.rows * problem.head_dim + 2 * keys
        return (
            forward + moved * visits.rows * (problem.value_dim + 1),
            backward + moved * of_gradients,
        )

    def _account(self, own: Stated, piece: Piece) -> Account:
        problem = own.problem
        if self._chip.kind == "gpu":
            loops = dispatch.load("gpu").loops(problem, self._chip.family)
        else:
            plan = dispatch.plan_problem(problem, self._whole.backend)
            assert plan.loops is not None
            loops = plan.loops
        if not own.mask_tensors and not own.score_tensors:
            if piece.starts is None:
                return cached(problem, loops)
            queries, keys = (np.diff(each).tolist() for each in piece.starts)
            return account(problem, loops, lengths=list(zip(queries, keys, strict=True)))
        blank = torch.empty(0)
        tensors = own.mask_tensors, own.score_tensors
        cu_q, cu_k = own.starts
        return account(
            problem,
            loops,
            Operands(blank, blank, blank, *tensors, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k),
        )


class _Cells:
    """What each chunk of rows has to do with each chunk of keys.

    Where no row of many chunks sees a key of many others, or every row all of them, they are
    looked at once. So thousands of chunks take no longer than a mask has edges.

    Attributes:
        seconds: [forward or backward, row chunk, key chunk].
        seen: [row chunk, key chunk], whether a pair is.
    """

    def __init__(self, whole: Whole, rows: Layout, columns: Layout, speed: _Speed) -> None:
        self._whole, self._rows, self._columns, self._speed = whole, rows, columns, speed
        shape = len(rows.owners), len(columns.owners)
        self.seconds, self.seen = np.zeros((2, *shape)), np.zeros(shape, dtype=bool)
        self._fill(range(shape[0]), range(shape[1]))

    def _fill(self, down: range, across: range) -> None:
        rows = range(self._rows.bounds[down.start], self._rows.bounds[down.stop])
        columns = range(self._columns.bounds[across.start], self._columns.bounds[across.stop])
        if not rows or not columns:
            return
        if len(down) == len(across) == 1:
            self._one(down, across)
            return
        whole, problem = self._whole, self._whole.problem
        if whole.starts is None:
            sizes = problem.queries, problem.keys
            place = Place(range(problem.batch), whole.heads, rows, columns, *sizes)
            seen = whole.sees(place)
            if seen is Cover.EMPTY:
                return
            if seen is Cover.FULL:
                self._alike(down, across)
                return
        for part in _halves(down) if len(down) >= len(across) else (down,):
            for other in _halves(across) if len(across) > len(down) else (across,):
                self._fill(part, other)

    def _one(self, down: Sequence[int], across: Sequence[int]) -> None:
        """Look at the first of some chunks of rows and of keys, which are all alike."""
        at = np.ix_(down, across)
        rows, columns = self._rows.rows_of(down[0]), self._columns.rows_of(across[0])
        for piece in self._whole.pieces(rows, columns):
            self.seen[at] = True
            for which, seconds in enumerate(self._speed.of(piece)):
                self.seconds[which][at] += seconds

    def _alike(self, down: range, across: range) -> None:
        """Look at every size of chunks once, of which all see one another."""
        for rows in _by_size(self._rows, down):
            for columns in _by_size(self._columns, across):
                self._one(rows, columns)


def _halves(chunks: range) -> tuple[range, range]:
    middle = len(chunks) // 2
    return chunks[:middle], chunks[middle:]


def _by_size(layout: Layout, chunks: range) -> list[list[int]]:
    """Return the chunks of each size that have rows."""
    found: dict[int, list[int]] = {}
    for chunk in chunks:
        found.setdefault(len(layout.rows_of(chunk)), []).append(chunk)
    return [same for size, same in found.items() if size]
