"""What the statistics give: values, how sentences write them, and the error of a wrong argument.

None is what is not known.

Effects are differences of a metric, arm minus baseline. An effect below zero is better for a loss;
above zero is better for a metric that is to be high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tilewise.errors import InvalidArgument

Label = Literal["better", "worse", "no difference", "undecided", "diverged", "incomplete"]
InteractionLabel = Literal[
    "better together",
    "worse together",
    "additive",
    "better",
    "worse",
    "no difference",
    "undecided",
    "diverged",
    "incomplete",
]
Status = Literal["done", "diverged", "incomplete"]


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """One measure over the seeds."""

    mean: float  # over the seeds
    values: tuple[float, ...]  # of each seed that has it, in the order of the experiment's seeds
    spread: float | None  # the sample standard deviation; None for a single seed


@dataclass(frozen=True)
class Ratio:
    """An arm over its baseline, paired by seed."""

    value: float  # geometric mean of the ratios of the seeds; above 1 the arm has more
    interval: Interval | None  # t, on the logarithms; None for one seed
    n: int  # paired seeds


@dataclass(frozen=True)
class SeedResult:
    """One seed of an arm."""

    seed: int
    status: Status  # of the arm's run
    metric: float | None  # of the arm after the last step; None unless done
    baseline: float | None  # the same of the baseline with this seed
    difference: float | None  # ``metric - baseline``; None unless both are done
    identical: bool  # both runs ended with the same weights, bit for bit


@dataclass(frozen=True)
class Look:
    """A look of a sequential comparison."""

    number: int  # 1 for the first look
    of: int  # looks that there may be
    level: float  # of its tests, over all arms; the interval is at 1 less this


@dataclass(frozen=True)
class ErrorUsed:
    """The error of the tests, where a pooled one was asked for."""

    kind: Literal["own", "pooled"]
    spread: (
        float | None
    )  # pooled standard deviation of a paired difference; None where there is none
    freedom: int | None  # its degrees of freedom
    words: str  # which was used and why, as a sentence


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A difference that the seeds show, of an arm or of several together."""

    reason: str  # the decision as one sentence with its numbers
    n: int  # seeds that finished in all of these arms and in the baseline
    effect: float | None  # mean paired difference; None without a pair
    interval: Interval | None  # not adjusted for other arms; None for fewer than two pairs
    p_value: float | None  # of the two-sided paired t test
    p_holm: float | None  # the same, adjusted over the arms, the interactions or the main effects


@dataclass(frozen=True, kw_only=True)
class Verdict(Effect):
    """The verdict on an arm's values against the baseline's."""

    arm: str
    label: Label
    p_equivalence: float | None  # of the two one-sided tests against the smallest effect
    p_equivalence_holm: float | None
    more_seeds: int | None  # further seeds that an undecided arm needs; None for other labels
    per_seed: tuple[SeedResult, ...]  # of a sequential comparison those that it needed
    diverged: tuple[int, ...]  # seeds
    identical: bool  # every paired seed ended with the same weights, bit for bit
    look: Look | None = None  # of a sequential comparison: where it is
    error: ErrorUsed | None = None  # None where each arm's own was asked for


@dataclass(frozen=True, kw_only=True)
class Interaction(Effect):
    """An interaction: the effect of all choices together minus what smaller sets explain.

    For two: (both - baseline) - (first - baseline) - (second - baseline).
    """

    arms: tuple[str, ...]  # e.g. ``("lion", "wsd")``
    together: str  # e.g. ``"lion+wsd"``
    label: InteractionLabel


@dataclass(frozen=True, kw_only=True)
class FactorEffect(Effect):
    """An effect of a factorial design, averaged over the levels of all other factors."""

    factors: tuple[str, ...]  # of one its main effect, of more their interaction
    aliases: tuple[str, ...]  # of a fraction, with their sign, e.g. ``"+c x d"``
    label: InteractionLabel
    p_equivalence_holm: float | None


_MOST_DIGITS = 12  # before or after the point; beyond that a power of ten reads better


def effect_text(value: float, smallest: float) -> str:
    """Return an effect with its sign; the smallest that matters has two figures."""
    digits = max(0, 1 - math.floor(math.log10(smallest)))
    if digits > _MOST_DIGITS or abs(value) >= 10.0**_MOST_DIGITS:
        return f"{value:+.3g}" if value else "0"
    if value and abs(value) < 0.5 * 10.0**-digits:
        return f"{value:+.1g}"  # a difference of rounding: its size is what is of interest
    return f"{value:+.{digits}f}" if value else "0"


def interval_text(interval: Interval, smallest: float) -> str:
    """``[-0.14, -0.08]``."""
    return f"[{effect_text(interval.low, smallest)}, {effect_text(interval.high, smallest)}]"


def p_text(p_value: float) -> str:
    """``0.034``, ``below 0.0001``."""
    return "below 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


def seeds_text(seeds: Sequence[int]) -> str:
    """``seed 3``, ``seeds 0, 2 and 3``."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {listing([str(seed) for seed in seeds])}"


def listing(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def invalid(argument: str, came: str, required: str) -> InvalidArgument:
    """Return the ``tilewise.errors.InvalidArgument`` of these words.

    Its module loads torch with its package, which takes seconds. So it is imported when something
    is wrong, and not before.
    """
    from tilewise.errors import InvalidArgument

    return InvalidArgument(argument, came, required)
