"""Studies that are conducted: whole, with children that only write records."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.lab.study.records_of import config_of, experiment_of, study_of
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import Execution
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord

FAKE = "tests.lab.study.conduct.fake_child"


def conductor_of(study: Study, out: Path, **fields: Any) -> Conductor:
    """A conductor of a study; ``fields`` are its own and those of its execution."""
    execution = {key: fields.pop(key) for key in Execution.model_fields.keys() & fields.keys()}
    return Conductor(study, "tilewise study run x", out, execution=Execution(**execution), **fields)


class Conducted:
    """A study that is conducted into a folder, and what was said the last time.

    Args:
        place: the folder of everything.
        acts: what its children do: see ``fake_child.py``.
        changes: of its baseline, by dotted paths.
        options: of its conductor, each time.
        fields: of its experiment.
    """

    def __init__(
        self,
        place: Path,
        acts: str = "quick",
        changes: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        text = place / acts
        text.write_text("the cat sat on the mat. " * 400)
        few = {"data.source": str(text), "budget.steps": 3}
        baseline = config_of(**{**few, **(changes or {})})
        given = {"baseline": baseline, "seeds": (0, 1), **fields}
        self.study = study_of(experiment_of("lion", **given))
        self.out = place / "studies"
        self.said = ""
        self._options = {"jobs": 2, "module": FAKE, **(options or {})}

    def go(self, study: Study | None = None, **options: Any) -> int:
        stream = io.StringIO()
        ours = conductor_of(study or self.study, self.out, **{**self._options, **options})
        try:
            return ours.conduct(Console(file=stream, width=200))
        finally:
            self.said = stream.getvalue()

    @property
    def folder(self) -> Path:
        return store.folder_of(self.study, self.out)

    @property
    def records(self) -> dict[str, RunRecord]:
        return store.read_records(self.folder)

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()
