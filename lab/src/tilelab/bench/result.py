"""Measurements with every sample kept, and the numbers that follow from the samples.

JSON holds all of it and reads back the same. What follows from the samples is computed on reading;
the file holds it too, for people and other programs.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from tilelab.bench.cases import SCALING_GOAL, Case, Goal
from tilelab.bench.clock import Samples, Spread
from tilewise.inspect.peaks import Clock

__all__ = ["CaseResult", "Memory", "Overhead", "Scaling", "Verdict"]

# "yes", "no: ratio", "no: peak", "no: ratio, peak"; "" where there is no goal
Verdict = str


@dataclass(frozen=True)
class CaseResult:
    """One case, measured or found wrong.

    Args:
        name, dtype, backward, variant, shape, flops: as in ``cases.Case``.
        goal: None where there is none.
        clock: which of the two times the numbers follow from: processor time of the one thread, or
            wall time of more than one.
        wrong: why it was not timed; empty if it was.
        ours, torch: times of one call, one entry per round.
        repeats: calls within one sample of ours and of torch's.
        peak_flops_s: the bare loop's operations per second, measured in every round.
    """

    name: str
    dtype: str
    backward: bool
    variant: str
    shape: dict[str, int]
    flops: float
    goal: Goal | None
    clock: Clock
    wrong: str = ""
    ours: Samples = field(default_factory=Samples.empty)
    torch: Samples = field(default_factory=Samples.empty)
    repeats: tuple[int, int] = (1, 1)
    peak_flops_s: tuple[float, ...] = ()

    @classmethod
    def describing(cls, case: Case, clock: Clock, **measured: Any) -> CaseResult:
        """Return the result of a case."""
        return cls(
            name=case.name,
            dtype=case.dtype,
            backward=case.backward,
            variant=case.variant,
            shape=case.shape._asdict(),
            flops=case.flops,
            goal=case.goal,
            clock=clock,
            **measured,
        )

    def seconds(self, side: Samples) -> list[float]:
        """Return the samples of the clock that counts."""
        return side.cpu_s if self.clock == "cpu" else side.wall_s

    @property
    def ratio(self) -> float:
        """Torch's median time over ours."""
        return statistics.median(self.seconds(self.torch)) / statistics.median(
            self.seconds(self.ours)
        )

    @property
    def ratio_range(self) -> tuple[float, float]:
        """The least and the largest ratio of any round."""
        pairs = zip(self.seconds(self.torch), self.seconds(self.ours), strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return min(ratios), max(ratios)

    @property
    def peak_fraction(self) -> float:
        """Our operations per second over the bare loop's, medians both."""
        rate = self.flops / statistics.median(self.seconds(self.ours))
        return rate / statistics.median(self.peak_flops_s)

    @property
    def met(self) -> Verdict:
        """Whether the goal is met, and if not, which half is missed."""
        if self.goal is None:
            return ""
        if self.wrong:
            return "no: wrong"
        missed = [] if self.ratio >= self.goal.ratio else ["ratio"]
        if self.goal.peak is not None and self.peak_fraction < self.goal.peak:
            missed.append("peak")
        return "no: " + ", ".join(missed) if missed else "yes"

    def as_json(self) -> dict[str, Any]:
        """Return JSON's types; ``from_json`` reads them back."""
        values = asdict(self)
        values |= {"ours": self.ours._asdict(), "torch": self.torch._asdict()}
        values["goal"] = None if self.goal is None else self.goal._asdict()
        if not self.wrong:
            values["summary"] = {
                "ours_s": Spread.of(self.seconds(self.ours))._asdict(),
                "torch_s": Spread.of(self.seconds(self.torch))._asdict(),
                "peak_flops_s": Spread.of(self.peak_flops_s)._asdict(),
                "ratio": self.ratio,
                "ratio_range": self.ratio_range,
                "peak_fraction": self.peak_fraction,
                "met": self.met,
            }
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CaseResult:
        """Return the inverse of ``as_json``."""
        kept = {key: value for key, value in values.items() if key != "summary"}
        kept["goal"] = None if kept["goal"] is None else Goal(**kept["goal"])
        kept["ours"], kept["torch"] = Samples(**kept["ours"]), Samples(**kept["torch"])
        kept["repeats"] = tuple(kept["repeats"])
        kept["peak_flops_s"] = tuple(kept["peak_flops_s"])
        return cls(**kept)


@dataclass(frozen=True)
class Overhead:
    """The cost of one call of a tiny problem.

    Args:
        name: how ours is called.
        ours_s, torch_s: processor seconds of one call, one entry per round.
        goal: at most this many times torch's.
    """

    name: str
    ours_s: list[float]
    torch_s: list[float]
    goal: float

    @property
    def times(self) -> float:
        """Our median over torch's: less is better."""
        return statistics.median(self.ours_s) / statistics.median(self.torch_s)

    @property
    def met(self) -> Verdict:
        """Whether the goal is met."""
        return "yes" if self.times <= self.goal else "no"


@dataclass(frozen=True)
class Scaling:
    """The speed-up of two threads, next to that of the bare loop in the same rounds.

    Args:
        name, dtype: of the case.
        one_s, two_s: wall seconds of one call on one and on two threads, one entry per round.
        peak_one, peak_two: the bare loop's operations per second in the same rounds.
        team_one_s, team_two_s: wall seconds of a bare loop as long as the call on one thread.
        has_goal: False for a case that is only informative.
    """

    name: str
    dtype: str
    one_s: list[float]
    two_s: list[float]
    peak_one: list[float]
    peak_two: list[float]
    team_one_s: list[float]
    team_two_s: list[float]
    has_goal: bool

    # The best round counts: whatever else runs on the machine can only make a round slower, and
    # it hits two threads more than one.
    @property
    def ours(self) -> float:
        """t1 / (2 t2): 1 is perfect."""
        return min(self.one_s) / (2 * min(self.two_s))

    @property
    def bare_loop(self) -> float:
        """The same of the bare loop."""
        return max(self.peak_two) / (2 * max(self.peak_one))

    @property
    def relative(self) -> float:
        """Ours as a share of the bare loop's."""
        return self.ours / self.bare_loop

    @property
    def same_length(self) -> float:
        """The same of a bare loop no longer than the call: what waking a thread costs."""
        return min(self.team_one_s) / (2 * min(self.team_two_s))

    @property
    def met(self) -> Verdict:
        """The verdict on the goal, "yes" or "no"; empty where there is no goal."""
        if not self.has_goal:
            return ""
        return "yes" if self.relative >= SCALING_GOAL else "no"


@dataclass(frozen=True)
class Memory:
    """The most memory that a pass holds beyond its operands.

    Args:
        name: what was measured.
        dtype: of the operands.
        side: ``"ours"`` or ``"torch"``.
        extra_bytes: peak of the process during the pass, less what it held before.
        result_bytes: what of it is the result itself (the output, or three gradients).
    """

    name: str
    dtype: str
    side: str
    extra_bytes: int
    result_bytes: int
