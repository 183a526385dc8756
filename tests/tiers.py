"""Which tests ``./run test`` leaves to ``./run test --all``: those with the marker ``thorough``.

A test function with many cases is thorough in all but a sample of them. In the sample each value of
each parameter occurs at least once: each dtype, each named case. Fields of a parameter, such as the
dtype of a ``Case``, are parameters of their own. Instruction sets are the exception: each runs its
share of the suite, not of each function. Which values meet is drawn from the names of the tests, so
the sample is the same in every process.

A test that takes long is thorough too: ``long_tests.txt`` names those, from a measured run
(scripts/long_tests.py). The sample is drawn from the others. A test that adds little for its time
may also have the marker in its file.

Continuous integration takes turns: ``./run test --part 2/3`` runs the tests for every day and one
third of the thorough ones.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
LONG = TESTS / "long_tests.txt"


def mark_thorough(items: list[pytest.Item]) -> None:
    """Mark long tests, and the cases that are not in the sample of their test function."""
    long = set(LONG.read_text().splitlines())
    for item in items:
        if name_of(item) in long:
            item.add_marker(pytest.mark.thorough)
    for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        named = {case.nodeid: case for case in cases}
        parameters = {
            name: case.callspec.params
            for name, case in named.items()
            if hasattr(case, "callspec")
            and not any(case.get_closest_marker(mark) for mark in ("slow", "thorough"))
        }
        for name in parameters.keys() - sample(parameters):
            named[name].add_marker(pytest.mark.thorough)


def leave_out_other_parts(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Deselect the thorough tests of other parts: of "2/3" stay the second third and all others.

    Which part a test is in follows from its name. So each part has its share of every function.
    """
    number, _, parts = part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"TILEWISE_PART: got {part!r}; required: such as 2/3")
    others = {
        item
        for item in items
        if item.get_closest_marker("thorough")
        and zlib.crc32(name_of(item).encode()) % int(parts) != int(number) - 1
    }
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def name_of(item: pytest.Item) -> str:
    """Return the name of a test in the list of long ones: kernels/test_exact.py::test_case[one]."""
    within = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else item.path
    return f"{within.as_posix()}::{item.name}"


def sample(cases: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return names of cases that together have each value of each parameter.

    Args:
        cases: the parameters of each case, by its name.
    """
    seen: set[tuple[str, str]] = set()
    chosen = set()
    for name in sorted(cases, key=lambda each: zlib.crc32(each.encode())):
        values = {pair for each in cases[name].items() for pair in _values(*each)}
        if values - seen:
            seen |= values
            chosen.add(name)
    return chosen


def _values(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a parameter as pairs of names and values, a pair for each field if it has fields."""
    fields = {"": "any" if name == "isa" else value}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return ((f"{name}.{field}", repr(each)) for field, each in fields.items())
