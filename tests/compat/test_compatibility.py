"""docs/compatibility.md is what the code says, and the code says something of every argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from tests.conftest import ROOT
from tilelab.compatibility.flash_rows import TABLES
from tilelab.compatibility.rows import Row
from tilelab.compatibility.table import page, tables

(TABLE,) = TABLES


def test_the_page_is_up_to_date() -> None:
    found = (ROOT / "docs" / "compatibility.md").read_text()
    assert found == page(), "write it again: python scripts/compatibility.py"


def test_rows_name_functions_of_their_table() -> None:
    for table in tables():
        for row in table.rows:
            assert set(row.functions) <= set(table.functions), row
            assert "|" not in row.argument + row.note, "it would end a cell"


def function(name: str) -> Callable[..., Any]:
    """The function that the table of flash-attn names."""
    module, _, own = f"flash_attn.{name}".rpartition(".")
    module = module.replace("ops.triton", "layers")
    return getattr(import_module(f"tilewise.compat.{module}"), own)


def arguments(row: Row) -> list[str]:
    return [name.partition(" ")[0].partition("=")[0] for name in row.argument.split(", ")]


@pytest.mark.parametrize("name", TABLE.functions)
def test_every_argument_of_flash_attn_has_a_row(name: str) -> None:
    rows = [row for row in TABLE.rows if name in row.functions]
    found = [own for row in rows if row.state != "refused" for own in arguments(row)]
    assert sorted(found) == sorted(inspect.signature(function(name)).parameters)
