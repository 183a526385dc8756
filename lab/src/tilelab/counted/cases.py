"""The cases that run under cachegrind, the fills that the model predicts, and the table of both.

Fills are what a processor's cache takes in, as cachegrind counts it. A cache with write-allocation
takes a line in when it is first read *or written*. Lines that go back later are not counted here.
So a fill is not a byte of traffic. An operand that is read and written in place is filled once, and
a kernel's working memory is filled like any other. That memory also takes up a part of the cache:
on a GPU tiles lie in registers and shared memory, on a processor in the cache itself
(``Pass.held``).

``core_forward`` and ``core_backward`` are the loops of the C++ core (``csrc/passes/``) in float32
or float64, on one thread. ``fills`` takes any passes that follow one another. In the results,
``read`` is the bytes filled, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch

import tilewise
from tilelab.cases import case as cases
from tilelab.cases.inputs import build, problem_of
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain, tiled
from tilewise.plan.traffic.count import Operand, Pass, Traffic, merged
from tilewise.plan.traffic.visits import Visits, is_run, runs_of, visits_of
from tilewise.problem import Problem

Method: TypeAlias = Literal["core", "plain"]
Direction: TypeAlias = Literal["forward", "backward"]

_TILE_QUERIES = 64  # csrc/base/tile_sizes.h
_BLOCK_KEYS = 128  # csrc/base/schedule.h
_CHUNK_BLOCKS = 8  # csrc/passes/key_sums.h
_ONE_CHUNK = _CHUNK_BLOCKS * _BLOCK_KEYS + _BLOCK_KEYS // 2 - 1  # the most keys of a single chunk
_LARGEST_TASK = 512  # queries of a task where threads do not ask for smaller ones


@dataclass(frozen=True)
class Case:
    """One attention behind one cache, float32, one batch item: a run of the native driver.

    It is no row of ``cases.table``, since its fields are the driver's arguments and the stored
    JSON's, and most of its rows are one attention behind other caches.
    """

    method: Method  # the C++ core, or plain attention
    direction: Direction  # of the pass
    length: int  # queries and keys
    cache: int  # bytes of the last-level cache
    heads: int = 1  # these two: Hq and Hk
    kv_heads: int = 1
    width: int = 64  # D and Dv
    causal: bool = False  # whether later keys are masked; the core only
    # Queries that walk together over the keys in the core's forward: 64 to 512.
    task: int = _LARGEST_TASK
    listed: int = 0  # keys of each query's list, which its heads share; 0: no lists

    def __post_init__(self) -> None:
        if self.method == "plain" and (self.heads != self.kv_heads or self.causal):
            raise InvalidArgument(
                "method", "plain with a mask or groups of heads", "as many key heads, and no mask"
            )
        if self.listed and (self.direction == "backward" or self.kv_heads > 1 or self.causal):
            raise InvalidArgument(
                "listed",
                f"{self.listed} keys, with a mask, a backward or several key heads",
                "the forward of one key head without a mask",
            )

    @property
    def problem(self) -> Problem:
        """The problem of the case."""
        sizes = (1, self.heads, self.kv_heads, self.length, self.length, self.width, self.width)
        attention = cases.Case(self.name, *sizes, mask=("causal",) * self.causal)
        problem, _ = problem_of(build(attention, device="meta"), None)
        return problem._replace(device="cpu")

    @property
    def name(self) -> str:
        """The case in words."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        words = [self.method, self.direction, f"N {self.length}, H {heads}, D {self.width}"]
        words += ["causal"] * self.causal
        if self.listed:
            words.append(f"lists of {self.listed}")
        elif self.method == "core" and self.direction == "forward":
            words.append(f"tasks of {self.task}")
        return ", ".join([*words, f"{self.cache >> 10} KiB"])

    @property
    def threads(self) -> int:
        """Threads for which the core cuts tasks of this size, in ``csrc/passes/forward.h``.

        Raises:
            InvalidArgument: for none.
        """
        if self.task == _LARGEST_TASK:
            return 1
        tasks = self.heads * -(-self.length // self.task)
        if self.task not in (64, 128, 256) or tasks < 8:
            raise InvalidArgument(
                "task", f"{self.task} with {tasks} tasks", "512, or 64, 128 or 256 with 8 or more"
            )
        return tasks // 4

    @property
    def arguments(self) -> dict[str, str | int]:
        """Arguments of the native driver, except what it runs."""
        return {
            "pass": self.direction,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "queries": self.length,
            "keys": self.length,
            "head_dim": self.width,
            "causal": int(self.causal),
            "listed": self.listed,
            "threads": self.threads if self.method == "core" else 1,
            "flush": 2 * self.cache,
        }

    def predicted(self) -> Traffic:
        """Predict the fills by pass and operand, by the model."""
        problem = self.problem
        if self.listed:
            q, k = (torch.empty(1, h, self.length, self.width) for h in (self.heads, 1))
            lists = torch.zeros(1, 1, self.length, self.listed, dtype=torch.int32)
            found = tilewise.explain(q, k, k, keys=lists, backend="cpu").account
            assert found is not None
            return found.forward.ours
        if self.method == "core":
            if self.direction == "forward":
                return core_forward(problem, self.task, self.cache)
            return core_backward(problem, self.cache)
        made = plain.forward(problem) if self.direction == "forward" else plain.backward(problem)
        return fills(made, self.cache)

    @property
    def allowed(self) -> float:
        """The largest relative difference between counted and predicted that is accepted."""
        return 0.15 if self.method == "core" else 0.20


def core_forward(problem: Problem, task_queries: int, cache_bytes: int) -> Traffic:
    """Count fills of the core's forward pass: tiles of 64 queries walk together over the keys.

    The m queries of a task need a room of m (D + Dv) e for queries and outputs, and one for scores.
    There are three cases:

    * The cache holds the room and the keys of a head: everything is filled once.
    * The cache holds the room alone: keys and values are filled once for every task.
    * The cache does not hold the room: it is filled again for every block of keys.

    The problem is in float32 or float64; m, ``task_queries``, is 64, 128, 256 or 512.
    """
    _check_layout(problem)
    visits = visits_of(problem, (task_queries, _BLOCK_KEYS))
    e = problem.dtype.itemsize
    widths = problem.head_dim + problem.value_dim
    rows = min(task_queries, problem.queries)
    scores = min(_BLOCK_KEYS, problem.keys) * min(_TILE_QUERIES, problem.queries) * e
    room = rows * widths * e + scores
    # A tile comes round again when the rest of one block of keys and the next have gone by.
    blocks = min(2 * _BLOCK_KEYS, problem.keys) * widths * e
    # Between two walks over the same keys a tile's rows come and its results go.
    passing = rows * (widths * e + 3 * tiled.statistic_bytes(problem.dtype))
    (walk,) = tiled.forward(problem, visits).passes
    if room + blocks > cache_bytes:
        # Packed and zeroed, walked over for every block of keys, and once more to be written out.
        again = visits.rows_walked * widths + visits.rows * (widths + problem.value_dim)
        room = again * e + scores
    walk = walk._replace(held=room + passing)
    left = cache_bytes - walk.held
    filled = _keys_filled(problem, visits, widths * e, left, last_first=True)
    if filled is None:
        (walk,) = Traffic((walk,)).behind(cache_bytes, 1).passes
    else:
        each = {"k": problem.head_dim * e, "v": problem.value_dim * e}
        operands_now = [
            one._replace(read=filled * each[one.name]) if one.name in each else one
            for one in walk.operands
        ]
        walk = walk._replace(operands=tuple(operands_now))
    walk = walk._replace(operands=(*walk.operands, Operand("room", room)))
    return fills(Traffic((walk,), visits.omitted), cache_bytes)


def core_backward(problem: Problem, cache_bytes: int) -> Traffic:
    """Return the fills of the core's backward pass, for keys of one chunk (up to 1087 of them).

    A first pass makes delta. Then tiles of 64 queries walk over the keys and values of their head
    and over the sums of dK and dV, N (D + Dv) e of each. Where the cache holds both, they are
    filled once; else for every tile.

    The problem is in float32 or float64. The cache has to hold a tile and a block of keys with its
    sums.
    """
    _check_layout(problem)
    if problem.keys > _ONE_CHUNK:
        raise InvalidArgument("keys", str(problem.keys), f"at most {_ONE_CHUNK}: one chunk")
    visits = visits_of(problem, (_TILE_QUERIES, _BLOCK_KEYS))
    e, f = problem.dtype.itemsize, tiled.statistic_bytes(problem.dtype)
    head, value = problem.head_dim * e, problem.value_dim * e
    rows, keys, groups = visits.rows, visits.keys, max(1, visits.groups)
    tile = min(_TILE_QUERIES, problem.queries)
    scores = 2 * min(_BLOCK_KEYS, problem.keys) * tile * e
    # Queries and gradients of a tile as they are and transposed, and its dQ.
    room = scores + tile * (2 * (head + value) + head)
    sums = keys // groups * (head + value)
    least = room + 2 * min(_BLOCK_KEYS, problem.keys) * (head + value)
    if cache_bytes < least:
        raise InvalidArgument("cache_bytes", str(cache_bytes), f"at least {least} for one tile")
    left = cache_bytes - room
    walked = _keys_filled(problem, visits, 2 * (head + value), left)
    if 2 * sums <= left:
        walked = min(keys, visits.keys_walked)
        room += sums
    else:  # as often as the keys, and once more to be written out
        walked = visits.keys_walked if walked is None else walked
        room += (walked + keys) * (head + value)
    first = (
        Operand("out", rows * value),
        Operand("grad_out", rows * value),
        Operand("delta", written=rows * f),
    )
    walk = (
        Operand("q", rows * head),
        Operand("grad_out", rows * value),
        Operand("stats", rows * 2 * f),
        Operand("delta", rows * f),
        Operand("k", walked * head),
        Operand("v", walked * value),
        Operand("grad_q", written=rows * head),
        Operand("grad_k", written=keys * head),
        Operand("grad_v", written=keys * value),
        Operand("room", room),
    )
    passes = Pass("delta", first), Pass("backward", walk)
    return fills(Traffic(passes, visits.omitted), cache_bytes)


def _keys_filled(
    problem: Problem, visits: Visits, key_bytes: int, left: int, last_first: bool = False
) -> int | None:
    """Keys brought into what is left of the cache, of all heads; None where walks are not runs."""
    if not is_run(problem.mask):
        return None
    walks = [keys for _, keys in runs_of(problem, visits.tile)]
    if last_first:
        walks.reverse()
    return visits.groups * fetched(walks * (visits.heads // visits.kv_heads), key_bytes, left)


def _check_layout(problem: Problem) -> None:
    if problem.layout != "dense" or problem.page_size or problem.dtype.itemsize < 4:
        raise InvalidArgument(
            "problem", f"{problem.layout} in {problem.dtype}", "a dense one in float32 or float64"
        )


def fills(traffic: Traffic, cache_bytes: int) -> Traffic:
    """Count what a cache takes in over passes one after another, evicting the oldest lines first.

    An operand from an earlier pass is still in the cache unless too much was filled since. For the
    part at a share x of the operand, (1 - x) F + B + x G bytes came since. F are the bytes of the
    pass that touched it last, B those of passes between, and G those of this pass. The part stays
    if that sum is at most the cache.

    Each pass walks over all its operands in step.
    """
    filled: list[Pass] = []
    moved: list[int] = []  # by each pass, with what was still there
    last: dict[str, int] = {}
    for place, each in enumerate(traffic.passes):
        touched = [(one.name, max(one.read, one.written)) for one in merged(each.operands)]
        moved.append(sum(size for _, size in touched))
        operands = []
        for name, size in touched:
            before = last.get(name)
            lost = 1.0
            if before is not None:
                between = sum(moved[before + 1 : place])
                lost = 1 - _kept(moved[before], between, moved[place], cache_bytes)
            operands.append(Operand(name, round(size * lost)))
            last[name] = place
        filled.append(each._replace(operands=tuple(operands), sharing=None))
    return Traffic(tuple(filled), traffic.omitted)


def _kept(first: int, between: int, now: int, cache_bytes: int) -> float:
    """Return the share of x in 0 .. 1 with (1 - x) first + between + x now <= cache_bytes."""
    left, slope = cache_bytes - between - first, now - first
    if slope == 0:
        return float(left >= 0)
    edge = min(1.0, max(0.0, left / slope))
    return edge if slope > 0 else 1 - edge


def fetched(walks: Sequence[range], key_bytes: int, room: int) -> int:
    """Count the keys that successive walks over the same memory bring into a cache.

    The second of two walks finds their common keys in the cache if there is room. Between two
    visits of a key lie the rest of the first walk and the beginning of the second. So everything
    from the second walk's first key to the first walk's last key must fit. Keys that only an
    earlier walk had are gone, unless all keys fit.

    ``room`` is bytes of the cache available for the keys.
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


def _core(direction: Direction, length: int, kib: int, **more: Any) -> Case:
    return Case("core", direction, length, kib << 10, **more)


def _plain(direction: Direction, length: int, kib: int, **more: Any) -> Case:
    return Case("plain", direction, length, kib << 10, **more)


# Of seconds each: what continuous integration runs.
QUICK: tuple[Case, ...] = (
    _plain("forward", 512, 256),
    _plain("backward", 512, 256),
    _plain("forward", 256, 128, heads=2, kv_heads=2, width=32),
    _core("forward", 512, 192, task=64),  # keys come again for every task
    _core("forward", 512, 512, task=64),  # they stay
    _core("forward", 512, 256),  # the task does not fit: it comes again for every block of keys
    _core("forward", 512, 192, heads=4, kv_heads=2, width=32, task=128),
    _core("forward", 1024, 192, width=32, task=128, causal=True),
    _core("backward", 512, 224, width=32),
    _core("backward", 512, 512, width=32),
    _core("forward", 1024, 192, heads=8, listed=64),
)

CASES: tuple[Case, ...] = (
    *QUICK,
    _plain("forward", 1024, 512),
    _plain("backward", 256, 128, heads=2, kv_heads=2, width=32),
    _plain("forward", 512, 4096),  # everything fits
    _core("forward", 256, 512, heads=2, kv_heads=2, width=32, task=64),
    _core("forward", 512, 512),
    _core("forward", 512, 320, heads=4, kv_heads=2, width=32, task=128),
    _core("forward", 1024, 256, width=32, task=128),
    _core("forward", 1024, 512, width=32, task=128),
    _core("forward", 1024, 256, heads=2, kv_heads=2, width=32, task=256),
    _core("forward", 1024, 512, width=32, task=128, causal=True),
    _core("backward", 512, 512),
    _core("backward", 512, 1024),
    _core("forward", 1024, 256, width=32, task=128, causal=True),  # the short walks stay
    _core("backward", 512, 256, heads=2, kv_heads=1, width=32, causal=True),
    _core("backward", 512, 512, heads=2, kv_heads=1, width=32, causal=True),
    # Twice the keys of a list, and as long a list of twice as many keys
    _core("forward", 1024, 192, heads=8, listed=128),
    _core("forward", 2048, 192, heads=8, listed=64),
)

# One attention behind smaller and smaller caches, near the edges too, where nothing is promised.
_KIB = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096)
SWEEP: tuple[Case, ...] = (
    *(_plain("forward", 512, kib) for kib in _KIB if kib >= 192),
    *(_core("forward", 512, kib, task=64) for kib in _KIB if kib <= 1024),
    *(_core("forward", 512, kib) for kib in _KIB if 128 <= kib <= 1024),
    *(_core("forward", 1024, k, width=32, task=128, causal=True) for k in _KIB if 128 <= k <= 1024),
)


@dataclass(frozen=True)
class Row:
    """One case."""

    case: Case  # what ran
    counted: int  # bytes of the lines that its last-level misses fetched
    predicted: int  # bytes that the model says

    @property
    def off(self) -> float:
        """The excess of the prediction over the count, as a share of the count."""
        return self.predicted / self.counted - 1

    @property
    def holds(self) -> bool:
        """Whether the excess is within the limit of the case."""
        return abs(self.off) <= self.case.allowed

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"case": asdict(self.case), "counted": self.counted, "predicted": self.predicted}

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Row:
        """Read a stored count, and predict it again with today's model."""
        case = Case(**stored["case"])
        return cls(case, stored["counted"], case.predicted().bytes)


_HEAD = (
    "| | pass | N | heads | D | cache, KiB | counted, MB | predicted, MB | off by |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown; what is off by more than is allowed says so."""
    return "\n".join([*_HEAD, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    case = row.case
    who = "plain"
    if case.method == "core":
        who = f"ours, lists of {case.listed}" if case.listed else "ours"
        who += f", tasks of {case.task}" if case.direction == "forward" and not case.listed else ""
        who += ", causal" if case.causal else ""
    heads = str(case.heads) if case.heads == case.kv_heads else f"{case.heads} on {case.kv_heads}"
    off = f"{100 * row.off:+.1f} %" + ("" if row.holds else " **too far**")
    sizes = (case.direction, case.length, heads, case.width, case.cache >> 10)
    numbers = (f"{row.counted / 1e6:.2f}", f"{row.predicted / 1e6:.2f}", off)
    return "| " + " | ".join(map(str, (who, *sizes, *numbers))) + " |"


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence."""
    parts = []
    for method, name in (("core", "ours"), ("plain", "plain")):
        of = [row for row in rows if row.case.method == method]
        if of:
            worst = max(of, key=lambda row: abs(row.off))
            parts.append(
                f"{name}: {len(of)} cases, off by {100 * abs(worst.off):.1f} % at the most "
                f"({100 * worst.case.allowed:.0f} % allowed)"
            )
    return "; ".join(parts)
