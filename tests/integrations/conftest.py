"""transformers with ``attn_implementation="tilewise"``, or a skip where it is absent."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture
def transformers_with_tilewise() -> Iterator[None]:
    """Registered for the time of a test."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install --no-deps -r .ci/transformers.txt")
    from tilewise.integrations.transformers import register, unregister

    register()
    yield
    unregister()
