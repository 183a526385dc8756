"""Which clock speaks for an arm: wall time, or processor time where load moved the wall clock.

On one thread of a CPU, a step's wall time is its processor time plus what other work took away. So
the wall clock of an arm was moved by load

* where its timed steps' wall time over processor time is more than 5 % off the baseline's, or
* where the interval of its speed ratio by wall time is wider than x/÷1.05.

Its speed is then shown by processor time. A ratio whose interval is wider than x/÷1.05 by the clock
that speaks is withheld. With several threads, or on a GPU, wall time over processor time says
nothing about load: there the wall clock speaks always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.result import ArmVerdict, ExperimentVerdict, Ratio

MOST_APART = 0.05  # of wall over processor time, against the baseline's
WIDEST = 1.05  # an interval from the ratio divided by this to the ratio times this


class Speed(NamedTuple):
    """The speed of an arm against the baseline, by the clock that speaks."""

    ratio: Ratio | None  # None: not known, or withheld
    by: Literal["wall", "processor"]
    why: str = ""  # of another clock than the wall's, or of a ratio that is withheld


Speeds = Mapping[str, Speed]  # arm -> its speed


def speeds_of(experiment: ExperimentVerdict, records: Iterable[RunRecord]) -> Speeds:
    """Return the speed of every arm; ``records`` are those of the experiment."""
    one_thread = all(record.one_thread for record in records)
    return {arm.arm: _speed(arm, experiment, one_thread) for arm in experiment.arms}


def _speed(arm: ArmVerdict, experiment: ExperimentVerdict, one_thread: bool) -> Speed:
    wall, processor = arm.measures.speed_ratio, arm.measures.cpu_ratio
    if wall is None or arm.speed_withheld:
        return Speed(None, "wall")
    if not one_thread or processor is None:
        return _unless_wide(Speed(wall, "wall"))
    # Wall over processor time against the baseline's: the arm's ratios say it.
    apart = abs(processor.value / wall.value - 1) > MOST_APART
    if not apart and not wide(wall):
        return Speed(wall, "wall")
    why = "by processor time: other work slowed the runs down"
    return _unless_wide(Speed(processor, "processor", why))


def _unless_wide(speed: Speed) -> Speed:
    if speed.ratio is None or not wide(speed.ratio):
        return speed
    times = f"\N{MULTIPLICATION SIGN}/\N{DIVISION SIGN}{WIDEST:g}"
    return Speed(None, speed.by, f"its interval is wider than {times}")


def wide(ratio: Ratio) -> bool:
    """Return whether the interval of a ratio says too little; not for one seed, which has none."""
    return ratio.interval is not None and (
        ratio.interval.low <= 0 or ratio.interval.high / ratio.interval.low > WIDEST**2
    )


def moved(speeds: Speeds) -> list[str]:
    """Return the arms whose wall clock load has moved."""
    return [arm for arm, speed in speeds.items() if speed.by == "processor"]
