"""Runs of a script that measures on one thread: printed one by one, and written together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tilelab.common.environment import describe


def write_runs(
    runs: Iterable[Mapping[str, Any]], line: Callable[[Any], str], path: Path | None
) -> None:
    """Print a line for each run as it is found, and write all of them beside the machine.

    Args:
        runs: what a script measures on one thread, in JSON's types.
        line: of a run.
        path: of the file; None for none.
    """
    record: dict[str, Any] = {"machine": describe(1), "runs": []}
    for run in runs:
        print(line(run), flush=True)
        record["runs"].append(run)
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
