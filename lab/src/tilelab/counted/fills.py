"""Count fills: what a processor's cache takes in, as cachegrind counts it.

A cache with write-allocation takes a line in when it is first read *or written*. Lines that go back
later are not counted here. So a fill is not a byte of traffic. An operand that is read and written
in place is filled once, and a kernel's working memory is filled like any other. That memory also
takes up a part of the cache: on a GPU tiles lie in registers and shared memory, on a processor in
the cache itself (``Pass.held``).

``core_forward`` and ``core_backward`` are the loops of the C++ core (``csrc/passes/``) in float32
or float64, on one thread. ``fills`` takes any passes that follow one another. In the results,
``read`` is the bytes filled, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import tiled
from tilewise.plan.traffic.count import Operand, Pass, Traffic, merged
from tilewise.plan.traffic.visits import Visits, is_run, runs_of, visits_of
from tilewise.problem import Problem

_TILE_QUERIES = 64  # csrc/base/tile_sizes.h
_BLOCK_KEYS = 128  # csrc/base/schedule.h
_CHUNK_BLOCKS = 8  # csrc/passes/key_sums.h
_ONE_CHUNK = _CHUNK_BLOCKS * _BLOCK_KEYS + _BLOCK_KEYS // 2 - 1  # the most keys of a single chunk


def core_forward(problem: Problem, task_queries: int, cache_bytes: int) -> Traffic:
    """Count fills of the core's forward pass: tiles of 64 queries walk together over the keys.

    The m queries of a task need a room of m (D + Dv) e for queries and outputs, and one for scores.
    There are three cases:

    * The cache holds the room and the keys of a head: everything is filled once.
    * The cache holds the room alone: keys and values are filled once for every task.
    * The cache does not hold the room: it is filled again for every block of keys.

    Args:
        problem: what to compute, in float32 or float64.
        task_queries: m: 64, 128, 256 or 512.
        cache_bytes: of the cache.
    """
    _check(problem)
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

    Args:
        problem: what to compute, in float32 or float64.
        cache_bytes: of the cache, which has to hold a tile and a block of keys with its sums.
    """
    _check(problem)
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


def _check(problem: Problem) -> None:
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

    Args:
        traffic: passes; each walks over all its operands in step.
        cache_bytes: of the cache.
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
