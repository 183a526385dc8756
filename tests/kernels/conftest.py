"""Fixtures of the numeric suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.targets import TARGETS, Target, forced


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Run the test on each backend and instruction set in turn."""
    with forced(request.param):
        yield request.param
