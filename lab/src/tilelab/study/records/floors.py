"""The floors of a study: ``floors.json`` in its folder, so that a report needs no data.

The file has the floors of each experiment (``ask.metrics.Floor``), by its name. A study that is
older has no such file, and its report no floors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tilelab.common.files import write_atomically
from tilelab.study.ask.metrics import Floor
from tilelab.study.records.events import CorruptRecordError

FLOORS = "floors.json"

Floors = Mapping[str, tuple[Floor, ...]]  # experiment -> its floors


def read_floors(folder: Path) -> dict[str, tuple[Floor, ...]]:
    """Return the floors in a study's folder, empty where none are stored.

    Raises:
        CorruptRecordError: the file is damaged.
    """
    path = folder / FLOORS
    if not path.exists():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {name: tuple(Floor(**each) for each in found) for name, found in said.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fix = "Delete it: the command that ran the study makes it anew."
        raise CorruptRecordError(f"{path}: not the floors of a study ({error}). {fix}") from None


def write_floors(folder: Path, floors: Floors) -> None:
    """Write the floors of a study into its folder."""
    said = {name: [each._asdict() for each in found] for name, found in floors.items()}
    write_atomically(folder / FLOORS, json.dumps(said, indent=1) + "\n")
