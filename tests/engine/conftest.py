"""The backend that the engine's tests run on."""

from __future__ import annotations

import pytest

from tilewise.engine import dispatch


@pytest.fixture(scope="session")
def backend() -> str:
    """The compiled one where it is built, and the reference where it is not."""
    return "cpu" if dispatch.load("cpu").absence() is None else "tiled"
