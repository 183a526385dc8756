"""The table: one line per kernel, plain text."""

from __future__ import annotations

from collections.abc import Sequence

from tilelab.gate.record import Record
from tilelab.gate.targets import Target

__all__ = ["table"]

_HEAD = ("case", "kernel", "tile", "regs", "spill", "scratch", "shared KB", "matrix", "async")
_TAIL = ("instr", "s", "verdict")
_WORDS = ("case", "kernel", "tile", "matrix", "async", "verdict")


def table(target: Target, records: Sequence[tuple[Record, list[str]]]) -> str:
    """Return the kernels of one chip.

    Args:
        target: the chip.
        records: each with its faults.
    """
    head = (*_HEAD, *_TAIL)
    rows = [head, *(_cells(record, target, faults) for record, faults in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([target.name, *(f"  {line}" for line in lines)])


def _cells(record: Record, target: Target, faults: list[str]) -> tuple[str, ...]:
    verdict = "FAIL: " + "; ".join(faults) if faults else "ok"
    if record.error:
        return (record.case, record.kernel, *[""] * (len(_HEAD) + len(_TAIL) - 3), verdict)
    tile = " ".join(f"{name}={value}" for name, value in record.tile.items())
    return (
        record.case,
        record.kernel,
        f"{tile} w{record.warps} s{record.stages}".strip(),
        str(record.registers),
        str(record.spills),
        str(record.scratch_bytes),
        f"{record.shared_bytes / 1024:.1f}/{target.family.shared_bytes // 1024}",
        _counts(record.matrix),
        _counts(record.copies),
        str(record.instructions),
        f"{record.seconds:.1f}",
        verdict,
    )


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{count} {kind}" for kind, count in counts.items()) or "-"
