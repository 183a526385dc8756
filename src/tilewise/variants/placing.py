"""Programs over a part of the score matrix: the same mask or score, whose positions start later.

A long sequence is computed in parts (``tilewise.distributed``). Some rows, keys and heads of a call
make a small problem, which counts its own from 0. So a mask ``n <= m`` becomes
``n + key <= m + row`` there. Most operations stay what they are: a band moves, a tensor is cut. The
others become an expression, which computes with the positions in the whole.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import Unsupported
from tilewise.variants.expr import Graph
from tilewise.variants.graphs import Pair, as_one
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.program import EXPR, RAW, Instr, Program, shift_slots


class Place(NamedTuple):
    """Where a part lies in a call: its batch items (or sequences), query heads, rows and keys.

    Rows and keys are None for all of each sequence; else they are some of the whole's M ``queries``
    and N ``keys``.
    """

    items: range
    heads: range
    rows: range | None = None
    columns: range | None = None
    queries: int = 0
    keys: int = 0


class Cut(NamedTuple):
    """What of a tensor a part reads."""

    # Of each dimension, None for all of it. One that is broadcast stays as it is.
    ranges: tuple[range | None, ...] = ()
    # The first key and the number of keys, where the tensor counts keys; else None.
    lengths: tuple[int, int] | None = None
    # Whether an expression reads it, which takes floats in the dtype of the statistics.
    wide: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the whole, or of its gradient."""
        return tensor[
            tuple(
                [
                    slice(None) if each is None or size == 1 else slice(each.start, each.stop)
                    for each, size in zip(self.ranges, tensor.shape, strict=False)
                ]
            )
        ]

    def read(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the part of a tensor of the whole as kernels read it, for q's dtype."""
        if self.lengths is not None:
            first, count = self.lengths
            return (self.view(tensor) - first).clamp(0, count)
        if self.wide and tensor.is_floating_point():
            tensor = tensor.to(statistics_dtype(dtype))
        found = self.view(tensor)
        return found.contiguous() if found.dim() <= 2 else found


class Placed(NamedTuple):
    """The program of a part, and for each of its slots the one of the whole and what is read."""

    program: Program
    slots: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()

    def tensors(self, whole: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return what the program reads, from the tensors of the whole in kernel form."""
        pairs = zip(self.slots, self.cuts, strict=True)
        return tuple([each.read(whole[slot], dtype) for slot, each in pairs])


@lru_cache(maxsize=4096)
def placed(program: Program, kind: Literal["mask", "score"], place: Place) -> Placed:
    """Return the program of a part, which is not empty.

    ``program`` is that of the whole, fitted, its tensors in kernel form (``lower.py``).

    Raises:
        Unsupported: a ``raw`` score, whose Triton code counts rows and keys by itself.
    """
    if any(instr.op == RAW for instr in program):
        raise _raw()
    steps: list[Instr] = []
    slots: list[int] = []
    cuts: list[Cut] = []
    for at, instr in enumerate(program):
        found = _moved(instr, place)
        if found is None and kind == "score" and at > 0:
            return _whole(program, kind, place)  # only its first step can be an expression
        if found is None:
            found = _whole((instr,), kind, place)
        steps += shift_slots(found.program, len(slots))
        slots += found.slots
        cuts += found.cuts
    return Placed(tuple(steps), tuple(slots), tuple(cuts))


def _whole(program: Program, kind: Literal["mask", "score"], place: Place) -> Placed:
    """Return a program as an expression that computes with the positions in the whole."""
    graph = Graph()
    leaves = {name: graph.leaf(name) for name in "bhmnMN"}
    for name, part in zip("bhmn", place[:4], strict=True):
        if part is not None:
            leaves[name] = graph.apply("add", leaves[name], graph.constant(part.start))
    if place.rows is not None:
        leaves |= {"M": graph.constant(place.queries), "N": graph.constant(place.keys)}
    expr = as_one(Pair(graph, leaves), program, kind)
    slots = expr.slots
    own = expr._replace(slots=tuple(range(len(slots))))
    return Placed((own,), slots, (Cut(wide=True),) * len(slots))


@lru_cache(maxsize=256)
def later_keys(program: Program, kind: Literal["mask", "score"], slot: int) -> Program:
    """Return the program of sequences whose first key here is a later one of the whole.

    ``program`` is as in ``placed``, and not empty. The integer tensor in ``slot``, [sequences, 2],
    has the first key of each, and N of the whole.
    """
    if any(instr.op == RAW for instr in program):
        raise _raw()
    graph = Graph()
    leaves = {name: graph.leaf(name) for name in "bhmnMN"}
    first, leaves["N"] = (
        graph.load("int", slot, (leaves["b"], graph.constant(at))) for at in range(2)
    )
    leaves["n"] = graph.apply("add", leaves["n"], first)
    return (as_one(Pair(graph, leaves), program, kind),)


def _raw() -> Unsupported:
    return Unsupported(
        "raw scores over a sequence that is split",
        fix="write the score in the language of variants",
    )


def _moved(instr: Instr, place: Place) -> Placed | None:
    """Return an operation of a part; None where only an expression can say it."""
    if instr.op == EXPR:
        return None
    found = _MOVED.get(instr.op)
    return Placed((instr,)) if found is None else found(instr, place)  # None: "and", softcap


def _with_cuts(instr: Instr, *cuts: tuple[range | None, ...]) -> Placed:
    """Return an operation that reads parts of its tensors."""
    own = instr._replace(slots=tuple(range(len(instr.slots))))
    return Placed((own,), instr.slots, tuple([Cut(ranges) for ranges in cuts]))


def _band(instr: Instr, place: Place) -> Placed | None:
    if place.rows is None or place.columns is None:
        return Placed((instr,))
    left, right, anchored = (int(value) for value in instr.params)
    rows, columns = len(place.rows), len(place.columns)
    middle = place.rows.start - place.columns.start
    middle += place.keys - place.queries if anchored else 0
    # Row i of the part sees its keys i + low to i + high; what no pair reaches is open.
    low = None if left < 0 or middle - left <= 1 - rows else middle - left
    high = None if right < 0 or middle + right >= columns - 1 else middle + right
    for anchor, start in ((0, 0), (1, columns - rows)):
        sides = None if low is None else start - low, None if high is None else high - start
        if all(side is None or side >= 0 for side in sides):
            left, right = (-1 if side is None else side for side in sides)
            return Placed((Instr("band", (left, right, anchor)),))
    return None


def _below(instr: Instr, place: Place) -> Placed:
    if place.columns is None:
        return _with_cuts(instr, (place.items,)) if instr.slots else Placed((instr,))
    first, count = place.columns.start, len(place.columns)
    if instr.slots:
        lengths = Cut((place.items,), (first, count))
        return Placed((Instr("below", (), (0,)),), instr.slots, (lengths,))
    return Placed((Instr("below", (min(max(int(instr.params[0]) - first, 0), count),)),))


def _same_document(instr: Instr, place: Place) -> Placed:
    return _with_cuts(instr, (place.items, place.rows), (place.items, place.columns))


def _pairs(instr: Instr, place: Place) -> Placed:
    return _with_cuts(instr, place[:4])


def _rectangles(instr: Instr, place: Place) -> Cut | None:
    """Return which rectangles of a table are in the part; None where it cuts some of them."""
    found: list[range | None] = []
    for part, size in zip(place[2:4], map(int, instr.params[:2]), strict=True):
        if part is None:
            found.append(None)
        elif part.start % size:
            return None
        else:
            found.append(range(part.start // size, -(-part.stop // size)))
    return Cut((place.items, place.heads, *found))


def _blocks(instr: Instr, place: Place) -> Placed | None:
    inside = _rectangles(instr, place)
    return None if inside is None else _with_cuts(instr, inside.ranges)


def _tiles(instr: Instr, place: Place) -> Placed:
    inside = _rectangles(instr, place)
    if inside is None or place.rows is None or place.columns is None or len(instr.slots) > 1:
        return Placed(())  # it only says what the boolean before it will be
    across, along, batch, heads, _, _, width = instr.params
    counts = len(place.items) if batch else 0, len(place.heads) if heads else 0
    sizes = (across, along, *counts, len(place.rows), len(place.columns), width)
    return _with_cuts(instr._replace(params=sizes), inside.ranges)


def _alibi(instr: Instr, place: Place) -> Placed | None:
    if place.rows is not None and place.columns is not None:
        middle = place.rows.start - place.columns.start + place.keys - place.queries
        if middle != len(place.columns) - len(place.rows):
            return None
    return _with_cuts(instr, (place.items, place.heads))


_MOVED: dict[str, Callable[[Instr, Place], Placed | None]] = {
    "band": _band,
    "below": _below,
    "same_document": _same_document,
    "dense": _pairs,
    "blocks": _blocks,
    "tiles": _tiles,
    "alibi": _alibi,
    "bias": _pairs,
}
