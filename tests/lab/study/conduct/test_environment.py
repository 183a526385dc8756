"""What is said of where a study runs."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from tilelab.common import environment
from tilelab.common.environment import describe, pinnable_cores


def test_it_says_versions_and_no_names() -> None:
    found = describe(3)
    text = json.dumps(found)
    assert found["threads"] == 3
    assert {"torch", "numpy"} <= found["versions"].keys()
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be pinned here")
def test_one_processor_of_each_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5})
    for processor, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert pinnable_cores(tmp_path) == (0, 1, 5)
    assert pinnable_cores(tmp_path / "nothing") == (0, 1, 2, 3, 5)
