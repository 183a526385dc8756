"""One run of the check: where it ran, everything it found, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilelab.common.compact import compact_json, read_json
from tilelab.gpu_check.derived import summary
from tilelab.gpu_check.row import FAILURES, Row

__all__ = ["COMPLETE", "FORMAT", "ONLY", "Record"]

FORMAT = 1
COMPLETE, ONLY = "complete", "only "  # the steps that were asked for


@dataclass
class Record:
    """The results of a run, while it goes on and afterwards.

    Args:
        self_test: nothing in it is a measurement.
        backend: that was asked.
        status: ``"complete"``, ``"only "`` and some steps, or why not everything is there.
        seconds: of every step.
        rows: the findings.
    """

    self_test: bool
    backend: str
    status: str = "not finished"
    seconds: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

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
        """Everything, in JSON's types; ``from_json`` reads it back."""
        return {
            "format": FORMAT,
            "self_test": self.self_test,
            "backend": self.backend,
            "status": self.status,
            "seconds": self.seconds,
            "summary": summary(self.rows),
            "rows": [row.as_json() for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """Write the JSON, in one piece: a run that is killed leaves the last whole one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".part")
        scratch.write_text(compact_json(self.as_json()))
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record in a file.

        Raises:
            InvalidArgument: there is none that this version can read.
        """
        values = read_json(path, FORMAT, "a JSON file of the GPU check")
        return cls(
            values["self_test"],
            values["backend"],
            values["status"],
            values["seconds"],
            [Row(**row) for row in values["rows"]],
        )
