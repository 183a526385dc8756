"""Fixtures of the numeric suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.targets import TARGETS, Target, forced


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Run the test on each backend and instruction set in turn."""
    with forced(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread unless a test asks for more: the machines are shared, the problems small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
