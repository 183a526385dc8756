"""The Plan: how a problem runs, as an immutable value that a caller may hold.

``choose`` takes the candidate that moves the least among those that can do a problem. A choice
decides how rows are rounded. So its cost (``plan.traffic.cost``) may depend on a row's own
sequence, dtype, widths and variant, and never on the batch or the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.plan.loops import Loops
from tilewise.problem import Problem

if TYPE_CHECKING:
    from tilewise.plan.traffic import Account


class Tiles(NamedTuple):
    """The blocks that a kernel works in: rows by keys, and the parts a key range is cut in."""

    query_tile: int
    key_tile: int
    splits: int = 1


class Plan(NamedTuple):
    """The choice made for a Problem.

    Args:
        problem: what to compute.
        backend: who does it.
        tiles: in which blocks.
        reasons: why each backend asked before it was not chosen, as (name, reasons) pairs.
        forward, backward, output: the backend's kernels bound to the problem
            (``kernels.Prepared``): what makes a held plan quick to run.
        mask_text, score_text: the programs as text: a held plan is matched by these.
        signature: shapes, dtypes and devices of q, k, v that a held plan is for, as
            ``engine.call.reader`` reads them.
        shown: the same and the layouts, as ``engine.call.shown`` does.
        bare: a call by this plan needs no keyword beside it.
        loops: which loops the backend runs, for the account of bytes.
        row_max_unit, in_place: see ``kernels.Prepared``.
    """

    problem: Problem
    backend: str
    tiles: Tiles
    reasons: tuple[tuple[str, tuple[str, ...]], ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    mask_text: str
    score_text: str
    signature: Hashable = None
    shown: tuple[Any, ...] = ()
    bare: bool = False
    loops: Loops | None = None
    output: Callable[..., Any] | None = None
    row_max_unit: float = 1.0
    in_place: Callable[..., Any] | None = None

    @property
    def account(self) -> Account:
        """Return what a call by this plan and plain attention move; computed on first use.

        Raises:
            InvalidArgument: the mask or score has tensors, or the result depends on the lengths of
                the sequences. Use ``tilewise.explain`` of the call instead.
        """
        # Few calls ask what they move: the model is imported for those.
        from tilewise.plan.traffic import cached

        assert self.loops is not None
        return cached(self.problem, self.loops)

    def __repr__(self) -> str:
        problem, tiles = self.problem, self.tiles
        return (
            f"Plan(backend={self.backend!r}, tiles={tiles.query_tile}x{tiles.key_tile}, "
            f"splits={tiles.splits}, {problem.layout}, {problem.dtype}, mask={self.mask_text!r}, "
            f"score={self.score_text!r})"
        )


class Candidate(NamedTuple):
    """A backend as the choice sees it."""

    name: str  # its name
    reasons: tuple[str, ...]  # why it cannot do the problem; empty if it can
    # Whether it is not there at all (its core is not built), as against declining.
    absent: bool = False
    last_resort: bool = False  # a slow reference: taken only where every other candidate is absent
    cost: int | None = None  # predicted bytes of one head; None where nothing is predicted


class Choice(NamedTuple):
    """The candidate chosen (None if none can), and whether it is a last resort."""

    name: str | None
    slow: bool = False


def choose(candidates: Sequence[Candidate]) -> Choice:
    """Return the cheapest candidate that can run; a last resort only if all others are absent.

    If a cost is missing or two are equal, it is the first in order of preference. A backend that is
    present and declines a problem is not silently replaced by a slow one. The answer is then None,
    and the caller raises with every reason.
    """
    able = [each for each in candidates if not each.reasons and not each.last_resort]
    costs = [each.cost for each in able if each.cost is not None]
    if able and len(costs) == len(able):
        return Choice(able[costs.index(min(costs))].name)
    if able:
        return Choice(able[0].name)
    if all(candidate.absent for candidate in candidates if not candidate.last_resort):
        for candidate in candidates:
            if not candidate.reasons:
                return Choice(candidate.name, slow=True)
    return Choice(None)
