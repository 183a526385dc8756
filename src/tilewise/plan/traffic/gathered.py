"""Count what a call with key lists moves: small problems, lists, and the backward's copies.

The forward reads keys where they lie, and the lists beside them. With T lists of K keys, Hk key
heads and elements of e bytes, the backward copies T Hk K (D + Dv) e bytes: it reads them by the
lists, and writes them for the small problems to read. It adds as many gradients to sums in f bytes,
which it reads and writes. All of it follows K and not N.
"""

from __future__ import annotations

from tilewise.plan.traffic import plain
from tilewise.plan.traffic.account import Account, Comparison, Loops, account
from tilewise.plan.traffic.count import ENTRY_BYTES, Operand, Pass, Traffic
from tilewise.plan.traffic.tiled import statistic_bytes
from tilewise.problem import Problem
from tilewise.variants.program import Instr

_UNREAD = ("what a mask or score reads, and the copies' share of the cache",)
_INDEX_BYTES = 8  # of a key that is copied
_ANY_MASK = (Instr("dense", (), (0,)),)  # plain attention has the lists as a mask


def gathered_account(problem: Problem, lists: int, small: Problem, loops: Loops) -> Account:
    """Return the account of a call with key lists, beside plain attention with a mask.

    Args:
        problem: of the call, its keys all in one place.
        lists: T, of each key head.
        small: one problem for each list and key head, without mask and score.
        loops: of the backend that does it.
    """
    keys = lists * problem.kv_heads * small.keys
    e, f = problem.dtype.itemsize, statistic_bytes(problem.dtype)
    widths = (("k", problem.head_dim), ("v", problem.value_dim))
    copies = [Operand(name, keys * width * e, keys * width * e) for name, width in widths]
    copy = Pass("copy", (*copies, Operand("lists", keys * _INDEX_BYTES)))
    read = Pass("lists", (Operand("lists", keys * ENTRY_BYTES),))
    sums = [
        Operand(f"grad_{name}", keys * width * (e + f), keys * width * f) for name, width in widths
    ]
    base = account(small, loops)
    forward = Traffic((read,), _UNREAD).plus(base.forward.ours)
    backward = Traffic((copy,), _UNREAD).plus(base.backward.ours)
    masked = problem._replace(mask=_ANY_MASK)
    return Account(
        problem,
        loops,
        base.visits,
        Comparison(forward, plain.forward(masked, None)),
        Comparison(
            backward.plus(Traffic((Pass("add", tuple(sums)),))), plain.backward(masked, None)
        ),
        lists * small.keys * ENTRY_BYTES,
    )
