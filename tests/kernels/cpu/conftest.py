"""Fixtures of compiled expressions."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests: what is compiled is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That cache as the one in use; nothing is compiled unless a test asks for it."""
    monkeypatch.setenv("TILEWISE_CACHE", str(folder))
    monkeypatch.delenv("TILEWISE_COMPILE", raising=False)
    return folder
