"""Conductors of small studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilelab.study.ask.config import Study
from tilelab.study.ask.run import Execution
from tilelab.study.conduct.conductor import Conductor


def conductor_of(study: Study, out: Path, **fields: Any) -> Conductor:
    """A conductor of a study; ``fields`` are its own and those of its execution."""
    execution = {key: fields.pop(key) for key in Execution.model_fields.keys() & fields.keys()}
    return Conductor(study, "tilewise study run x", out, execution=Execution(**execution), **fields)
