"""The blocks of Python on the pages, and proof that a test executes the blocks that it says.

A test that runs a block with more around it takes its text from ``block_of``, and has the decorator
``executes``. The text has a last line that leaves a mark in a folder, in whichever process it runs.
Without the mark the test fails. ``tests/test_pages.py`` reads the decorators: it runs every block
that no test has taken on.
"""

from __future__ import annotations

import ast
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / f"{folder}/README.md" for folder in ("benchmarks", "examples", "lab")),
    *(page for folder in ("docs", "notes") for page in sorted((ROOT / folder).glob("*.md"))),
]
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}

# What blocks take from their reader: code that runs before them.
GIVEN = {
    "CONTRIBUTING.md": "from tilewise.variants.values import Mask, mask_of",
    "docs/serving.md": "from tilewise.serving import generate; prompts = [[5, 6, 7], [8, 9]]",
    "docs/studies.md": "from tilelab.study.ask.config import Search, Sweep",
}


class Block(NamedTuple):
    """The code of a page's block, and which of the page's blocks of Python it is."""

    page: str
    number: int
    code: str


BLOCKS = [
    Block(page, number, code)
    for page, text in TEXTS.items()
    for number, code in enumerate(re.findall(r"^```py(?:thon)?\n(.*?)^```", text, re.M | re.S))
]
PLACES = {block[:2] for block in BLOCKS}


def run(blocks: list[Block], names: dict[str, Any]) -> dict[str, Any]:
    """Run blocks of one page in turn, as its reader would, and return the names that they leave."""
    exec(GIVEN.get(blocks[0].page, ""), names)
    for page, number, code in blocks:
        exec(compile(code, f"{page}, block {number}", "exec"), names)
    return names


def block_of(page: str, number: int) -> Block:
    """Return a block, with a line behind its code that says that it has run."""
    (block,) = (each for each in BLOCKS if each[:2] == (page, number))
    note = f"__import__('pathlib').Path({str(_mark(page, number))!r}).touch()"
    return block._replace(code=f"{block.code}{note}\n")


def executes(page: str, *numbers: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that executes blocks of a page: it fails where one has not run to its end."""
    absent = [number for number in numbers if (page, number) not in PLACES]
    assert numbers, f"{page}: name the blocks"
    assert not absent, f"{page} has no block {absent}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def checked(*arguments: object, **keywords: object) -> None:
            for number in numbers:
                _mark(page, number).unlink(missing_ok=True)
            test(*arguments, **keywords)
            left = [number for number in numbers if not _mark(page, number).exists()]
            assert not left, f"{test.__name__} does not execute block {left} of {page}"

        return checked

    return decorate


def executed_by_tests() -> Iterator[tuple[str, int, str]]:
    """Yield page, number and file for each block that the decorator of a test names."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        for node in ast.parse(text).body if "\n@executes(" in text else ():
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "executes":
                    page, *numbers = map(ast.literal_eval, mark.args)
                    for number in numbers:
                        yield page, number, str(file.relative_to(ROOT))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of this process's marks: other processes get the text from a test."""
    return tempfile.TemporaryDirectory()


def _mark(page: str, number: int) -> Path:
    return Path(_folder().name) / f"{page.replace('/', '-')}-{number}"
