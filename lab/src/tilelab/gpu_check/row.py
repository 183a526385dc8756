"""One finding of the check, in JSON's types."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["FAILURES", "Row", "Status"]

# "wrong": it ran and the result is not what it must be. "unsupported": the backend said that it
# cannot. "skipped": there was no time left. "error": it did not come to an end.
Status = Literal["ok", "wrong", "unsupported", "skipped", "error"]
FAILURES: tuple[Status, ...] = ("wrong", "error", "skipped")


@dataclass(frozen=True)
class Row:
    """One finding.

    Args:
        step: of the check.
        name: of the finding within its step.
        status: how it went.
        note: in words, what is wrong or missing.
        values: what was measured.
    """

    step: str
    name: str
    status: Status = "ok"
    note: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return JSON's types; ``Row(**values)`` reads them back."""
        return asdict(self)
