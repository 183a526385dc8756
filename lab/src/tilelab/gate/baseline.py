"""Registers and instructions as they were: one file per version of Triton.

``baselines/3.7.1.json`` holds ``{target: {"case / kernel": [registers, instructions, choice]}}``.
Compilers differ from version to version, and a version without a file has nothing to be held to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tilelab.gate.record import Record

__all__ = ["Baseline", "Entry", "baseline_path", "load", "store"]

FOLDER = Path(__file__).resolve().parent / "baselines"


class Entry(NamedTuple):
    """The stored numbers of one kernel.

    Args:
        registers, instructions: see ``machine.Machine``.
        choice: its tile in words.
    """

    registers: int
    instructions: int
    choice: str


Baseline = dict[str, dict[str, Entry]]


def baseline_path(version: str, folder: Path = FOLDER) -> Path:
    """The file of a version of Triton; what follows a "+" names a build and not a version."""
    return folder / f"{version.partition('+')[0]}.json"


def load(path: Path) -> Baseline:
    """Return the baseline of a file; empty where there is none."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return {
        target: {key: Entry(*entry) for key, entry in kernels.items()}
        for target, kernels in found.items()
    }


def store(path: Path, records: Iterable[Record], *, whole: bool) -> None:
    """Put records into a file, over what it said of the same kernels.

    Args:
        path: the file; made where there is none.
        records: what compiled.
        whole: these are all the cases of their targets, so that other entries of these targets
            are of kernels that are no more.
    """
    baseline = load(path)
    kept = [record for record in records if not record.error]
    if whole:
        for target in {record.target for record in kept}:
            baseline[target] = {}
    for record in kept:
        entry = Entry(record.registers, record.instructions, record.choice)
        baseline.setdefault(record.target, {})[record.key] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(baseline))


def _text(baseline: Baseline) -> str:
    """JSON with one kernel per line, sorted, so that a change is a line of a diff."""
    blocks = []
    for target, kernels in sorted(baseline.items()):
        lines = [
            f"    {json.dumps(key)}: {json.dumps(list(entry))}"
            for key, entry in sorted(kernels.items())
        ]
        blocks.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
