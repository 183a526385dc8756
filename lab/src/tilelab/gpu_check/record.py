"""The findings of a run, the numbers and verdicts that follow from them, and their JSON.

The goals are for an H200, in bfloat16 unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from tilelab.common import record
from tilelab.common.clock import Spread
from tilelab.common.record import COMPLETE, NOT_FINISHED, Finding
from tilewise.errors import Unsupported

# "wrong": it ran and the result is not what it must be. "unsupported": the backend said that it
# cannot. "skipped": there was no time left. "error": it did not come to an end.
Status = Literal["ok", "wrong", "unsupported", "skipped", "error"]
FAILURES: tuple[Status, ...] = ("wrong", "error", "skipped")


@dataclass(frozen=True)
class Row(Finding):
    """One finding."""

    step: str  # of the check
    name: str  # of the finding within its step
    status: Status = "ok"  # how it went
    note: str = ""  # in words, what is wrong or missing
    values: dict[str, Any] = field(default_factory=dict)  # what was measured


_LONGEST_NOTE = 300


def in_short(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, Unsupported):
        reasons = [reason for why in error.reasons.values() for reason in why]
        return "; ".join(reasons or [error.what])[:_LONGEST_NOTE]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST_NOTE]


FLEX = "flex"  # as the peers are named


class Goal(NamedTuple):
    """The goals of a case; None where there is no goal."""

    rate: float | None = None  # TFLOP/s; of decoding TB/s
    # Times the speed of compiled FlexAttention, at least. The firm goal.
    over_flex: float | None = None


_LEAST_LENGTH = 8192  # shorter problems have no goal
_RATES = {
    ("forward", "full", 64): 400.0,
    ("forward", "full", 128): 450.0,
    ("forward", "full", 256): 400.0,
    ("forward", "causal", 64): 350.0,
    ("forward", "causal", 128): 400.0,
    ("forward", "causal", 256): 330.0,
    ("forward", "fp8", 128): 600.0,
    ("forward", "decode", 128): 3.6,
    ("backward", "full", 64): 270.0,
    ("backward", "full", 128): 320.0,
    ("backward", "full", 256): 250.0,
    ("backward", "causal", 64): 230.0,
    ("backward", "causal", 128): 290.0,
}
_VARIANTS = ("alibi", "document", "window")


def goal_for(direction: str, kind: str, head_dim: int, length: int) -> Goal:
    """Return the goal of a speed case.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        kind: of the mask or score, e.g. ``"causal"``.
        head_dim: D, the width of a head.
        length: keys of a sequence.
    """
    if length < _LEAST_LENGTH:
        return Goal()
    firm = kind in _VARIANTS or (direction == "backward" and kind in ("full", "causal"))
    return Goal(_RATES.get((direction, kind, head_dim)), 1.0 if firm else None)


OURS = ("ours", "table")  # with a BlockMask, where there are two ways
_TERA = 1e12


def rate(row: Row, name: str) -> Spread | None:
    """Tera-operations (or terabytes) per second of one way; None where it was not timed."""
    samples = row.values.get("samples_s", {}).get(name)
    if not samples:
        return None
    return Spread.of([row.values["amount"] / seconds / _TERA for seconds in samples])


def best(row: Row) -> Spread | None:
    """Return the faster of our ways."""
    found = [spread for name in OURS if (spread := rate(row, name)) is not None]
    return max(found, key=lambda spread: spread.median, default=None)


def ceiling(rows: Sequence[Row], unit: str) -> Spread | None:
    """Return the GPU's ceiling in a unit; None where it was not measured."""
    for row in rows:
        if row.step == "ceilings" and row.values.get("unit") == unit:
            return rate(row, row.name)
    return None


def fraction(rows: Sequence[Row], row: Row) -> float | None:
    """Our share of the ceiling."""
    ours, most = best(row), ceiling(rows, row.values.get("unit", ""))
    return None if ours is None or most is None else ours.median / most.median


def goal(row: Row) -> Goal:
    """Return the goal of what was timed beside others; of anything else an empty one."""
    values = row.values
    if "direction" not in values or "dtype" in values:
        return Goal()
    return goal_for(values["direction"], values["kind"], values["head_dim"], values["length"])


def met(row: Row) -> str:
    """Yes, or no and what is missed; empty where there is no goal or nothing to judge by."""
    wanted, ours, flex = goal(row), best(row), rate(row, FLEX)
    if ours is None or wanted == Goal():
        return ""
    missed, judged = [], False
    if wanted.rate is not None:
        judged = True
        if ours.median < wanted.rate:
            missed.append("rate")
    if wanted.over_flex is not None and flex is not None:
        judged = True
        if ours.median < wanted.over_flex * flex.median:
            missed.append("flex")
    if missed:
        return f"no: {', '.join(missed)}"
    return "yes" if judged else ""


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the timed cases as numbers, for people and other programs."""
    return [
        {
            "name": row.name,
            "unit": row.values["unit"],
            "rates": {name: rate(row, name) for name in row.values["samples_s"]},
            "fraction": fraction(rows, row),
            "goal": goal(row)._asdict(),
            "met": met(row),
        }
        for row in rows
        if "direction" in row.values and row.values.get("samples_s")
    ]


ONLY = "only "  # the steps that were asked for


@dataclass
class Record(record.Record):
    """The results of a run, while it goes on and afterwards."""

    FORMAT = 1
    KIND = "a JSON file of the GPU check"
    LISTS: ClassVar = {"rows": Row}

    self_test: bool  # nothing in it is a measurement
    backend: str  # that was asked
    # ``"complete"``, ``"only "`` and some steps, or why not everything is there.
    status: str = NOT_FINISHED
    seconds: dict[str, float] = field(default_factory=dict)  # of every step
    rows: list[Row] = field(default_factory=list)  # the findings

    def of(self, step: str) -> list[Row]:
        """Return the rows of a step."""
        return [row for row in self.rows if row.step == step]

    def find(self, step: str, name: str) -> Row | None:
        """Return the first row of that name."""
        return next((row for row in self.of(step) if row.name == name), None)

    @property
    def finished(self) -> bool:
        """Whether every requested job was begun."""
        return self.status == COMPLETE or self.status.startswith(ONLY)

    @property
    def failures(self) -> list[Row]:
        """Return the rows that are wrong, did not end or were not begun."""
        return [row for row in self.rows if row.status in FAILURES]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the timed cases as numbers."""
        return super().as_json() | {"summary": summary(self.rows)}
