"""What the run shows: do the two arms agree, and what did the other attention save."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from tilewise.lab.demo.contest import WARMUP, Arm
from tilewise.lab.demo.settings import CONTROLS

FIRST_STEPS = 20
FIRST_LIMIT = 1e-5
FINAL_FRACTION = 0.1
FLOAT32_SPACING = 2.0**-23


@dataclass(frozen=True)
class Check:
    """One promise and whether it held.

    Args:
        title: the promise.
        passed: whether it held; None where the run ended before it could be seen.
        says: the numbers, in words.
        value, limit: what was measured and what was allowed, relative gaps.
    """

    title: str
    passed: bool | None
    says: str
    value: float | None = None
    limit: float | None = None


def gaps(arm: Arm, plain: Arm) -> list[float]:
    """|loss - plain loss| / plain loss of every step that both have done."""
    pairs = zip(arm.losses, plain.losses, strict=False)
    return [abs(mine - theirs) / abs(theirs) for mine, theirs in pairs]


def final_gap(arm: Arm, plain: Arm, steps: int) -> float:
    """Root mean square of the gaps over the last tenth of the run (five steps at the least)."""
    count = min(max(round(steps * FINAL_FRACTION), 5), steps)
    return math.sqrt(statistics.fmean(gap * gap for gap in gaps(arm, plain)[-count:]))


def checks(arms: list[Arm], steps: int) -> list[Check]:
    """The two promises about the losses.

    First the early one: the arms start from the same weights, so the first steps differ by rounding
    alone. Later, training amplifies rounding: the yardstick is then how far plain runs whose
    initial weights were moved by one ulp have drifted (never less than one float32 spacing of the
    loss itself, below which no gap can be seen).
    """
    by_name = {arm.name: arm for arm in arms}
    plain, tilewise = by_name["plain"], by_name["tilewise"]
    controls = [by_name[name] for name in CONTROLS]
    return [_early(tilewise, plain, steps), _late(tilewise, plain, controls, steps)]


def _early(tilewise: Arm, plain: Arm, steps: int) -> Check:
    wanted = min(FIRST_STEPS, steps)
    title = f"First {wanted} steps: losses within {FIRST_LIMIT:g} of each other"
    seen = gaps(tilewise, plain)[:wanted]
    if not seen:
        return Check(title, None, "no step was done")
    worst = max(seen)
    says = f"largest relative gap {worst:.1e}"
    if worst > FIRST_LIMIT or len(seen) == wanted:
        return Check(title, worst <= FIRST_LIMIT, says, worst, FIRST_LIMIT)
    return Check(title, None, f"{says} in the {len(seen)} steps done", worst, FIRST_LIMIT)


def _late(tilewise: Arm, plain: Arm, controls: list[Arm], steps: int) -> Check:
    title = "At the end: no further from plain than plain runs nudged by one ulp"
    if any(len(arm.losses) < steps for arm in (tilewise, plain, *controls)):
        return Check(title, None, "the run ended before its last step")
    gap = final_gap(tilewise, plain, steps)
    drifts = [final_gap(control, plain, steps) for control in controls]
    limit = max(*drifts, FLOAT32_SPACING)
    says = f"gap {gap:.1e}; the nudged plain runs: {' and '.join(f'{d:.1e}' for d in drifts)}"
    if max(drifts) < FLOAT32_SPACING:
        says += f"; one float32 spacing is {FLOAT32_SPACING:.1e}"
    return Check(title, gap <= limit, says, gap, limit)


@dataclass(frozen=True)
class Pace:
    """Step times of an arm, warm-up left out.

    Args:
        wall_s: median.
        low_s, high_s: first and ninth decile of the wall time.
        cpu_s: median over all threads.
        tokens_per_s: tokens of a step over ``wall_s``.
        tokens_per_cpu_s: tokens of a step over ``cpu_s``.
    """

    wall_s: float
    low_s: float
    high_s: float
    cpu_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float


def pace(arm: Arm, tokens: int) -> Pace | None:
    """The pace of an arm at ``tokens`` a step; None before its first step after the warm-up."""
    walls, cpus = sorted(arm.wall_s[WARMUP:]), arm.cpu_s[WARMUP:]
    if not walls:
        return None
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    low, high = (walls[round(share * (len(walls) - 1))] for share in (0.1, 0.9))
    return Pace(wall, low, high, cpu, tokens / wall, tokens / cpu)
