"""A run as a list of steps, the points that they give, and the record that keeps these.

A budget says what steps may spend. A step of a sweep takes all methods on one work, gates them and
then times them in turn. It gives a point for each: a quantity with all samples, or why there are
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch

from tilelab.cases.case import Case
from tilelab.common import environment
from tilelab.common.clock import Call, Spread, race, seconds_of
from tilelab.common.files import COMPLETE, INTERRUPTED, NOT_FINISHED, Finding, Record
from tilelab.common.memory import too_large
from tilelab.peers.methods import OURS, Method
from tilelab.peers.work import Attend, Given, Work, call_of, compare, draw, work_of
from tilewise.errors import TilewiseError
from tilewise.inspect.peaks import absence
from tilewise.plan.traffic.report import amount, duration

if TYPE_CHECKING:
    from rich.console import Console

LENGTHS = tuple(2**power for power in range(7, 17))  # 128 to 64k
QUICK_LENGTHS = (128, 512)
Wrap = Callable[[Work, Given, Attend], Callable[[], Any]]
_Found = TypeVar("_Found")
Quantity = Literal["seconds", "bytes", "error"]
Status = Literal["ok", "wrong", "skipped", "failed"]


@dataclass(frozen=True)
class Point(Finding):
    """One method on one case at one length."""

    suite: str  # these four: of the work
    case: str
    length: int
    dtype: str
    method: str  # its name
    # What the samples are: seconds of one call, bytes held at the highest beyond the operands, or
    # the largest error against float64.
    quantity: Quantity = "seconds"
    shape: dict[str, int] = field(default_factory=dict)  # batch, heads, kv_heads and head_dim
    # "ok"; "wrong" breaks the 2x rule, "skipped" and "failed" have no samples either.
    status: Status = "ok"
    exact: bool = True  # whether the method claims to be
    note: str = ""  # why there are no samples, or what else is to be said
    samples: tuple[float, ...] = ()  # all of them
    predicted: float | None = None  # what the model says, in the same unit
    # Root mean square of the error against exact attention, over that of the values; of methods
    # that are not exact.
    error: float | None = None
    allowed: float | None = None  # the largest error that the 2x rule allows

    @classmethod
    def of(cls, work: Work, method: str, **found: Any) -> Point:
        """Return a point of a work."""
        about = work.suite, work.name, work.keys, work.type_name, method
        return cls(*about, shape=work.shape, **found)

    @classmethod
    def without(
        cls, work: Work, method: Method, quantity: Quantity, status: Status, note: str
    ) -> Point:
        """Return a point that says why a method was not measured."""
        said = {"quantity": quantity, "status": status, "note": note}
        return cls.of(work, method.name, exact=method.exact, **said)

    @property
    def key(self) -> tuple[str, str, int, str, str, str, int]:
        """Names this point in a record; the last is the query rows, 0 where it does not say."""
        rows = self.shape.get("queries", 0)
        return self.suite, self.case, self.length, self.dtype, self.method, self.quantity, rows

    @property
    def median(self) -> float | None:
        """The median of the samples; None without samples."""
        return Spread.of(self.samples).median if self.samples else None

    def as_json(self) -> dict[str, Any]:
        """Return JSON's types, without default values.

        Several samples come with their median, their least and largest, and their quartiles.
        """
        usual = {each.name: each.default for each in fields(self)}
        values = {key: value for key, value in super().as_json().items() if value != usual[key]}
        if len(self.samples) > 1:
            median, *rest = Spread.of(self.samples)
            values |= {"median": median, "spread": rest}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the inverse of ``as_json``."""
        return super().from_json({**values, "samples": tuple(values.get("samples", ()))})


class BenchRecord(Record):
    """A run of the bench."""

    machine: dict[str, Any]
    status: str
    seconds: float

    def end(self, status: str, seconds: float) -> None:
        """The run is over."""
        self.status, self.seconds = status, round(seconds, 1)
        self.machine["load_average"].append(environment.load_average())


@dataclass
class SuiteRecord(BenchRecord):
    """One run."""

    FORMAT = 1
    KIND = "a JSON file of a suite of the bench"
    LISTS: ClassVar = {"points": Point}

    suites: list[str]  # which were asked for
    machine: dict[str, Any]  # where it ran: chip, versions, load; no host name, no path
    device: str  # "cpu" or "cuda"
    settings: dict[str, Any] = field(default_factory=dict)  # what was asked, by option
    status: str = NOT_FINISHED  # "complete", or why not everything is there
    seconds: float = 0.0  # how long it took
    points: list[Point] = field(default_factory=list)  # the findings

    @classmethod
    def begin(cls, suites: list[str], device: str, settings: dict[str, Any]) -> SuiteRecord:
        """Return a record of a run on this machine that has not begun."""
        machine = environment.describe(1)
        machine["core"] = absence() or "compiled"
        if device == "cuda":
            machine["chip"] = torch.cuda.get_device_name()
            machine["versions"]["cuda"] = torch.version.cuda
        machine["load_average"] = [machine["load_average"]]
        return cls(suites, machine, device, settings)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the record of a file; a shape that all points share may be beside them."""
        shape = values.get("shape", {})
        points = [{"shape": shape, **each} for each in values["points"]]
        return super().from_json({**values, "points": points})

    def of(self, suite: str) -> list[Point]:
        """Return the points of a suite."""
        return [point for point in self.points if point.suite == suite]


def groups(points: Iterable[Point]) -> dict[tuple[str, str, Quantity], list[Point]]:
    """Points by case, dtype and quantity, in order."""
    found: dict[tuple[str, str, Quantity], list[Point]] = {}
    for point in points:
        found.setdefault((point.case, point.dtype, point.quantity), []).append(point)
    return found


def amount_of(value: float, quantity: Quantity) -> str:
    """Return a value with its unit."""
    if quantity == "seconds":
        return duration(value)
    return amount(value) if quantity == "bytes" else f"{value:.2g}"


@dataclass
class Budget:
    """A time budget that starts when it is made, and how long calls took so far."""

    minutes: float  # for everything
    rounds: tuple[int, int] = (3, 15)  # the fewest and the most rounds of a step
    round_budget_s: float = 2.0  # about how long the rounds of one step may take
    _began: float = field(default_factory=time.monotonic)
    _took: dict[tuple[str, ...], tuple[int, float, float]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative when it is over."""
        return self.minutes * 60 - (time.monotonic() - self._began)

    def took(self, key: tuple[str, ...], length: int, seconds: float, once_s: float = 0.0) -> None:
        """A call of a method on a case took so long, and so long what is done once before."""
        self._took[key] = length, seconds, once_s

    def too_long(self, key: tuple[str, ...], length: int) -> str:
        """Why a method should not be tried at a greater length; empty if it may.

        A call is taken to grow with the square of the length; it is made to warm up, to compare
        and then in the fewest rounds.
        """
        if key not in self._took:
            return ""
        known, seconds, once_s = self._took[key]
        expected = once_s + seconds * max(1.0, length / known) ** 2 * (2 + self.rounds[0])
        if expected <= self.left_s:
            return ""
        return f"it would take about {expected:.0f} s, and {max(self.left_s, 0):.0f} s are left"


class Step(NamedTuple):
    """A part of a run."""

    name: str  # for the progress
    run: Callable[[Budget], Iterable[Finding]]  # does it, and gives what was found


@dataclass(frozen=True)
class Settings:
    """The settings that the user asked for."""

    device: str = "cpu"  # "cpu" or "cuda"
    lengths: tuple[int, ...] = LENGTHS  # of the sweep, ascending
    quick: bool = False  # few cases
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # names of torch's
    flex: bool = True  # whether FlexAttention, which compiles, takes part
    models: tuple[str, ...] = ()  # names of well-known models

    def work(self, suite: str, case: Case, length: int, dtype: str, **more: Any) -> Work:
        """Return a case at a length of a sweep.

        Heads are few on a single CPU thread. The batch is the same at every length, so that times
        can be compared along it. There are as many key heads as heads, and values are as wide as
        keys, where ``more`` says nothing else.
        """
        heads, batch = (8, 2) if self.device == "cuda" else (2, 1)
        sizes = {"batch": batch, "heads": heads, "queries": length, "keys": length, "head_dim": 64}
        more = {**sizes, "dtype": getattr(torch, dtype), **more}
        usual = {"kv_heads": more["heads"], "value_dim": more["head_dim"]}
        return work_of(case, suite, self.device, **{**usual, **more})


def conduct(
    record: BenchRecord,
    suites: Sequence[tuple[str, Sequence[Step]]],
    budget: Budget,
    path: Path | None,
    console: Console,
    threads: int | None = 1,
) -> int:
    """Do all steps into the record, which is written after each.

    A suite has an equal share of what is left; what it leaves is the others'.

    ``path`` is of the JSON; None to write none. ``threads`` are those of torch meanwhile; None for
    as many as there are.

    Returns:
        0; 1 where a step failed; 130 where Ctrl-C ended it.
    """
    # rich: processes that only measure load none
    from tilelab.common.terminal import Progress, in_words

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    began = time.monotonic()
    missing: list[str] = []
    failed: list[str] = []
    status, code = COMPLETE, 0
    try:
        with Progress(sum(len(steps) for _, steps in suites), console) as progress:
            for index, (name, steps) in enumerate(suites):
                minutes = budget.left_s / 60 / (len(suites) - index)
                share = Budget(minutes, budget.rounds, budget.round_budget_s)
                for done, step in enumerate(steps):
                    if share.left_s <= 0:
                        progress.skip(len(steps) - done)
                        missing.append(f"{name}: {done} of {len(steps)} steps fit into the time")
                        break
                    known = share.minutes < float("inf")
                    left = f"{in_words(share.left_s)} of the budget left" if known else ""
                    progress.step(step.name, left)
                    try:
                        # One by one: a Ctrl-C keeps those that are there.
                        for found in step.run(share):
                            record.add(found)
                    except TilewiseError as error:
                        failed.append(f"{step.name}: {error}")
                    if path is not None:
                        record.write(path)
    except KeyboardInterrupt:
        status, code = INTERRUPTED, 130
    finally:
        torch.set_num_threads(before)
    for line in failed:
        console.print(f"tilewise bench: {line}", markup=False)
    if not code and (missing or failed):
        # The words of a failure may name folders, and the record must not.
        status = "; ".join([*missing, *(["a step failed"] if failed else [])])
        code = int(bool(failed))
    record.end(status, time.monotonic() - began)
    return code


def timed(works: Iterable[Work], methods: Sequence[Method], wrap: Wrap = call_of) -> list[Step]:
    """Return a step for each work, which times all methods on it; arguments as of ``time_all``."""
    return [Step(work.title, partial(time_all, work, methods, wrap=wrap)) for work in works]


def time_all(
    work: Work, methods: Sequence[Method], budget: Budget, *, wrap: Wrap = call_of
) -> Iterator[Point]:
    """Yield the points of all methods on a work; ``wrap`` makes the call of one that is exact."""
    given = draw(work)
    calls: dict[str, Call] = {}
    call_s: dict[str, float] = {}
    ready: list[Point] = []
    for method in methods:
        began = time.monotonic()
        found = attempted(work, method, budget, partial(_prepare, work, given, method, wrap))
        if isinstance(found, Point):
            yield found
            continue
        calls[method.name], seconds, point = found
        once_s = max(0.0, time.monotonic() - began - 3 * seconds)  # compiling, comparing
        budget.took(method_key(work, method), work.keys, seconds, once_s)
        call_s[method.name] = seconds
        ready.append(point)
    budget_s = min(budget.round_budget_s, max(budget.left_s, 0.0))
    samples = race(calls, budget_s, budget.rounds, work.timer, call_s)
    for point in ready:
        yield replace(point, samples=tuple(samples[point.method]))


def attempted(
    work: Work,
    method: Method,
    budget: Budget,
    attempt: Callable[[], _Found],
    quantity: Quantity = "seconds",
) -> _Found | Point:
    """Return what an attempt with a method gives, or a point that says why it gives nothing."""
    reason = why_skipped(work, method, budget)
    if reason:
        return Point.without(work, method, quantity, "skipped", reason)
    try:
        return attempt()
    except (RuntimeError, TilewiseError, NotImplementedError, MemoryError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        status: Status = "failed" if method.name == OURS else "skipped"
        return Point.without(work, method, quantity, status, line)


def method_key(work: Work, method: Method) -> tuple[str, ...]:
    """Return the name of a method on a case, whatever the length."""
    return work.suite, work.name, work.type_name, method.name


def why_skipped(work: Work, method: Method, budget: Budget) -> str:
    """Return why a method is not tried on a work; empty if it is."""
    if work.statistics and not method.statistics:
        return "it gives no statistics"
    return (
        method.why_not(work)
        or budget.too_long(method_key(work, method), work.keys)
        or too_large(method.bytes(work), work.device)
    )


def _prepare(
    work: Work, given: Given, method: Method, wrap: Wrap
) -> tuple[Call, float, Point] | Point:
    """Return a warm call, its seconds and its point without samples; a point alone if wrong."""
    attend = judged_attend = method.make(work, given)
    judged, note = work, ""
    if work.dropout_p and not method.same_dropout:
        note = "compared without dropout"
        judged = replace(work, dropout_p=0.0)  # it drops other pairs: judged without
        judged_attend = method.make(judged, given)
    measured = compare(judged, given, judged_attend)
    if method.exact and measured.complaint:
        return Point.without(work, method, "seconds", "wrong", measured.complaint)
    call = wrap(work, given, attend)
    call()
    error = None if method.exact else measured.relative
    point = Point.of(work, method.name, exact=method.exact, error=error, note=note)
    return call, seconds_of(call, work.timer), point
