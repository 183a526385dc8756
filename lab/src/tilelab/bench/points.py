"""The results of suites: points, and the record that keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

import torch

from tilelab.common import environment
from tilelab.common.clock import Spread
from tilelab.common.record import NOT_FINISHED, Finding, Record
from tilelab.peers.methods import Method
from tilelab.peers.work import Work
from tilewise.inspect.peaks import absence
from tilewise.plan.traffic.report import amount, duration

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
    def key(self) -> tuple[str, str, int, str, str, str]:
        """Names this point in a record."""
        return self.suite, self.case, self.length, self.dtype, self.method, self.quantity

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
