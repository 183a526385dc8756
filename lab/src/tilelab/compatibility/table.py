"""``docs/compatibility.md`` as text, from the rows of the modules of this room."""

from __future__ import annotations

from importlib import import_module

from tilelab.compatibility.rows import Row, Table

__all__ = ["MODULES", "page", "tables"]

# Modules with TABLES, in the order of the page.
MODULES = (
    "tilelab.compatibility.flash_rows",
    "tilelab.compatibility.torch_rows",
    "tilelab.compatibility.nn_rows",
    "tilelab.compatibility.transformers_rows",
    "tilelab.compatibility.timm_rows",
)

_LEAD = """# Compatibility

This page says, for each argument of other libraries' attention functions, whether you can use it
with tilewise.

- **covered**: it does what it does there. The note says what is different.
- **accepted**: you may pass it, and it changes nothing. The note says why.
- **refused**: it raises an error that names the argument.

`scripts/compatibility.py` writes this page from the code (`TABLES` of the modules in
`lab/src/tilelab/compatibility/`), and a test compares them.
"""


def tables() -> tuple[Table, ...]:
    """Return the tables of all modules."""
    found: list[Table] = []
    for module in MODULES:
        found += import_module(module).TABLES
    return tuple(found)


def page() -> str:
    """Return the whole page."""
    return "\n".join([_LEAD, *[_section(each) for each in tables()]])


def _section(table: Table) -> str:
    lines = ["| function | argument | | note |", "|---|---|---|---|"]
    lines += [_line(row, table) for row in table.rows]
    return "\n".join([f"## {table.title}", "", table.intro.strip(), "", *lines, ""])


def _line(row: Row, table: Table) -> str:
    listed = ", ".join([f"`{name}`" for name in row.functions])
    functions = {its: words for words, its in table.groups}.get(row.functions, listed)
    return f"| {functions} | `{row.argument}` | {row.state} | {row.note} |"
