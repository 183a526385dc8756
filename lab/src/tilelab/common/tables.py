"""Tables: plain text, Markdown, or rich on a terminal; the same cells in each."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

# Columns that hold words; the others hold numbers.
_WORDS = frozenset(
    (
        *("case", "dtype", "call", "method", "met", "moved", "side"),
        *("kernel", "tile", "matrix", "async", "verdict"),
    )
)


class Table(NamedTuple):
    """A table in words."""

    title: str  # what it shows
    head: tuple[str, ...]  # the columns' names
    rows: Sequence[tuple[str, ...]]  # cells, as many as columns
    notes: tuple[str, ...] = ()  # lines below it


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], gap: str = "  ") -> list[str]:
    """Return a line for each row, with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plain(table: Table) -> str:
    """Aligned columns."""
    head, *rows = aligned([table.head, *table.rows], left_columns(table.head))
    rule = "-" * max(len(line) for line in (head, *rows))
    return "\n".join([table.title, head, rule, *rows, *table.notes])


def markdown(table: Table) -> str:
    """Return a table of Markdown."""
    left = left_columns(table.head)
    rules = tuple("---" if column in left else "---:" for column in range(len(table.head)))
    lines = ["| " + " | ".join(row) + " |" for row in (table.head, rules, *table.rows)]
    notes = []
    for before, note in pairwise(("", *table.notes)):
        # Notes of a list follow one another; others are paragraphs, where a star would begin one.
        gap = "" if before.startswith("- ") and note.startswith("- ") else "\n"
        notes.append(gap + ("\\" + note if note.startswith("*") else note))
    return "\n".join([f"**{table.title}**", "", *lines, *notes])


def left_columns(head: Sequence[str]) -> set[int]:
    """Return the columns that hold words, which are aligned to the left."""
    return {column for column, name in enumerate(head) if name in _WORDS}


def show_tables(lines: list[str], tables: Sequence[Table], as_markdown: bool) -> None:
    """Print some lines and tables below them: as Markdown, or coloured on a terminal with rich."""
    if as_markdown:
        print("\n\n".join(["\n".join(lines), *(markdown(table) for table in tables)]))
    elif not sys.stdout.isatty() or not _rich(lines, tables):
        print("\n\n".join(["\n".join(lines), *(plain(table) for table in tables)]))


def _rich(lines: list[str], tables: Sequence[Table]) -> bool:
    """Print with rich; False where a table is too wide."""
    # Imported here: the GPU check aligns its columns where there is no rich.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    if any(len(line) > console.width for table in tables for line in plain(table).splitlines()[:3]):
        return False  # cells broken over lines are worse than lines broken by the terminal
    console.print(Text("\n".join(lines)))
    for table in tables:
        drawn = RichTable(
            title=table.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name in table.head:
            drawn.add_column(name, justify="left" if name in _WORDS else "right")
        for row in table.rows:
            cells = zip(table.head, row, strict=True)
            drawn.add_row(*(Text(cell, style=_style(name, cell)) for name, cell in cells))
        console.print(drawn)
        for note in table.notes:
            console.print(Text(note, style="bold red" if note.startswith("WRONG") else ""))
    return True


def _style(column: str, cell: str) -> str:
    if cell == "WRONG":
        return "bold red"
    if column != "met":
        return ""
    return "green" if cell == "yes" else "yellow" if cell.startswith("no") else ""
