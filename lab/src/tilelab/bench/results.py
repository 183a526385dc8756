"""A run over the cases that have goals: every sample, the numbers that follow, and its JSON.

JSON holds all of it and reads back the same. What follows from the samples is computed on reading;
the file holds it too, for people and other programs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tilelab.bench.cases import SCALING_GOAL, Case, Goal
from tilelab.common import environment
from tilelab.common.clock import Spread, Times
from tilelab.common.files import compact_json, read_json, write_atomically
from tilewise.chips import detect
from tilewise.inspect import peaks
from tilewise.inspect.peaks import Clock

FORMAT = 2
COMPLETE = "complete"

# "yes", "no: ratio", "no: peak", "no: ratio, peak"; "" where there is no goal
Verdict = str


class Samples(NamedTuple):
    """Times of one call, one entry per round.

    Args:
        cpu_s: processor time of the calling thread.
        wall_s: by the wall clock.
    """

    cpu_s: list[float]
    wall_s: list[float]

    @classmethod
    def of(cls, times: Sequence[Times] = ()) -> Samples:
        """Return the samples of some rounds."""
        return cls([each.cpu_s for each in times], [each.wall_s for each in times])


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
    ours: Samples = field(default_factory=Samples.of)
    torch: Samples = field(default_factory=Samples.of)
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
            shape=case.shape,
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
        kept = _known(values, "summary")
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

    derived: ClassVar[tuple[str, ...]] = ("times", "met")
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

    derived: ClassVar[tuple[str, ...]] = ("ours", "bare_loop", "same_length", "relative", "met")
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


@dataclass
class Record:
    """The results of a run, while it goes on and afterwards.

    Args:
        machine: where it ran: chip, instruction set, versions, load. No host names, no paths.
        threads: of the cases.
        status: ``"complete"``, or why not everything is there.
        seconds: how long the run took.
        cases, overhead, scaling, memory: the findings.
    """

    machine: dict[str, Any]
    threads: int
    status: str = "not finished"
    seconds: float = 0.0
    cases: list[CaseResult] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @classmethod
    def begin(cls, threads: int) -> Record:
        """Return a record of a run that has not begun, on this machine."""
        return cls(_machine(), threads)

    @property
    def slug(self) -> str:
        """The chip as a folder's name."""
        return str(self.machine["slug"])

    def end(self, status: str, seconds: float) -> None:
        """The run is over."""
        self.status, self.seconds = status, round(seconds, 1)
        self.machine["load_average"].append(environment.load_average())

    def as_json(self) -> dict[str, Any]:
        """Everything, in JSON's types; ``from_json`` reads it back."""
        return {
            "format": FORMAT,
            "status": self.status,
            "seconds": self.seconds,
            "threads": self.threads,
            "machine": self.machine,
            "cases": [result.as_json() for result in self.cases],
            "overhead": [_with_derived(each) for each in self.overhead],
            "scaling": [_with_derived(each) for each in self.scaling],
            "memory": [asdict(each) for each in self.memory],
        }

    def write(self, path: Path) -> None:
        """Write the JSON, making its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, compact_json(self.as_json()))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record in a file.

        Raises:
            InvalidArgument: there is none that this version can read.
        """
        values = read_json(path, FORMAT, "a JSON file of the bench")
        return cls(
            values["machine"],
            values["threads"],
            values["status"],
            values["seconds"],
            [CaseResult.from_json(each) for each in values["cases"]],
            [Overhead(**_known(each, *Overhead.derived)) for each in values["overhead"]],
            [Scaling(**_known(each, *Scaling.derived)) for each in values["scaling"]],
            [Memory(**each) for each in values["memory"]],
        )


def _with_derived(found: Overhead | Scaling) -> dict[str, Any]:
    return {**asdict(found), **{name: getattr(found, name) for name in found.derived}}


def _known(values: dict[str, Any], *derived: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in derived}


def _machine() -> dict[str, Any]:
    found, chip, first = environment.describe(1), detect(), _cpuinfo()
    numbers = "-".join(first[key] for key in ("cpu family", "model") if key in first)
    return found | {
        # Virtual machines hide which processor they are; the family and the model do not.
        "slug": re.sub(r"[^a-z0-9]+", "-", f"{chip.name} {numbers}".lower()).strip("-"),
        "family": first.get("cpu family", ""),
        "model": first.get("model", ""),
        "cache_bytes": {"l1": chip.l1_bytes, "l2": chip.l2_bytes, "l3": chip.l3_bytes},
        "isa": peaks.isa(),
        "flags": [
            flag
            for flag in first.get("flags", first.get("Features", "")).split()
            if flag.startswith(("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16"))
        ],
        "versions": {**found["versions"], "python": found["python"]},
        "load_average": [found["load_average"]],
    }


def _cpuinfo() -> dict[str, str]:
    """Return the description of the first processor; empty where the system has none."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
