"""The account of bytes: what attention moves between slow and fast memory, predicted.

The whole account of a problem is here: ours beside plain attention, forward and backward. It is
what a plan and ``tilewise explain`` say. It is made of

    count     operands, passes and their sums; what a cache in between saves; seconds on a chip
    visits    which tiles a walk visits, for any mask, and what those of bands and lengths share
    tiled     the tiled algorithm in every loop order, byte for byte
    plain     attention that writes its matrix, pass by pass
    memory    what has to be held at once, and what fits

``gathered_account`` is the account of a call with key lists.

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tilewise.chips import Chip
from tilewise.plan.loops import Loops
from tilewise.plan.traffic import memory, plain, tiled
from tilewise.plan.traffic.count import ENTRY_BYTES, Operand, Pass, Seconds, Traffic, predict
from tilewise.plan.traffic.tiled import statistic_bytes
from tilewise.plan.traffic.visits import Visits, lengths_of, visits_of
from tilewise.problem import Operands, Problem
from tilewise.variants.program import Instr

__all__ = [
    "Account",
    "Comparison",
    "Operand",
    "Pass",
    "Traffic",
    "Visits",
    "account",
    "visits_of",
]


class Comparison(NamedTuple):
    """Traffic of one direction, for tilewise and for plain attention."""

    ours: Traffic
    plain: Traffic


class Account(NamedTuple):
    """Account of what an attention moves.

    Args:
        problem: what was computed.
        loops: how it is walked.
        visits: of the forward's tiles.
        forward, backward: both ways of doing it. Of the operands between fast memory and what is
            next to it: ``Traffic.behind`` takes the caches into account.
        lists_bytes: of key lists, which a call holds besides.
    """

    problem: Problem
    loops: Loops
    visits: Visits
    forward: Comparison
    backward: Comparison
    lists_bytes: int = 0

    @property
    def both(self) -> Comparison:
        """Forward and backward."""
        (ours, other), (ours_after, other_after) = self.forward, self.backward
        return Comparison(ours.plus(ours_after), other.plus(other_after))

    def reaching(self, traffic: Traffic, chip: Chip) -> Traffic:
        """Return what of an account reaches the memory of a chip."""
        return traffic.behind(chip.last_cache_bytes, chip.cores)

    @property
    def dtype(self) -> str:
        """Return the name of the dtype in which ours multiplies."""
        return self.loops.products or str(self.problem.dtype).removeprefix("torch.")

    def seconds(self, traffic: Traffic, chip: Chip) -> Seconds:
        """Return how long it takes there.

        Raises:
            InvalidArgument: the chip's row lacks a figure.
        """
        return predict(self.reaching(traffic, chip), chip, self.dtype)

    def held(self, training: bool = True) -> tuple[int, int] | None:
        """Bytes held at the highest, ours and plain; None where sequences differ in length."""
        if self.problem.layout != "dense" or self.problem.page_size:
            return None
        ours = memory.tiled_held(self.problem, training).peak() + self.lists_bytes
        return ours, memory.plain_held(self.problem, training).peak()


def account(
    problem: Problem,
    loops: Loops,
    operands: Operands | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> Account:
    """Return the account of a problem.

    Args:
        problem: what to compute.
        loops: of the backend that does it.
        operands: with what; may be left out where mask and score capture no tensor.
        lengths: of a variable-length call without operands.

    Raises:
        InvalidArgument, Unsupported: as ``visits_of``.
    """
    if operands is not None:
        lengths = lengths_of(problem, operands) or lengths
    found: dict[tuple[int, int], Visits] = {}

    def of(tile: tuple[int, int]) -> Visits:
        if tile not in found:
            found[tile] = visits_of(problem, tile, operands, lengths)
        return found[tile]

    visited = of(loops.forward)
    if not trains(problem):
        nothing = Traffic(())
        backward = Comparison(nothing, nothing)
    else:
        backward = Comparison(_backward(problem, loops, of), plain.backward(problem, lengths))
    if loops.split_keys:
        forward = tiled.forward_in_parts(problem, visited, loops.split_keys, loops.shared)
    else:
        forward = tiled.forward(problem, visited)
    ours = Comparison(forward, plain.forward(problem, lengths))
    return Account(problem, loops, visited, ours, backward)


def trains(problem: Problem) -> bool:
    """Return whether there is a backward pass: not with pages, and not of eight bits."""
    return problem.page_size == 0 and problem.dtype.itemsize > 1


def _backward(problem: Problem, loops: Loops, of: Callable[[tuple[int, int]], Visits]) -> Traffic:
    if loops.order == "by_tiles":
        held = of(loops.keys or loops.backward)
        return tiled.backward_by_tiles(problem, of(loops.backward), held)
    if loops.order == "in_turns":
        return tiled.backward_in_turns(problem, of(loops.backward))
    if loops.order == "keys_outside":
        computed = of(loops.blocks or loops.backward)
        return tiled.backward_keys_outside(problem, of(loops.backward), computed=computed)
    return tiled.backward_rows_outside(problem, of(loops.backward))


@lru_cache(maxsize=256)
def cached(problem: Problem, loops: Loops) -> Account:
    """Return the account of a problem without tensors in its mask and score, made once."""
    return account(problem, loops)


def cost(problem: Problem, loops: Loops) -> int | None:
    """Return the cost for choosing a backend: the forward's bytes per head of one batch item.

    A choice decides how rows are rounded, and so may depend on a row's own sequence but not on the
    batch or the heads. None where tensors would have to be looked at.
    """
    if (
        problem.layout != "dense"
        or problem.page_size
        or any(instr.slots for instr in problem.mask + problem.score)
    ):
        return None
    one = problem._replace(batch=1, heads=1, kv_heads=1)
    return cached(one, loops).forward.ours.bytes


_UNREAD = ("what a mask or score reads, and the copies' share of the cache",)
_INDEX_BYTES = 8  # of a key that is copied
_PLACE_BYTES = 8  # of an entry of a list as the sort gives it
_SORT = "what the sort of the lists moves within"
_ANY_MASK = (Instr("dense", (), (0,)),)  # plain attention has the lists as a mask


class InPlace(NamedTuple):
    """A backward that reads keys where they lie.

    Args:
        page: keys that follow one another in a list and in memory.
        calls: in how many parts the lists are done; each walks over all keys.
    """

    page: int
    calls: int


def gathered_account(
    problem: Problem,
    lists: int,
    small: Problem,
    loops: Loops,
    in_place: InPlace | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> Account:
    """Return the account of a call with key lists, beside plain attention with a mask.

    The forward reads keys where they lie, and the lists beside them. With T lists of K keys, Hk key
    heads and elements of e bytes, a backward that copies moves T Hk K (D + Dv) e bytes: it reads
    them by the lists, and writes them for the small problems to read. It adds as many gradients to
    sums in f bytes, which it reads and writes. All of it follows K and not N.

    A backward in place copies nothing. Its walk for dQ reads keys by the lists, as the forward
    does. Its walk for dK and dV holds tiles of all keys, and reads the R rows of a list once for
    each tile in which the list names a key: R (D + Dv) e bytes each time. Of blocks of keys their
    number is known. Of single keys it is counted as K, the most that there may be: neighbours share
    a tile.

    Keys in pages are found through the call's block table: an entry for each listed key.

    Rows with lists of their own that share them on a CPU read a key once for up to 16 rows. Which
    do depends on the values of lists, so the account has a list for each: an upper bound.

    Args:
        problem: of the call.
        lists: T, of each key head.
        small: one problem for each list and key head, without mask and score.
        loops: of the backend that does it.
        in_place: how the backward reads keys in place; None where it copies them.
        lengths: queries and keys of each sequence of a packed or paged call.
    """
    keys = lists * problem.kv_heads * small.keys
    e, f = problem.dtype.itemsize, statistic_bytes(problem.dtype)
    widths = (("k", problem.head_dim), ("v", problem.value_dim))
    copies = [Operand(name, keys * width * e, keys * width * e) for name, width in widths]
    copy = Pass("copy", (*copies, Operand("lists", keys * _INDEX_BYTES)))
    entries = Operand("lists", keys * ENTRY_BYTES)
    table = (entries._replace(name="block_table"),) if problem.page_size else ()
    read = Pass("lists", (entries, *table))
    sums = [
        Operand(f"grad_{name}", keys * width * (e + f), keys * width * f) for name, width in widths
    ]
    base = account(small, loops)
    forward = Traffic((read,), _UNREAD).plus(base.forward.ours)
    if not trains(problem):
        backward = Traffic(())
    elif in_place is None:
        backward = Traffic((copy,), _UNREAD).plus(base.backward.ours)
        backward = backward.plus(Traffic((Pass("add", tuple(sums)),)))
    else:
        passes = _in_place(problem, keys, small, loops, in_place)
        delta, dq, _ = base.backward.ours.passes
        backward = Traffic((passes[0], delta, dq, *passes[1:]), (*_UNREAD, _SORT))
    masked = problem._replace(mask=_ANY_MASK)
    plain_backward = plain.backward(masked, lengths) if trains(problem) else Traffic(())
    return Account(
        problem,
        loops,
        base.visits,
        Comparison(forward, plain.forward(masked, lengths)),
        Comparison(backward, plain_backward),
        lists * small.keys * ENTRY_BYTES,
    )


def _in_place(
    problem: Problem, keys: int, small: Problem, loops: Loops, how: InPlace
) -> tuple[Pass, ...]:
    """Return the passes of a backward in place, but for those over the rows: lists, dkdv, sums.

    ``keys`` are those of all lists and heads; the rest is what ``gathered_account`` takes.
    """
    e, f = problem.dtype.itemsize, statistic_bytes(problem.dtype)
    widths = (("k", problem.head_dim), ("v", problem.value_dim))
    assert loops.keys is not None
    tile = loops.keys[1]
    whole = how.page % tile == 0
    entries = keys // how.page if whole else keys
    met = keys // tile if whole else keys  # tiles in which a list names a key
    stored = problem.kv_heads * problem.keys  # packed sequences are one after the other
    if problem.layout == "dense":
        stored *= problem.batch
    inverse = (
        Operand("lists", entries * ENTRY_BYTES, entries * ENTRY_BYTES),
        Operand("inverse", entries * _PLACE_BYTES, entries * (_PLACE_BYTES + ENTRY_BYTES)),
    )
    rows = met * small.queries
    walk = (
        *(Operand(name, how.calls * stored * width * e) for name, width in widths),
        Operand("q", rows * problem.head_dim * e),
        Operand("grad_out", rows * problem.value_dim * e),
        Operand("delta", rows * 2 * f),
        Operand("inverse", met * ENTRY_BYTES),
        *(
            Operand(f"grad_{name}", *(how.calls * stored * width * f,) * 2)
            for name, width in widths
        ),
    )
    pairs = rows * tile
    flops = 2 * pairs * 2 * (problem.head_dim + problem.value_dim)
    sums = [
        Operand(f"grad_{name}", stored * width * f, stored * width * e) for name, width in widths
    ]
    by_lists = Operand("lists", keys // how.page * ENTRY_BYTES)
    return (
        Pass("inverse", (*inverse, by_lists)),
        Pass("dkdv", walk, flops, pairs),
        Pass("sums", tuple(sums)),
    )
