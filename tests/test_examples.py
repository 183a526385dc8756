"""The examples run as they are, each in a process of its own; they check themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


QUICK = ("alibi",)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.slow, id=file.stem)
        for file in FILES
    ],
)
def test_an_example_runs(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it says what it found"


def test_every_example_is_in_the_table() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert len(FILES) == 6
    assert all(f"[{file.name}]({file.name})" in listed for file in FILES)
