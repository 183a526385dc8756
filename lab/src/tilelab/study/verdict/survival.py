"""Share of runs that have not reached the target yet, by tokens: the Kaplan-Meier estimate.

The interval is Greenwood's variance on the scale of log(-log S), as of Kalbfleisch and Prentice,
which stays within 0 and 1.

Source: Kaplan and Meier, "Nonparametric estimation from incomplete observations", Journal of the
American Statistical Association 53, 1958.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from tilelab.study.verdict.result import Interval

__all__ = ["Survival", "kaplan_meier"]


@dataclass(frozen=True)
class Survival:
    """A curve that begins at 1 and goes down where runs reach the target.

    Args:
        at: where it goes down, in ascending order.
        share: S after each of these.
        intervals: of the share, pointwise; None where it is 0 and has none.
        censored: where runs ended without having reached it.
        runs: how many there were.
    """

    at: tuple[float, ...]
    share: tuple[float, ...]
    intervals: tuple[Interval | None, ...]
    censored: tuple[float, ...]
    runs: int

    @property
    def median(self) -> float | None:
        """The first place at which half of the runs or fewer are left; None where more are."""
        return next((x for x, s in zip(self.at, self.share, strict=True) if s <= 0.5), None)


def kaplan_meier(
    reached: Sequence[float], censored: Sequence[float], confidence: float
) -> Survival:
    """S(t), the product over the places t_i <= t of (1 - d_i / n_i).

    Args:
        reached: where each run that reached the target did.
        censored: where each other run ended; it was at risk up to and at that place.
        confidence: of the pointwise intervals.
    """
    z = float(special.ndtri((1 + confidence) / 2))
    share, greenwood = 1.0, 0.0
    shares: list[float] = []
    intervals: list[Interval | None] = []
    places = sorted(set(reached))
    for place in places:
        events = sum(each == place for each in reached)
        at_risk = sum(each >= place for each in (*reached, *censored))
        share *= 1 - events / at_risk
        if at_risk > events:
            greenwood += events / (at_risk * (at_risk - events))
            half = z * math.sqrt(greenwood) / abs(math.log(share))
            ends = share ** math.exp(half), share ** math.exp(-half)
            intervals.append(Interval(*ends))
        else:
            intervals.append(None)
        shares.append(share)
    runs = len(reached) + len(censored)
    ends_at = tuple(sorted(censored))
    return Survival(tuple(places), tuple(shares), tuple(intervals), ends_at, runs)
