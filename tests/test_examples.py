"""The examples and the gallery of masks run as they are, and check themselves."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "examples"
FILES = sorted(FOLDER.glob("*.py"))


QUICK = ("alibi",)


@pytest.mark.thorough
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
    assert len(FILES) == 10
    assert all(f"[{file.name}]({file.name})" in listed for file in FILES)


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gallery.py"


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_every_mask_of_the_gallery_lets_some_pairs_attend(gallery: dict[str, Any]) -> None:
    pictures = {name: gallery["picture"](mask) for name, mask in gallery["GALLERY"].items()}
    assert len(pictures) == 12
    for name, picture in pictures.items():
        assert 0.02 < picture.float().mean() < 0.7, name
        assert picture.any(1).all(), f"{name}: every row sees a key"
    assert torch.equal(pictures["Causal"], torch.ones(48, 48).tril().bool())
    differ = {tuple(picture.flatten().tolist()) for picture in pictures.values()}
    assert len(differ) == len(pictures)


def test_the_gallery_is_drawn_the_same_every_time(gallery: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gallery["draw"](tmp_path / "gallery.svg")
    gallery["draw_each"](tmp_path / "gallery")
    drawn = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.svg")}
    docs = SCRIPT.parents[1] / "docs"
    stored = [docs / "gallery.svg", *(docs / "gallery").iterdir()]
    assert drawn == {path.relative_to(docs): path.read_bytes() for path in stored}
    page = (docs / "gallery.md").read_text()
    shown = set(re.findall(r"^!\[(.*?)\]\((.*?)\)$", page, re.MULTILINE))
    titles = gallery["GALLERY"].keys() | gallery["SCORES"].keys()
    assert {title for title, _ in shown} == titles
    assert {path for _, path in shown} | {"gallery.svg"} == {str(path) for path in drawn}
