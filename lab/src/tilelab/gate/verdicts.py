"""Describe in words what is wrong with a compiled kernel."""

from __future__ import annotations

from tilelab.gate.baseline import Entry
from tilelab.gate.case import Case
from tilelab.gate.record import Record
from tilelab.gate.targets import Target

__all__ = ["faults", "out_of_date"]

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
