"""The rooms of the C++ core: a file includes only its own room and those before it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("base", "products", "expressions", "variants", "passes", "decode", "isa", "bind", "tests")
GENERATED = {"expr_code.h"}


def upward(files: dict[str, str]) -> list[str]:
    """The includes that lead to a later room, or nowhere.

    Args:
        files: text by path below ``csrc``.
    """
    found = []
    for name, text in files.items():
        here = name.split("/")[0]
        for target in re.findall(r'#include "([^"]+)"', text):
            path = f"tests/{target}" if here == "tests" and "/" not in target else target
            if target in GENERATED:
                continue
            if path not in files or ROOMS.index(path.split("/")[0]) > ROOMS.index(here):
                found.append(f"{name} includes {target}")
    return found


def _core() -> dict[str, str]:
    folder = ROOT / "csrc"
    files = [path for path in folder.rglob("*") if path.suffix in (".h", ".cc")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_rooms_include_only_earlier_rooms() -> None:
    core = _core()
    assert len(core) > 60
    assert {name.split("/")[0] for name in core} == set(ROOMS)
    assert upward(core) == []


def test_an_include_of_a_later_room_is_found() -> None:
    files = {
        "base/a.h": '#include "decode/b.h"',
        "decode/b.h": '#include "base/a.h"\n#include "expr_code.h"',
        "passes/c.h": '#include "base/gone.h"',
    }
    expected = ["base/a.h includes decode/b.h", "passes/c.h includes base/gone.h"]
    assert upward(files) == expected


def test_the_contributing_page_lists_the_rooms_in_order() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == list(ROOMS)
