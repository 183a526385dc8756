"""Note which tests take long, for ``./run test`` to leave out: scripts/long_tests.py JUNIT...

    ./run test --all -q -n 2 --dist loadfile --junitxml=build/times.xml
    .venv/bin/python scripts/long_tests.py build/times.xml

A test that took ``--seconds`` or more is written to tests/long_tests.txt; one that took less is
taken out of it. Tests that did not run stay as they were. A line that begins with ``!`` is written
by hand: this test runs every day, however long it takes.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).resolve().parent.parent / "tests" / "long_tests.txt"


def updated(lines: Iterable[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Return the lines of the list after a run in which tests took so many seconds."""
    before = set(lines)
    kept = {line for line in before if seconds.get(line, limit) >= limit}
    long = {name for name, each in seconds.items() if each >= limit and f"!{name}" not in before}
    return sorted(kept | long)


def read(path: Path) -> dict[str, float]:
    """Return the seconds of each test in a file that pytest's ``--junitxml`` wrote.

    Tests in classes are left out: tests/tiers.py names a test by its file and its own name.
    """
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        if not module.rpartition("/")[2].startswith("Test"):
            found[f"{module}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def main() -> None:
    """Read the files, write the list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=0.7)
    options = parser.parse_args()
    seconds = {name: each for path in options.junit for name, each in read(path).items()}
    before = LIST.read_text().splitlines() if LIST.exists() else []
    after = updated(before, seconds, options.seconds)
    LIST.write_text("".join(f"{line}\n" for line in after))
    print(f"{LIST}: {len(after)} tests, before {len(before)}")


if __name__ == "__main__":
    main()
