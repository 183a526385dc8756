"""Draw the masks and scores of docs/gallery.md: scripts/gallery.py [FOLDER].

Each section of the page is a picture in docs/gallery/, and all masks together are docs/gallery.svg.
Rows are queries and columns are keys; dark pairs attend. ``docs/schedules.svg`` shows which process
computes which part of a long sequence, and in which step. Needs the lab (matplotlib).
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
from tilewise.distributed import Layout, balanced_layout
from tilewise.distributed.layout import layout_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIDE = 48
COLUMNS = 4  # of docs/gallery.svg


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

    rows = -(-len(GALLERY) // COLUMNS)
    with plotted(path, (9, 12 * rows / 5), rows, COLUMNS) as axes:
        for axis in axes.flat[len(GALLERY) :]:
            axis.set_axis_off()
        for axis, (name, mask) in zip(axes.flat, GALLERY.items(), strict=False):
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


def shared(layout: Layout, mask: masks.Mask) -> tuple[Tensor, dict[tuple[int, int], int]]:
    """Return whose each pair is (-1: nobody's), and the step of each pair of chunks.

    In step s a position has the keys of the one s places before it.
    """
    seen = tilewise.visible_pairs(mask, layout.length, layout.length)[0, 0]
    owners = torch.full(seen.shape, -1)
    steps: dict[tuple[int, int], int] = {}
    for row, position in enumerate(layout.owners):
        for column, holder in enumerate(layout.owners):
            rows, columns = layout.rows_of(row), layout.rows_of(column)
            part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
            if bool(seen[part].any()):
                owners[part] = torch.where(seen[part], position, -1)
                steps[row, column] = (position - holder) % layout.positions
    return owners, steps


def draw_schedules(path: Path, positions: int = 4, length: int = 96) -> None:
    """Write who computes what, and when, for three schedules and masks."""
    from matplotlib.colors import ListedColormap

    from tilelab.common.svg import plotted

    causal, window = masks.causal(), masks.window(length // 8, 0)
    ids = torch.tensor([0] * 18 + [1] * 54 + [2] * 24)
    documents = causal & masks.document(ids[None])
    balanced = balanced_layout(length, positions, mask=documents, chunks=2)
    pictures = {
        "ring, causal": (layout_of("ring", length, positions), causal),
        "zigzag, causal": (layout_of("zigzag", length, positions), causal),
        "ring, window": (layout_of("ring", length, positions), window),
        "balanced, documents": (balanced, documents),
    }
    colours = ListedColormap(["#ffffff", "#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc"])
    with plotted(path, (10, 2.8), 1, 4) as axes:
        for axis, (title, (layout, mask)) in zip(axes.flat, pictures.items(), strict=True):
            owners, steps = shared(layout, mask)
            axis.imshow(owners.numpy(), cmap=colours, vmin=-1, vmax=3, interpolation="nearest")
            for (row, column), step in steps.items():
                rows, columns = layout.rows_of(row), layout.rows_of(column)
                part = owners[rows.start : rows.stop, columns.start : columns.stop]
                y, x = (part >= 0).nonzero().float().mean(0).tolist()
                middle = columns.start + x, rows.start + y
                axis.text(*middle, str(step), ha="center", va="center", fontsize=7)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(title, fontsize=10)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    draw(place / "gallery.svg")
    draw_each(place / "gallery")
    draw_schedules(place / "schedules.svg")
