"""Numbers derived from the samples: rates, fractions of the ceilings, and verdicts on goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelab.gpu_check.clock import Spread
from tilelab.gpu_check.goals import FLEX, Goal, goal_for
from tilelab.gpu_check.row import Row

__all__ = ["OURS", "best", "ceiling", "fraction", "goal", "met", "rate", "summary"]

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
    if "direction" not in values:
        return Goal()
    return goal_for(values["direction"], values["kind"], values["head_dim"], values["length"])


def met(row: Row) -> str:
    """Yes, or no and what is missed; empty where there is no goal or nothing to judge by."""
    asked, ours, flex = goal(row), best(row), rate(row, FLEX)
    if ours is None or asked == Goal():
        return ""
    missed, judged = [], False
    if asked.rate is not None:
        judged = True
        if ours.median < asked.rate:
            missed.append("rate")
    if asked.over_flex is not None and flex is not None:
        judged = True
        if ours.median < asked.over_flex * flex.median:
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
