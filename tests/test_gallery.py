"""The gallery of masks is drawn from functions that the library runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert torch.equal(pictures["causal"], torch.ones(48, 48).tril().bool())
    differ = {tuple(picture.flatten().tolist()) for picture in pictures.values()}
    assert len(differ) == len(pictures)


def test_the_gallery_is_drawn_the_same_every_time(gallery: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        gallery["draw"](tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert b"<svg" in (tmp_path / "one.svg").read_bytes()
