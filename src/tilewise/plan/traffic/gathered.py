"""Count what a call with key lists moves: small problems, lists, copies or inverse lists.

The forward reads keys where they lie, and the lists beside them. With T lists of K keys, Hk key
heads and elements of e bytes, a backward that copies moves T Hk K (D + Dv) e bytes: it reads them
by the lists, and writes them for the small problems to read. It adds as many gradients to sums in f
bytes, which it reads and writes. All of it follows K and not N.

A backward in place copies nothing. Its walk for dQ reads keys by the lists, as the forward does.
Its walk for dK and dV holds tiles of all keys, and reads the R rows of a list once for each tile in
which the list names a key: R (D + Dv) e bytes each time. Of blocks of keys their number is known.
Of single keys it is counted as K, the most that there may be: neighbours share a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.plan.loops import Loops
from tilewise.plan.traffic import Account, Comparison, account, plain, trains
from tilewise.plan.traffic.count import ENTRY_BYTES, Operand, Pass, Traffic
from tilewise.plan.traffic.tiled import statistic_bytes
from tilewise.problem import Problem
from tilewise.variants.program import Instr

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

    Keys in pages are found through the call's block table: an entry for each listed key.

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
