"""Output of the bench: progress on standard error, tables on standard output."""

from __future__ import annotations

import sys

from tilelab.bench.record import Record
from tilelab.bench.table import WORDS, Table, heading, markdown, plain, tables

__all__ = ["Progress", "show", "show_tables"]


class Progress:
    """One line per step, rewritten in place on a terminal.

    Args:
        steps: how many there will be.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._terminal = sys.stderr.isatty()

    def step(self, name: str) -> None:
        """A step begins."""
        self._done += 1
        text = f"[{self._done}/{self._steps}] {name}"
        sys.stderr.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def show(record: Record, *, as_markdown: bool, brief: bool) -> None:
    """Print the tables of a record, coloured where there is a terminal and rich."""
    show_tables(heading(record), tables(record, brief=brief), as_markdown)


def show_tables(lines: list[str], found: list[Table], as_markdown: bool) -> None:
    """Print some lines and tables below them.

    Args:
        lines: plain text.
        found: the tables.
        as_markdown: as Markdown, instead of what suits the terminal.
    """
    if as_markdown:
        print("\n\n".join(["\n".join(lines), *(markdown(table) for table in found)]))
    elif not sys.stdout.isatty() or not _rich(lines, found):
        print("\n\n".join(["\n".join(lines), *(plain(table) for table in found)]))


def _rich(lines: list[str], found: list[Table]) -> bool:
    """Print with rich; False where it is not installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    if any(len(line) > console.width for table in found for line in plain(table).splitlines()[:3]):
        return False  # cells broken over lines are worse than lines broken by the terminal
    console.print(Text("\n".join(lines)))
    for table in found:
        drawn = RichTable(
            title=table.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name in table.head:
            drawn.add_column(name, justify="left" if name in WORDS else "right")
        for row in table.rows:
            styled = [
                Text(cell, style=_style(name, cell))
                for name, cell in zip(table.head, row, strict=True)
            ]
            drawn.add_row(*styled)
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
