"""Choose among the candidates that can do a problem the one that moves the least.

A choice decides how rows are rounded. So its cost (``plan.traffic.account.cost``) may depend on a
row's own sequence, dtype, widths and variant, and never on the batch or the heads.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A backend as the choice sees it.

    Args:
        name: its name.
        reasons: why it cannot do the problem; empty if it can.
        absent: whether it is not there at all (its core is not built), as against declining.
        last_resort: a slow reference: taken only where every other candidate is absent.
        cost: predicted bytes of one head; None where nothing is predicted.
    """

    name: str
    reasons: tuple[str, ...]
    absent: bool = False
    last_resort: bool = False
    cost: int | None = None


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
