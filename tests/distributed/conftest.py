"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes with one thread each."""
    found = Ranks()
    yield found
    found.close()
