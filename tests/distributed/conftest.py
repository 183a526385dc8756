"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


# Of this folder, not of the session: a thread of gloo may spin until its process ends.
@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Four processes with one thread each."""
    found = Ranks()
    yield found
    found.close()
