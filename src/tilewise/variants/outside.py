"""Indices of a mask or score that leave their tensor for certain, found before a call.

Intervals over the whole call say which indices may leave. For those a witness is looked for: a pair
whose result depends on an element beyond the end, whatever the captured tensors hold. For a score
the pair has to attend for certain. A load behind a ``where``, a product with 0 or another part of
the mask that decides has no witness. What has none stays clamped, and a call in ``checked()`` mode
looks at every pair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.variants.expr import Expr, Graph, Node, decode
from tilewise.variants.graphs import axis_indices, mask_expression
from tilewise.variants.intervals import Bounds, Interval, bounds, every_bound
from tilewise.variants.lower import Extent
from tilewise.variants.program import BY_USER, EXPR, Instr, Program

_LETTERS = "bhmn"
_MOST_SEQUENCES = 8
_Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class _Sizes(NamedTuple):
    """Sizes of one sequence, or of a dense call's batch items, with the first and last ``b``."""

    first: int
    last: int
    heads: int
    queries: int
    keys: int


class _Reads(NamedTuple):
    """An expression that reads captured tensors: a mask, or one step of a score."""

    argument: str
    expr: Expr
    shapes: _Shapes  # by the slot of a load
    slots: tuple[int, ...]  # what the user knows the slots as
    broadcast: bool  # it may hold a built-in bias, whose dimensions of size 1 are broadcast


class _Found(NamedTuple):
    """An index outside of its tensor: where, and what it can be in the whole call."""

    argument: str
    slot: int
    shape: tuple[int, ...]
    dim: int
    place: int
    span: Interval | None
    pair: tuple[int, ...]


def refuse_outside(
    mask: Program,
    score: Program,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
    extent: Extent,
) -> None:
    """Refuse a mask or score whose result depends for certain on an index outside of its tensor.

    Where the extent does not know the lengths nothing is refused.

    ``mask_captured`` and ``score_captured`` are tensors as the user gave them.
    """
    if extent.ragged:
        sizes = _longest(extent)
    else:
        sizes = (_Sizes(0, extent.batch - 1, extent.heads, extent.queries, extent.keys),)
    mask_shapes = tuple([tuple(tensor.shape) for tensor in mask_captured])
    score_shapes = tuple([tuple(tensor.shape) for tensor in score_captured])
    for each in sizes:
        found = _outside(mask, score, mask_shapes, score_shapes, each)
        if found is not None:
            _refuse(found)


def _refuse(found: _Found) -> None:
    at = ", ".join(f"{letter} {x}" for letter, x in zip(_LETTERS, found.pair, strict=True))
    span, size = found.span, found.shape[found.dim]
    among = "" if span is None else f" (of indices from {span.low:.0f} to {span.high:.0f})"
    where = " at every pair that attends" if found.argument == "score" else ""
    raise InvalidArgument(
        found.argument,
        f"the index {found.place}{among} into dimension {found.dim} of captured tensor "
        f"{found.slot}, of shape {list(found.shape)}, at {at}",
        f"an index from 0 to {size - 1}{where}" if size else "a tensor that is not empty",
        "Clamp the index (torch.clamp) if the edge is meant, mask the pair, or enlarge the tensor.",
    )


def _longest(extent: Extent) -> tuple[_Sizes, ...]:
    """Sequences of a variable-length call that are looked at: the ends and the longest ones."""
    queries, keys = extent.query_counts, extent.key_counts
    if not queries or len(queries) != len(keys):
        return ()
    every = range(len(queries))
    chosen = {0, len(queries) - 1}
    if len(queries) <= _MOST_SEQUENCES:
        chosen = set(every)
    else:
        chosen |= {max(every, key=queries.__getitem__), max(every, key=keys.__getitem__)}
    return tuple([_Sizes(b, b, extent.heads, queries[b], keys[b]) for b in sorted(chosen)])


@lru_cache(maxsize=1024)
def _outside(
    mask: Program, score: Program, mask_shapes: _Shapes, score_shapes: _Shapes, sizes: _Sizes
) -> _Found | None:
    """Return the first index with a witness; None if there is none."""
    if sizes.last < sizes.first or 0 in sizes[2:]:
        return None  # no pair at all
    box = {
        "b": Interval(sizes.first, sizes.last),
        "h": Interval(0, sizes.heads - 1),
        "m": Interval(0, sizes.queries - 1),
        "n": Interval(0, sizes.keys - 1),
        "M": Interval(sizes.queries, sizes.queries),
        "N": Interval(sizes.keys, sizes.keys),
    }
    for reads in (*_of_mask(mask, mask_shapes), *_of_score(score, score_shapes)):
        known = every_bound(reads.expr, box)
        doubtful = {
            (place, dim)
            for place, dim, size in _indices(reads)
            if not _inside(known[reads.expr.nodes[place].args[dim]], size)
        }
        if doubtful:
            found = _witness(mask, reads, sizes, doubtful, known)
            if found is not None:
                return found
    return None


def _of_mask(mask: Program, shapes: _Shapes) -> Iterator[_Reads]:
    if shapes:
        expr = mask_expression(mask, tuple(map(len, shapes)))
        yield _Reads("mask", expr, shapes, tuple(range(len(shapes))), True)


def _of_score(score: Program, shapes: _Shapes) -> Iterator[_Reads]:
    for instr in score:
        expr = _as_expr(instr, shapes)
        if expr is not None:
            own = tuple([shapes[slot] for slot in instr.slots])
            yield _Reads("score", expr, own, instr.slots, instr.op == EXPR)


def _as_expr(instr: Instr, shapes: _Shapes) -> Expr | None:
    """Return the step as an expression; None for one that a user's index is not in."""
    if instr.op == EXPR:
        return decode(str(instr.params[0]))
    if not instr.params or instr.params[0] != BY_USER or instr.op not in ("bias", "alibi"):
        return None
    axes = instr.params[1:]
    if len(axes) != len(shapes[instr.slots[0]]):
        return None  # lowered already
    graph = Graph()
    return graph.expr(graph.load("float", 0, axis_indices(graph, axes)))


def _indices(reads: _Reads) -> Iterator[tuple[int, int, int]]:
    """(place of the load, dimension, size) of every index."""
    for place, node in enumerate(reads.expr.nodes):
        if node.op.startswith("load_") and node.value is not None:
            shape = reads.shapes[int(node.value)]
            fitted = reads.broadcast and _as_built_in(reads.expr, node)
            for dim, size in enumerate(shape[: len(node.args)]):
                if not (fitted and size == 1):
                    yield place, dim, size


def _as_built_in(expr: Expr, load: Node) -> bool:
    """Return whether a load reads as ``scores.bias`` or ``alibi`` do beside other steps.

    Their tensors broadcast: an index past a dimension of size 1 reads its only element.
    """
    letters = "".join([expr.nodes[arg].op for arg in load.args])
    return _LETTERS.endswith(letters) or _LETTERS[:2].endswith(letters)


def _inside(index: Bounds, size: int) -> bool:
    return isinstance(index, Interval) and index.low >= 0 and index.high < size


def _pairs(mask: Program, sizes: _Sizes) -> Iterator[tuple[int, int, int, int]]:
    """Corners of the call, and the ends of its diagonals and of the mask's bands."""
    shift = sizes.keys - sizes.queries
    for m in sorted({0, sizes.queries - 1}):
        columns = {0, sizes.keys - 1, m, m + shift}
        for instr in mask:
            if instr.op == "band":
                left, right, anchor = (int(x) for x in instr.params)
                row = m + (shift if anchor else 0)
                columns |= {row - max(left, 0), row + max(right, 0)}
            elif instr.op == "below" and not instr.slots:
                columns.add(int(instr.params[0]) - 1)
        for n in sorted(x for x in columns if 0 <= x < sizes.keys):
            for b in sorted({sizes.first, sizes.last}):
                for h in sorted({0, sizes.heads - 1}):
                    yield b, h, m, n


def _witness(
    mask: Program,
    reads: _Reads,
    sizes: _Sizes,
    doubtful: set[tuple[int, int]],
    whole: Sequence[Bounds],
) -> _Found | None:
    expr = reads.expr
    for pair in _pairs(mask, sizes):
        point = {letter: Interval(x, x) for letter, x in zip(_LETTERS, pair, strict=True)}
        point["M"] = Interval(sizes.queries, sizes.queries)
        point["N"] = Interval(sizes.keys, sizes.keys)
        if reads.argument == "score" and bounds(mask_expression(mask), point) is not True:
            continue  # it may not attend: that depends on what the mask captures
        known = every_bound(expr, point)
        used = _used(expr, known)
        for place, dim in sorted(doubtful):
            node = expr.nodes[place]
            index = known[node.args[dim]]
            assert node.value is not None
            shape = reads.shapes[int(node.value)]
            if place not in used or not isinstance(index, Interval):
                continue
            if index.low >= shape[dim] or index.high < 0:
                over = whole[node.args[dim]]
                span = over if isinstance(over, Interval) else None
                slot = reads.slots[int(node.value)]
                return _Found(reads.argument, slot, shape, dim, int(index.low), span, pair)
    return None


def _used(expr: Expr, known: Sequence[Bounds]) -> set[int]:
    """Return the nodes that the value depends on for certain, where these are their values."""
    used: set[int] = set()
    left = [expr.outputs[0]]
    while left:
        place = left.pop()
        if place in used:
            continue
        used.add(place)
        node = expr.nodes[place]
        if node.op == "where":
            condition = known[node.args[0]]
            left.append(node.args[0])
            if isinstance(condition, bool):
                left.append(node.args[1 if condition else 2])
        elif node.op in ("and", "or", "mul") and len(node.args) == 2:
            for arg, other in (node.args, node.args[::-1]):
                if _counts(expr, known, node.op, other):
                    left.append(arg)
        else:
            left.extend(node.args)
    return used


def _counts(expr: Expr, known: Sequence[Bounds], op: str, other: int) -> bool:
    """Return whether one argument of an operation counts beside the other one."""
    value = known[other]
    if op != "mul":
        return isinstance(value, bool) and value is (op == "and")
    if isinstance(value, Interval) and (value.low > 0 or value.high < 0):
        return True
    # The score itself is not 0 by intention; an element of a tensor may be.
    return expr.nodes[other].op == "s"


_CHECKED = ContextVar("tilewise_checked", default=os.environ.get("TILEWISE_CHECKED") == "1")


@contextmanager
def checked() -> Iterator[None]:
    """Raise an error for an index outside its tensor at a pair that attends.

    Without it, such an index reads the nearest element. Inside the block, each eager call of
    attention first evaluates the indices of its mask and score for all pairs, in plain torch.
    ``TILEWISE_CHECKED=1`` in the environment does this everywhere. Use it to find mistakes, not for
    speed.
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def is_checked() -> bool:
    """Return whether the caller is in checked mode."""
    return _CHECKED.get()
