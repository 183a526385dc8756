"""docs/compatibility.md is what the code says, and the code says something of every argument.

Of flash-attn, of torch's functions and of the drop-ins of tilewise.nn: every parameter has a row,
and no row is of something that is not there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tilelab.compatibility import flash_rows, nn_rows, torch_rows
from tilelab.compatibility.rows import Row
from tilelab.compatibility.table import page, tables
from tilewise import nn
from tilewise.compat import flex_attention, sdpa

(FLASH,) = flash_rows.TABLES
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": sdpa.scaled_dot_product_attention,
    "flex_attention": flex_attention.flex_attention,
    "create_block_mask": flex_attention.create_block_mask,
    "and_masks": flex_attention.and_masks,
    "or_masks": flex_attention.or_masks,
    **{name: getattr(nn, name) for table in nn_rows.TABLES for name in table.functions},
}


def test_the_page_is_up_to_date() -> None:
    found = (ROOT / "docs" / "compatibility.md").read_text()
    assert found == page(), "write it again: python scripts/compatibility.py"


def test_rows_name_functions_of_their_table() -> None:
    for table in tables():
        assert table.intro.strip()
        for row in table.rows:
            assert set(row.functions) <= set(table.functions), row
            assert row.argument
            assert row.state in ("covered", "accepted", "refused")
            assert "|" not in row.argument + row.note, "it would end a cell"


def function(name: str) -> Callable[..., Any]:
    """The function that the table of flash-attn names."""
    module, _, own = f"flash_attn.{name}".rpartition(".")
    module = module.replace("ops.triton", "layers")
    return getattr(import_module(f"tilewise.compat.{module}"), own)


def arguments(row: Row) -> list[str]:
    return [name.partition(" ")[0].partition("=")[0] for name in row.argument.split(", ")]


@pytest.mark.parametrize("name", FLASH.functions)
def test_every_argument_of_flash_attn_has_a_row(name: str) -> None:
    rows = [row for row in FLASH.rows if name in row.functions]
    found = [own for row in rows if row.state != "refused" for own in arguments(row)]
    assert sorted(found) == sorted(inspect.signature(function(name)).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_torch_and_nn_has_a_row(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = set(inspect.signature(function).parameters)
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        parameters |= set(inspect.signature(function.forward).parameters) - {"self"}
    rows = [row for table in (*torch_rows.TABLES, *nn_rows.TABLES) for row in table.rows]
    arguments = [row.argument for row in rows if name in row.functions]
    assert parameters <= set(re.findall(r"\w+", " ".join(arguments)))


def test_every_function_of_torch_and_nn_has_a_row() -> None:
    listed = (*torch_rows.TABLES, *nn_rows.TABLES)
    for table in listed:
        assert {name for row in table.rows for name in row.functions} == set(table.functions)
    named = {name for table in listed for name in table.functions}
    assert set(flex_attention.__all__) <= named
