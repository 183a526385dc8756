"""The rows of ``docs/compatibility.md``, which each module of this folder writes for itself.

A module says ``TABLES = (Table(...), ...)``; ``table.MODULES`` names it, and the page has it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Row", "Table"]


class Row(NamedTuple):
    """One line: what becomes of an argument.

    Args:
        functions: the functions that have it.
        argument: its name, with the values in question if not all of them: "dropout_p > 0".
        state: "covered" (does what it does there), "accepted" (taken, and changes nothing) or
            "refused" (raises, naming the argument).
        note: what is different, or why; "" for nothing to say.
    """

    functions: tuple[str, ...]
    argument: str
    state: Literal["covered", "accepted", "refused"]
    note: str = ""


class Table(NamedTuple):
    """The coverage of one module.

    Args:
        title: of the section.
        intro: Markdown in front of the table.
        functions: all of the module's, in order.
        rows: in the order of the page.
        groups: (words, functions): how the page names a row's functions where they are just these.
    """

    title: str
    intro: str
    functions: tuple[str, ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
