"""Draw the masks and scores of docs/gallery.md: scripts/gallery.py [FOLDER].

Each section of the page is a picture in docs/gallery/, and all masks together are docs/gallery.svg.
Rows are queries and columns are keys; dark pairs attend. Needs the lab (matplotlib).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import masks

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIDE = 48


def sections() -> Iterator[tuple[str, str]]:
    """Yield the title and the code of each section of the page, in its order."""
    page = (DOCS / "gallery.md").read_text()
    yield from re.findall(r"^### (.*?)$.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def _read() -> tuple[dict[str, masks.Mask | Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """Run the page from top to bottom, and return its masks and its scores by their titles."""
    names: dict[str, Any] = {}
    found: dict[str, dict[str, Any]] = {"mask": {}, "score": {}}
    for title, code in sections():
        exec(compile(code, f"gallery.md, {title}", "exec"), names)
        (kind,) = found.keys() & names.keys()
        found[kind][title] = names.pop(kind)
    return found["mask"], found["score"]


GALLERY: Mapping[str, masks.Mask | Callable[..., Any]]
SCORES: Mapping[str, Callable[..., Any]]
GALLERY, SCORES = _read()


def picture(mask: masks.Mask | Callable[..., Any]) -> Tensor:
    """Which pairs of a square attend, bool [SIDE, SIDE]."""
    return tilewise.visible_pairs(mask, SIDE, SIDE)[0, 0]


def added(score: Callable[..., Any]) -> Tensor:
    """What a score makes of products that are 0, from 0 to 1 over the picture, [SIDE, SIDE]."""
    place = torch.arange(SIDE)
    with torch.no_grad():
        values = score(torch.zeros(SIDE, SIDE), 0, 0, place[:, None], place[None, :])
    return (values - values.min()) / (values.max() - values.min())


def _fill(axis: Any, values: Tensor) -> None:
    axis.imshow(values.numpy(), cmap="Blues", vmin=-0.15, vmax=1.25, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])


def draw(path: Path) -> None:
    """Write all masks as one SVG: the same bytes every time."""
    from tilelab.common.svg import plotted

    with plotted(path, (9, 7.2), 3, 4) as axes:
        for axis, (name, mask) in zip(axes.flat, GALLERY.items(), strict=True):
            _fill(axis, picture(mask))
            axis.set_title(name, fontsize=10)


def draw_each(folder: Path) -> None:
    """Write an SVG for each mask and score, by its title."""
    from tilelab.common.svg import plotted

    folder.mkdir(exist_ok=True)
    pictures = {name: picture(mask) for name, mask in GALLERY.items()}
    pictures |= {name: added(score) for name, score in SCORES.items()}
    for name, values in pictures.items():
        with plotted(folder / f"{name.lower().replace(' ', '-')}.svg", (2.4, 2.4), 1) as axis:
            _fill(axis, values)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    draw(place / "gallery.svg")
    draw_each(place / "gallery")
