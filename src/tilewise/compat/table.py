"""``docs/compatibility.md`` as text, from the rows of the modules of this room."""

from __future__ import annotations

from importlib import import_module

from tilewise.compat.rows import Row, Table

__all__ = ["MODULES", "page", "tables"]

# Modules with TABLES, in the order of the page.
MODULES = (
    "tilewise.compat.flash_attn.rows",
    "tilewise.compat.torch_rows",
    "tilewise.compat.nn_rows",
    "tilewise.compat.transformers_rows",
    "tilewise.compat.timm_rows",
)

_LEAD = """# Compatibility

What calls of other libraries become here. `scripts/compatibility.py` writes this page from the code
(`TABLES` of the modules in `src/tilewise/compat/`), and a test compares them.

- **covered**: does what it does there; the note says what is different.
- **accepted**: taken, and changes nothing; the note says why.
- **refused**: raises an error that names the argument.
"""


def tables() -> tuple[Table, ...]:
    """The tables of all modules."""
    found: list[Table] = []
    for module in MODULES:
        found += import_module(module).TABLES
    return tuple(found)


def page() -> str:
    """The whole page."""
    return "\n".join([_LEAD, *[_section(each) for each in tables()]])


def _section(table: Table) -> str:
    lines = ["| function | argument | | note |", "|---|---|---|---|"]
    lines += [_line(row, table) for row in table.rows]
    return "\n".join([f"## {table.title}", "", table.intro.strip(), "", *lines, ""])


def _line(row: Row, table: Table) -> str:
    listed = ", ".join([f"`{name}`" for name in row.functions])
    functions = {its: words for words, its in table.groups}.get(row.functions, listed)
    return f"| {functions} | `{row.argument}` | {row.state} | {row.note} |"
