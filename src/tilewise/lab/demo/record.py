"""Everything that a run found out, and its raw JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilewise import chips
from tilewise.lab.demo.contest import Arm, line_up
from tilewise.lab.demo.corpus import Corpus
from tilewise.lab.demo.longtable import Cell
from tilewise.lab.demo.settings import Settings
from tilewise.lab.demo.verdict import Check, checks, pace
from tilewise.lab.memory import available_bytes

FORMAT = 1
COMPLETE = "complete"


@dataclass
class Record:
    """One run, while it goes on and when it has ended.

    Args:
        settings: what was asked.
        corpus: the text, of which the record keeps all but the bytes.
        environment: where it ran, by topic, in words.
        arms: the training contest.
        cells: the long-context table.
        status: ``complete``, or why the run ended early.
        seconds: how long the whole run took.
    """

    settings: Settings
    corpus: Corpus
    environment: dict[str, str]
    arms: list[Arm] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    status: str = "not finished"
    seconds: float = 0.0

    @classmethod
    def begin(cls, settings: Settings, corpus: Corpus) -> Record:
        """A record of a run that has not begun."""
        return cls(settings, corpus, environment(settings), line_up(settings))

    @property
    def tokens(self) -> int:
        """Bytes that a model learns from in one step."""
        return self.settings.batch * self.settings.context

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.status == COMPLETE

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def checks(self) -> list[Check]:
        """Whether the losses agree, as far as it can be said yet."""
        return checks(self.arms, self.settings.steps)

    def as_json(self) -> dict[str, Any]:
        """The raw JSON: every number of the report and every step behind it."""
        paces = {arm.name: pace(arm, self.tokens) for arm in self.arms}
        return {
            "format": FORMAT,
            "status": self.status,
            "seconds": self.seconds,
            "settings": self.settings.as_json(),
            "corpus": {
                "name": self.corpus.name,
                "bytes": len(self.corpus.data),
                "files": self.corpus.files,
                "sha256": self.corpus.sha256,
            },
            "environment": self.environment,
            "checks": [asdict(check) for check in self.checks()],
            "arms": [
                {
                    **asdict(arm),
                    "pace": None if (found := paces[arm.name]) is None else asdict(found),
                }
                for arm in self.arms
            ],
            "long_context": [asdict(cell) for cell in self.cells],
        }


def environment(settings: Settings) -> dict[str, str]:
    """Where the run takes place: machine, versions, and the plan for the model's attention."""
    chip = chips.detect()
    free = available_bytes()
    shape = (settings.batch, settings.heads, settings.context, settings.width // settings.heads)
    query = torch.empty(shape)
    return {
        "machine": f"{chip.name}, {chip.cores} cores, {platform.machine()}",
        "system": platform.platform(),
        "threads": str(settings.threads),
        "free memory": "unknown" if free is None else f"{free / 1e9:.1f} GB",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilewise": _version(),
        "backend": tilewise.plan(query, query, query, mask=tilewise.masks.causal()).backend,
        "plan": str(tilewise.explain(query, query, query, mask=tilewise.masks.causal())),
    }


def _version() -> str:
    try:
        return metadata.version("tilewise")
    except metadata.PackageNotFoundError:
        return "run from its source tree"
