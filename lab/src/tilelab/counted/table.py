"""Counted against predicted, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilelab.counted.cases import Case

__all__ = ["Row", "table", "verdict"]


@dataclass(frozen=True)
class Row:
    """One case.

    Args:
        case: what ran.
        counted: bytes of the lines that its last-level misses fetched.
        predicted: bytes that the model says.
    """

    case: Case
    counted: int
    predicted: int

    @property
    def off(self) -> float:
        """The excess of the prediction over the count, as a share of the count."""
        return self.predicted / self.counted - 1

    @property
    def holds(self) -> bool:
        """Whether the excess is within the limit of the case."""
        return abs(self.off) <= self.case.allowed

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return {"case": asdict(self.case), "counted": self.counted, "predicted": self.predicted}

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Row:
        """Read a stored count, and predict it again with today's model."""
        case = Case(**stored["case"])
        return cls(case, stored["counted"], case.predicted().bytes)


_HEAD = (
    "| | pass | N | heads | D | cache, KiB | counted, MB | predicted, MB | off by |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(rows: Sequence[Row]) -> str:
    """Markdown; what is off by more than is allowed says so."""
    return "\n".join([*_HEAD, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    case = row.case
    who = "plain"
    if case.method == "core":
        who = "ours"
        who += f", tasks of {case.task}" if case.direction == "forward" else ""
        who += ", causal" if case.causal else ""
    heads = str(case.heads) if case.heads == case.kv_heads else f"{case.heads} on {case.kv_heads}"
    off = f"{100 * row.off:+.1f} %" + ("" if row.holds else " **too far**")
    sizes = (case.direction, case.length, heads, case.width, case.cache >> 10)
    numbers = (f"{row.counted / 1e6:.2f}", f"{row.predicted / 1e6:.2f}", off)
    return "| " + " | ".join(map(str, (who, *sizes, *numbers))) + " |"


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence."""
    parts = []
    for method, name in (("core", "ours"), ("plain", "plain")):
        of = [row for row in rows if row.case.method == method]
        if of:
            worst = max(of, key=lambda row: abs(row.off))
            parts.append(
                f"{name}: {len(of)} cases, off by {100 * abs(worst.off):.1f} % at the most "
                f"({100 * worst.case.allowed:.0f} % allowed)"
            )
    return "; ".join(parts)
