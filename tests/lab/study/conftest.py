"""Where studies are conducted whose children only write records: see ``conduct/conducting.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tilelab.study import report


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder; caches go there, and children find the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second: where a test does not look at the page, there is none."""
    monkeypatch.setattr(report, "write", lambda it: (it.folder / "r.html", it.folder / "r.md"))
