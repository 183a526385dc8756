"""The choice among candidates: the first one, in order of preference, that can do the problem."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Candidate", "Choice", "choose"]


class Candidate(NamedTuple):
    """A backend as the choice sees it.

    Args:
        name: its name.
        reasons: why it cannot do the problem; empty if it can.
        absent: whether it is not there at all (its core is not built), as against declining.
        last_resort: a slow reference: taken only where every other candidate is absent.
    """

    name: str
    reasons: tuple[str, ...]
    absent: bool = False
    last_resort: bool = False


class Choice(NamedTuple):
    """The candidate chosen (None if none can), and whether it is a last resort."""

    name: str | None
    slow: bool = False


def choose(candidates: Sequence[Candidate]) -> Choice:
    """The first candidate that can run; a last resort only where all the others are absent.

    A backend that is there and declines a problem is not replaced by a slow one behind the
    caller's back: the answer is then None, and the caller raises with every reason.
    """
    for candidate in candidates:
        if not candidate.reasons and not candidate.last_resort:
            return Choice(candidate.name)
    if all(candidate.absent for candidate in candidates if not candidate.last_resort):
        for candidate in candidates:
            if not candidate.reasons:
                return Choice(candidate.name, slow=True)
    return Choice(None)
