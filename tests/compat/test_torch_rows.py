"""The rows of torch's functions: every parameter has one, and none is of something that is not."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from tilelab.compatibility.torch_rows import TABLES
from tilewise.compat import flex_attention, sdpa

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": sdpa.scaled_dot_product_attention,
    "flex_attention": flex_attention.flex_attention,
    "create_block_mask": flex_attention.create_block_mask,
    "and_masks": flex_attention.and_masks,
    "or_masks": flex_attention.or_masks,
}


def test_every_parameter_has_a_row() -> None:
    for name, function in FUNCTIONS.items():
        words = {
            word
            for table in TABLES
            for functions, argument, _, _ in table.rows
            if name in functions
            for word in re.findall(r"\w+", argument)
        }
        assert set(inspect.signature(function).parameters) <= words, name


def test_rows_are_of_what_is_there() -> None:
    for _, intro, functions, rows, _ in TABLES:
        assert intro.strip()
        assert {name for row in rows for name in row[0]} == set(functions)
        for _, argument, state, note in rows:
            assert argument
            assert state in ("covered", "accepted", "refused")
            assert "|" not in argument + note
    for name in flex_attention.__all__:
        assert any(name in table.functions for table in TABLES), name
