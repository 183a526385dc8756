"""The backend that the engine's tests run on."""

from __future__ import annotations

import pytest

from tilewise.engine import registry


@pytest.fixture(scope="session")
def backend() -> str:
    """The compiled one where it is built, and the reference where it is not."""
    return "cpu" if registry.load("cpu").absence() is None else "tiled"
