"""The documents tell the truth: the README's example runs, and every link leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert "backend" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    # Also what is named as code and looks like a path of the repository.
    links += re.findall(r"`((?:src|csrc|tests|docs|scripts|\.ci)/[\w./]+\w)`", text)
    links = [link for link in links if "NAME" not in link]  # a placeholder
    missing = [
        link for link in links if not any((base / link).exists() for base in (page.parent, ROOT))
    ]
    assert missing == []


def test_the_measured_table_is_the_stored_one() -> None:
    check = [sys.executable, str(ROOT / "scripts/readme_table.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
