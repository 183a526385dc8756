"""README, the two pyproject.toml and scripts/matrix.sh claim the versions that the record holds."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks/matrix.json"
Version = tuple[int, ...]
Range = tuple[Version, Version]


def version(text: str) -> Version:
    """Major and minor."""
    return tuple(int(part) for part in text.split(".")[:2])


def pairs() -> dict[tuple[Version, Version], dict[str, Any]]:
    """What the record says of each pair of torch and Python."""
    entries = json.loads(RECORD.read_text())["pairs"]
    return {tuple(version(part) for part in e["asked"].split("/")): e for e in entries}  # type: ignore[misc]


def claimed(name: str) -> Range:
    """The range of versions that README names."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(rf"\b{name} (\d\.\d+) to (\d\.\d+)\b", text)
    assert len(found) == 1
    return version(found[0][0]), version(found[0][1])


def test_the_readme_names_the_versions_of_the_record() -> None:
    torches, pythons = zip(*pairs(), strict=True)
    assert claimed("torch") == (min(torches), max(torches))
    assert claimed("Python") == (min(pythons), max(pythons))


def test_the_newest_torch_that_the_readme_names_passed() -> None:
    passed = [pair for pair, entry in pairs().items() if entry["status"] == "passed"]
    assert claimed("torch")[1] in [torch for torch, _ in passed]


def test_the_readme_says_what_fails() -> None:
    said = re.findall(
        r"([\d,]+ of [\d,]+) tests fail with torch (\d\.\d+)", (ROOT / "README.md").read_text()
    )
    failed = [(torch, e) for (torch, _), e in pairs().items() if e["status"] == "failed"]
    due = [(f"{e['failed']:,} of {e['passed'] + e['failed']:,}", torch) for torch, e in failed]
    assert [(count, version(torch)) for count, torch in said] == due


def test_an_entry_says_what_ran_or_why_not() -> None:
    for entry in pairs().values():
        if entry["status"] == "not run here":
            assert entry["why"], entry
            continue
        torch, python = entry["asked"].split("/")
        assert entry["torch"].split("+")[0] == torch, entry
        assert version(entry["python"]) == version(python), entry
        assert entry["passed"] > 9_000, entry  # the whole of the core's tests
        assert (entry["status"] == "passed") == (entry["failed"] == 0), entry


def test_the_script_runs_the_pairs_of_the_record() -> None:
    found = re.search(r"^default=\((.*)\)$", (ROOT / "scripts/matrix.sh").read_text(), re.M)
    assert found is not None
    recorded = {entry["asked"] for entry in pairs().values()}
    assert set(found[1].split()) <= recorded


@pytest.mark.parametrize("folder", ["", "lab"])
def test_the_packages_ask_for_the_oldest_versions_that_the_readme_names(folder: str) -> None:
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    assert version(torch.removeprefix("torch>=")) == claimed("torch")[0]
    oldest, newest = claimed("Python")
    assert version(project["requires-python"].removeprefix(">=")) == oldest
    start = "Programming Language :: Python :: 3."
    named = [each for each in project["classifiers"] if each.startswith(start)]
    minors = range(oldest[1], newest[1] + 1)
    assert named == [f"{start}{minor}" for minor in minors]
