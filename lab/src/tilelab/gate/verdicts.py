"""What is wrong with a compiled kernel, in words; registers and instructions as they were.

``baselines/3.7.1.json`` holds ``{target: {"case / kernel": [registers, instructions, choice]}}``.
Compilers differ from version to version, and a version without a file has nothing to be held to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tilelab.gate.record import Case, Record, Target

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


GROWTH = 1.05  # of registers or instructions over the baseline; more is a fault


def faults(record: Record, case: Case, target: Target, before: Entry | None) -> list[str]:
    """Reasons to fail a kernel; empty for a good one.

    Args:
        record: what came out.
        case: what it was made from.
        target: the chip.
        before: its entry in the baseline; None where it has none.
    """
    if record.error:
        return [record.error]
    found = []
    if record.spills or record.scratch_bytes:
        found.append(f"{record.spills} spills, {record.scratch_bytes} bytes of scratch")
    shared_bytes, most = record.shared_bytes, target.family.shared_bytes
    if shared_bytes > most:
        found.append(f"{shared_bytes} bytes of shared memory, the chip has {most}")
    if case.sixteen_bit and record.kernel.partition(" ")[0] not in case.without_products:
        found += _matrix_faults(record, target)
    if case.described and target.family.descriptors is not None and "tma" not in record.copies:
        found.append("no copy by a tensor descriptor")
    if before is not None:
        found += _growth("registers", before.registers, record.registers, before, record)
        found += _growth("instructions", before.instructions, record.instructions, before, record)
    return found


def out_of_date(record: Record, target: Target) -> str:
    """Return how a probe's record contradicts the target's reason to be left out; empty if not."""
    if record.error:
        return f"the probe failed: {record.error}"
    if record.matrix:
        return f"Triton does make matrix instructions for {target.name}: targets.py is out of date"
    return ""


def _matrix_faults(record: Record, target: Target) -> list[str]:
    if not record.matrix:
        return ["no matrix instruction"]
    # Hopper's and Blackwell's own instructions take 64 rows; smaller products keep to the old ones.
    # Those of the forward pass have a row per query, those of the backward one per query or key.
    rows = record.tile.get("BM", max(record.tile.values(), default=64))
    if target.family.unit not in record.matrix and rows >= 64:
        return [f"{'/'.join(record.matrix)} instead of {target.family.unit}"]
    return []


def _growth(what: str, before: int, now: int, entry: Entry, record: Record) -> list[str]:
    if now <= before * GROWTH:
        return []
    tile = "" if entry.choice == record.choice else f"; was {entry.choice}, is {record.choice}"
    return [f"{what} {before} -> {now} (+{now / before - 1:.1%}{tile})"]
