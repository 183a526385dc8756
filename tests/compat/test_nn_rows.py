"""The rows of tilewise.nn's drop-ins: every parameter has one, and none is of something else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from tilelab.compatibility.nn_rows import TABLES
from tilewise import nn

(TABLE,) = TABLES


def words(name: str) -> set[str]:
    """What the rows of a function name."""
    rows = [row for row in TABLE.rows if name in row.functions]
    return {word for row in rows for word in re.findall(r"\w+", row.argument)}


@pytest.mark.parametrize("name", TABLE.functions)
def test_every_parameter_has_a_row(name: str) -> None:
    function: Callable[..., Any] = getattr(nn, name)
    parameters = set(inspect.signature(function).parameters)
    if isinstance(function, type):
        parameters |= set(inspect.signature(function.forward).parameters) - {"self"}  # type: ignore[attr-defined]
    assert parameters <= words(name)


def test_rows_are_of_what_is_there() -> None:
    assert {name for row in TABLE.rows for name in row.functions} == set(TABLE.functions)
