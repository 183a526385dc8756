"""Writes the report: the page, the raw numbers, and the summary for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from tilewise.lab.demo import words
from tilewise.lab.demo.longtable import Cell
from tilewise.lab.demo.page import render
from tilewise.lab.demo.record import Record
from tilewise.lab.demo.verdict import pace

_MARKS = {True: "ok  ", False: "FAIL", None: "--  "}


def write(record: Record) -> Path:
    """Write ``report.html`` and ``report.json`` into the run's folder; the path of the page."""
    folder = record.settings.out
    page = folder / "report.html"
    (folder / "report.json").write_text(json.dumps(record.as_json(), indent=1), encoding="utf-8")
    page.write_text(render(record), encoding="utf-8")
    return page


def summary(record: Record) -> str:
    """The outcome in a few lines."""
    lines = [""]
    if not record.complete:
        lines.append(f"Ended early: {record.status}")
    lines += [f"{_MARKS[c.passed]} {c.title} ({c.says})" for c in record.checks()]
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    one, other = pace(plain, record.tokens), pace(tilewise, record.tokens)
    if one and other:
        lines.append(
            f"Step time   plain {words.seconds(one.wall_s):>8}   tilewise "
            f"{words.seconds(other.wall_s):>8}   {words.times(one.wall_s / other.wall_s)}"
        )
        lines.append(
            f"Tokens/s    plain {one.tokens_per_s:>8,.0f}   tilewise {other.tokens_per_s:>8,.0f}"
        )
    if plain.peak_bytes and tilewise.peak_bytes:
        lines.append(
            f"Peak memory plain {words.size(plain.peak_bytes):>8}   tilewise "
            f"{words.size(tilewise.peak_bytes):>8}   "
            f"{words.times(plain.peak_bytes / tilewise.peak_bytes)}"
        )
    return "\n".join(lines)


def cell_line(cell: Cell) -> str:
    """One measurement of the long-context table as a line."""
    start = f"{cell.context:>7,} {cell.implementation:<9}"
    if cell.wall_s is None or cell.peak_bytes is None:
        return f"{start} {cell.reason}"
    return f"{start} {words.seconds(cell.wall_s):>8}  {words.size(cell.peak_bytes):>8}"
