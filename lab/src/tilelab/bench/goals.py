"""The cases that have goals: measured in this process, every sample, and what follows from them.

With ``bench cpu --peers`` other packages are measured beside ours and torch's, in the same rounds.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.bench.steps import BenchRecord
from tilelab.cases.case import Case, Goal
from tilelab.cases.table import rows
from tilelab.common import environment
from tilelab.common.clock import Call, Samples, Spread, elsewhere, interleave, once, plan
from tilelab.common.files import NOT_FINISHED, Finding
from tilelab.peers.methods import ours, sdpa
from tilelab.peers.packages import Package, first_line
from tilelab.peers.work import Given, Prepared, Work, call_of, compare, draw, flops, work_of
from tilewise.chips import cpuinfo, detect
from tilewise.inspect import peaks
from tilewise.inspect.peaks import Clock

DTYPES = ("float32", "bfloat16", "float16")
# The instruction sets that the goals of cases are for. On all others torch is not to be faster.
_GOALS_FOR = ("avx512_bf16", "avx512_amx")
# They are in the name of a processor's folder: a virtual machine may hide the wider ones.
_NARROW = ("avx2", "portable")
# Two threads against one, as a share of how well the bare multiply-add loop scales.
SCALING_GOAL = 0.9
_ELSEWHERE = 0.1  # of a call's processor time: more is work on other threads
_PACKING = ", packing"
_TINY = (1, 1, 8, 16)  # small enough that the call itself is all that costs


def cases() -> list[Case]:
    """Return the cases that have goals, by dtype, with those of this instruction set."""
    chosen = sorted(rows("goals"), key=lambda case: DTYPES.index(case.type_name))
    if peaks.absence() or peaks.isa() in _GOALS_FOR:
        return chosen
    return [case if case.goal is None else replace(case, goal=Goal(1.0)) for case in chosen]


def key_of(case: Case) -> str:
    """Return what names a case alone, e.g. ``"forward causal 2k bfloat16"``."""
    return f"{case.name} {case.type_name}"


@dataclass(frozen=True)
class PeerResult:
    """A package on one case."""

    name: str  # of the package
    version: str  # of what is installed
    path: str = ""  # the code path that it took, such as "amx"; empty where there is one alone
    why_not: str = ""  # why it was not measured; empty if it was, or is wrong
    wrong: str = ""  # what its result breaks of the 2x rule; it was not timed then
    # Times of one call with its packing, one entry per round.
    samples: Samples = field(default_factory=Samples.of)
    # Times of the packing alone; empty where there is none.
    packing: Samples = field(default_factory=Samples.of)

    def cell(self, clock: Clock, ours_s: float) -> str:
        """Return milliseconds with their spread, the path, the packing in them, and times ours."""
        if self.wrong or self.why_not:
            return "WRONG" if self.wrong else "-"
        spread = Spread.of(_seconds(self.samples, clock))
        packing = _seconds(self.packing, clock)
        packed = f"packing {statistics.median(packing) * 1e3:.3g}" if packing else ""
        apart = "; ".join(filter(None, (self.path, packed)))
        median = f"{spread.median * 1e3:.4g} ±{spread.noise:.0%}"
        return f"{median}{f' ({apart})' if apart else ''}, {spread.median / ours_s:.2f}x"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the inverse of ``dataclasses.asdict``."""
        sides = {side: Samples(**values[side]) for side in ("samples", "packing")}
        return cls(**{**values, **sides})


def _seconds(samples: Samples, clock: Clock) -> list[float]:
    return samples.cpu_s if clock == "cpu" else samples.wall_s


@dataclass(frozen=True)
class CaseResult(Finding):
    """One case, measured or found wrong."""

    derived = ("summary",)
    name: str  # of the case
    dtype: str  # of the case
    backward: bool  # the gradients of q, k and v were measured, and not the forward pass
    variant: str  # names its mask and score, e.g. ``"causal"``
    shape: dict[str, int]  # batch, heads, kv_heads, queries, keys and head_dim
    flops: float  # operations of one call
    goal: Goal | None  # of the case
    # Which of the two times the numbers follow from: processor time of the one thread, or wall time
    # of more than one.
    clock: Clock
    wrong: str = ""  # why it was not timed; empty if it was
    # These two: times of one call, one entry per round.
    ours: Samples = field(default_factory=Samples.of)
    torch: Samples = field(default_factory=Samples.of)
    repeats: Sequence[int] = (1, 1)  # calls within one sample of ours and of torch's
    # The bare loop's operations per second, measured in every round.
    peak_flops_s: Sequence[float] = ()
    peers: tuple[PeerResult, ...] = ()  # other packages, where they were asked for

    @classmethod
    def describing(cls, case: Case, clock: Clock, **measured: Any) -> CaseResult:
        """Return the result of a case."""
        names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
        shape = {name: getattr(case, name) for name in names}
        about = case.name, case.type_name, case.passes == "backward", case.kind
        return cls(*about, shape, flops(case), case.goal, clock, **measured)

    def seconds(self, side: Samples) -> list[float]:
        """Return the samples of the clock that counts."""
        return _seconds(side, self.clock)

    @property
    def ratio(self) -> float:
        """Torch's median time over ours."""
        ours, theirs = (statistics.median(self.seconds(x)) for x in (self.ours, self.torch))
        return theirs / ours

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
    def met(self) -> str:
        """The verdict: "yes", or "no: " and which half is missed; empty without a goal."""
        if self.goal is None:
            return ""
        if self.wrong:
            return "no: wrong"
        missed = [] if self.ratio >= self.goal.ratio else ["ratio"]
        if self.goal.peak is not None and self.peak_fraction < self.goal.peak:
            missed.append("peak")
        return "no: " + ", ".join(missed) if missed else "yes"

    @property
    def summary(self) -> dict[str, Any] | None:
        """What follows from the samples, for people and other programs; None without any."""
        if self.wrong:
            return None
        samples = {
            "ours_s": self.seconds(self.ours),
            "torch_s": self.seconds(self.torch),
            "peak_flops_s": self.peak_flops_s,
        }
        spreads = {name: Spread.of(each)._asdict() for name, each in samples.items()}
        names = ("ratio", "ratio_range", "peak_fraction", "met")
        return spreads | {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the inverse of ``as_json``."""
        sides = {side: Samples(**values[side]) for side in ("ours", "torch")}
        goal = None if values["goal"] is None else Goal(**values["goal"])
        peers = tuple(PeerResult.from_json(each) for each in values.get("peers", ()))
        return super().from_json({**values, **sides, "goal": goal, "peers": peers})


@dataclass(frozen=True)
class Overhead(Finding):
    """The cost of one call of a tiny problem."""

    derived = ("times", "met")
    name: str  # how ours is called
    ours_s: list[float]  # these two: processor seconds of one call, one entry per round
    torch_s: list[float]
    goal: float  # at most this many times torch's

    @property
    def times(self) -> float:
        """Our median over torch's: less is better."""
        return statistics.median(self.ours_s) / statistics.median(self.torch_s)

    @property
    def met(self) -> str:
        """Whether the goal is met."""
        return "yes" if self.times <= self.goal else "no"


@dataclass(frozen=True)
class Scaling(Finding):
    """The speed-up of two threads, next to that of the bare loop in the same rounds."""

    derived = ("ours", "bare_loop", "same_length", "relative", "met")
    name: str  # these two: of the case
    dtype: str
    # These two: wall seconds of one call on one and on two threads, one entry per round.
    one_s: list[float]
    two_s: list[float]
    peak_one: list[float]  # these two: the bare loop's operations per second in the same rounds
    peak_two: list[float]
    # These two: wall seconds of a bare loop as long as the call on one thread.
    team_one_s: list[float]
    team_two_s: list[float]
    has_goal: bool  # False for a case that is only informative

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
    def met(self) -> str:
        """The verdict on the goal, "yes" or "no"; empty where there is no goal."""
        if not self.has_goal:
            return ""
        return "yes" if self.relative >= SCALING_GOAL else "no"


@dataclass(frozen=True)
class Memory(Finding):
    """The most memory that a pass holds beyond its operands."""

    name: str  # what was measured
    dtype: str  # of the operands
    side: str  # ``"ours"`` or ``"torch"``
    extra_bytes: int  # peak of the process during the pass, less what it held before
    result_bytes: int  # what of it is the result itself (the output, or three gradients)


@dataclass
class GoalRecord(BenchRecord):
    """The results of a run over the cases that have goals."""

    FORMAT = 2
    KIND = "a JSON file of the bench"
    LISTS: ClassVar = {
        "cases": CaseResult,
        "overhead": Overhead,
        "scaling": Scaling,
        "memory": Memory,
    }

    # Where it ran: chip, instruction set, versions, load. No host names, no paths.
    machine: dict[str, Any]
    threads: int  # of the cases
    status: str = NOT_FINISHED  # ``"complete"``, or why not everything is there
    seconds: float = 0.0  # how long the run took
    cases: list[CaseResult] = field(default_factory=list)  # these four: the findings
    overhead: list[Overhead] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    @classmethod
    def begin(cls, threads: int, packages: Sequence[Package] = ()) -> GoalRecord:
        """Return a record of a run that has not begun, on this machine, beside some packages."""
        peers = {"peers": standing(packages)} if packages else {}
        return cls(_machine() | peers, threads)


def standing(packages: Sequence[Package]) -> dict[str, dict[str, str]]:
    """Return each package's version, and why it is not here, for a record."""
    return {each.name: {"version": each.version, "why_not": each.absence()} for each in packages}


def _machine() -> dict[str, Any]:
    found, chip, first = environment.describe(1), detect(), cpuinfo()
    numbers = "-".join(first[key] for key in ("cpu family", "model") if key in first)
    narrow = peaks.isa() if peaks.isa() in _NARROW else ""
    flags = first.get("flags", first.get("Features", "")).split()
    known = ("avx", "fma", "f16c", "amx", "asimd", "sve", "bf16")
    return found | {
        # Virtual machines hide which processor they are; the family and the model do not.
        "slug": re.sub(r"[^a-z0-9]+", "-", f"{chip.name} {numbers} {narrow}".lower()).strip("-"),
        "family": first.get("cpu family", ""),
        "model": first.get("model", ""),
        "cache_bytes": {"l1": chip.l1_bytes, "l2": chip.l2_bytes, "l3": chip.l3_bytes},
        "isa": peaks.isa(),
        "flags": [flag for flag in flags if flag.startswith(known)],
        "versions": {**found["versions"], "python": found["python"]},
        "load_average": [found["load_average"]],
    }


def measure(
    case: Case,
    budget_s: float,
    rounds: tuple[int, int],
    threads: int,
    packages: Sequence[Package] = (),
) -> CaseResult:
    """Measure a case, gated by its correctness.

    ``rounds`` are the fewest and the most, whatever the budget says. One thread of torch is timed
    by its own processor time, more by the wall. Packages are measured in the same rounds.
    """
    clock: Clock = "cpu" if threads == 1 else "wall"
    work = work_of(case, "speed")
    given = draw(work)
    attend = ours().make(work, given)
    wrong = compare(work, given, attend).complaint
    if wrong:
        return CaseResult.describing(case, clock, wrong=wrong)
    calls = {
        "ours": call_of(work, given, attend),
        "torch": call_of(work, given, sdpa().make(work, given)),
    }
    # The record of the run says why others are not here.
    here = [package for package in packages if not package.absence()]
    tried = [_prepared(package, work, given, clock) for package in here]
    kind = peaks.loop(case.type_name, peaks.isa())
    found: list[float] = []
    every = {**calls, **{name: call for _, own in tried for name, call in own.items()}}
    call_s = {name: _warm(call) for name, call in every.items()}
    repeats, count = plan(call_s, budget_s * len(every) / len(calls), rounds)
    times = interleave(
        every, repeats, count, once, lambda: found.append(peaks.measure(kind, threads, clock))
    )
    samples = defaultdict(Samples.of, {name: Samples.of(each) for name, each in times.items()})
    return CaseResult.describing(
        case,
        clock,
        **{name: samples[name] for name in calls},
        repeats=[repeats[name] for name in calls],
        peak_flops_s=found,
        peers=tuple(
            replace(each, samples=samples[each.name], packing=samples[each.name + _PACKING])
            for each, _ in tried
        ),
    )


def _prepared(
    package: Package, work: Work, given: Given, clock: Clock
) -> tuple[PeerResult, dict[str, Call]]:
    """Hold a package to the 2x rule; return its calls too, where they can be timed."""
    found = PeerResult(package.name, package.version, why_not=package.refusal(work))
    if found.why_not:
        return found, {}
    try:
        prepared: Prepared = package.prepare(work, given)
        found = replace(found, path=prepared.path)
        # In its own layout it has the tensors already.
        wrong = compare(work, given, lambda q, k, v: prepared.call()).complaint
        other = 0.0 if wrong or clock == "wall" else elsewhere(prepared.call)
    except Exception as error:  # each package has errors of its own, and none ends the run
        return replace(found, why_not=first_line(error)), {}
    if wrong:
        return replace(found, wrong=wrong), {}
    if other > _ELSEWHERE:
        said = f"other threads do {other:.0%} of its work, and the clock counts only one"
        return replace(found, why_not=said), {}
    packing = {} if prepared.pack is None else {package.name + _PACKING: prepared.pack}
    return found, {package.name: prepared.call, **packing}


def _warm(call: Call) -> float:
    first_s = once(call).cpu_s
    # The first call of a short one pays for what it sets up.
    return once(call).cpu_s if first_s < 0.2 else first_s


def overhead(rounds: int) -> list[Overhead]:
    """Measure a call of a tiny problem on one thread: ours, ours with a held plan, torch's."""
    torch.set_num_threads(1)
    q, k, v = (torch.randn(_TINY) for _ in range(3))
    held = tilewise.plan(q, k, v)
    calls: dict[str, Call] = {
        "attention": lambda: tilewise.attention(q, k, v),
        "attention, held plan": lambda: tilewise.attention(q, k, v, plan=held),
        "torch": lambda: scaled_dot_product_attention(q, k, v),
    }
    for call in calls.values():
        once(call, 300)
    found = interleave(calls, dict.fromkeys(calls, 1000), rounds, once)
    samples = {name: Samples.of(times).cpu_s for name, times in found.items()}
    goals = {"attention": 3.0, "attention, held plan": 2.0}
    return [Overhead(name, samples[name], samples["torch"], goal) for name, goal in goals.items()]
