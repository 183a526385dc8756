"""Draw masks from their functions: scripts/gallery.py [docs/gallery.svg].

Rows are queries and columns are keys; dark pairs attend. Needs the extra ``lab`` (matplotlib).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import masks

SIDE = 48
DOCUMENTS = torch.tensor([0] * 14 + [1] * 20 + [2] * 14)
GLOBAL = 3


def _neighbours(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Pixels of an image of 6 x 8, two rows and columns around."""
    return (abs(m // 8 - n // 8) <= 1) & (abs(m % 8 - n % 8) <= 2)


def _butterfly(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Blocks of four whose numbers differ in at most one bit."""
    differ = (m // 4) ^ (n // 4)
    return (differ & (differ - 1)) == 0


def _random(b: Any, h: Any, m: Any, n: Any) -> Any:
    """A seeded eighth of the blocks, and the diagonal."""
    mixed = ((m // 4) * 73 + (n // 4) * 151 + 7) * 37 % 97
    return (mixed < 12) | (abs(m // 4 - n // 4) <= 1)


GALLERY: Mapping[str, masks.Mask | Callable[..., Any]] = {
    "causal": masks.causal(),
    "window(8, 8)": masks.window(8, 8),
    "prefix(12)": masks.prefix(12),
    "documents, causal": masks.causal() & masks.document(DOCUMENTS),
    "dilated": lambda b, h, m, n: (n <= m) & ((m - n) % 4 == 0),
    "strided": lambda b, h, m, n: (n <= m) & ((m - n < 8) | (n % 8 == 7)),
    "local + global": lambda b, h, m, n: (abs(m - n) <= 4) | (m < GLOBAL) | (n < GLOBAL),
    "neighbourhood, 2-D": _neighbours,
    "butterfly": _butterfly,
    "random blocks": _random,
    "checkerboard": lambda b, h, m, n: (m // 4 + n // 4) % 2 == 0,
    "chunks": lambda b, h, m, n: (n <= m) & (m // 12 == n // 12),
}


def picture(mask: masks.Mask | Callable[..., Any]) -> Tensor:
    """Which pairs of a square attend, bool [SIDE, SIDE]."""
    return tilewise.visible_pairs(mask, SIDE, SIDE)[0, 0]


def draw(path: Path) -> None:
    """Write the gallery as SVG: the same bytes every time."""
    from tilelab.common.svg import plotted

    with plotted(path, (9, 7.2), 3, 4) as axes:
        for axis, (name, mask) in zip(axes.flat, GALLERY.items(), strict=True):
            axis.imshow(
                picture(mask).numpy(), cmap="Blues", vmin=-0.15, vmax=1.25, interpolation="nearest"
            )
            axis.set_title(name, fontsize=10)
            axis.set_xticks([])
            axis.set_yticks([])


if __name__ == "__main__":
    root = Path(tilewise.__file__).resolve().parents[2]
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "gallery.svg")
