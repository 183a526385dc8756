"""A plugin of pytest: writes each test's outcome to ``TILEWISE_OUTCOMES`` and skips what has one.

``cross_test.sh --all`` takes hours, so it must lose nothing where it is stopped. A line is an
outcome, a tab and the test's name; ``began`` is written before a test runs. A test that began twice
and never ended took its process down: it is left out from then on.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

OUTCOMES = Path(os.environ["TILEWISE_OUTCOMES"])
TRIES = 2


def write(outcome: str, name: str) -> None:
    """Append a line, on the disk before the next test runs."""
    with OUTCOMES.open("a", encoding="utf-8") as file:
        file.write(f"{outcome}\t{name}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that have an outcome."""
    lines = OUTCOMES.read_text(encoding="utf-8").splitlines() if OUTCOMES.exists() else []
    pairs = [tuple(line.split("\t", 1)) for line in lines]
    begun = Counter(name for outcome, name in pairs if outcome == "began")
    ended = {name for outcome, name in pairs if outcome != "began"}
    done = [x for x in items if x.nodeid in ended or begun[x.nodeid] >= TRIES]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in set(done)]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    write("began", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome: that of the call, or of a set-up or tear-down that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        write("xfailed" if hasattr(report, "wasxfail") else report.outcome, report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write the outcome of a file that cannot be collected, or skips as a whole."""
    if report.outcome != "passed":
        write(report.outcome, report.nodeid)
