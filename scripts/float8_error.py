"""Print the error of attention in float8, with incoherent processing and without: docs/gpu.md.

The output of ``tilewise.attention`` with operands of ``tilewise.float8.quantised`` is compared with
float64 on the numbers before rounding: the root mean square of the difference. Entries are those of
FlashAttention-3 (section 4.3): N(0, 1), or N(0, 1) + N(0, 100) Bernoulli(0.001). It runs anywhere,
by the tiled reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise import float8

WIDTHS = (64, 128, 256)
_HEADS, _ROWS, _DRAWS = 4, 512, 4
_RARE, _WIDE = 0.001, 10.0  # of outliers: how often, and their standard deviation


class Errors(NamedTuple):
    """Of one width and kind of entries: errors, relative to the root mean square of the output."""

    entries: str
    width: int
    plain: float
    incoherent: float


def drawn(width: int, outliers: bool, generator: torch.Generator) -> Tensor:
    """Return entries [1, heads, rows, width] in float32."""
    shape = (1, _HEADS, _ROWS, width)
    x = torch.randn(shape, generator=generator)
    if outliers:
        wide = _WIDE * torch.randn(shape, generator=generator)
        x += wide * (torch.rand(shape, generator=generator) < _RARE)
    return x


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention in float64."""
    q, k, v = q.double(), k.double(), v.double()
    scores: Tensor = q @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def measured(widths: tuple[int, ...] = WIDTHS) -> Iterator[Errors]:
    """Yield a row for each kind of entries and width."""
    for entries in ("normal", "with outliers"):
        for width in widths:
            generator = torch.Generator().manual_seed(width)
            errors, sizes = torch.zeros(2, dtype=torch.float64), 0.0
            for draw in range(_DRAWS):
                q, k, v = (drawn(width, entries != "normal", generator) for _ in range(3))
                due = exact(q, k, v)
                sizes += float(due.square().mean())
                for way in (0, 1):
                    given = float8.quantised(q, k, v, incoherent_qk=way == 1, seed=draw)
                    out = tilewise.attention(**given._asdict(), backend="tiled")
                    errors[way] += (out.double() - due).square().mean()
            plain, spread = (errors / sizes).sqrt().tolist()
            yield Errors(entries, width, plain, spread)


def table() -> list[str]:
    """Return the lines of the table of docs/gpu.md."""
    lines = [
        "| entries of q, k and v | D | float8 | incoherent | times smaller |",
        "|---|---|---|---|---|",
    ]
    for entries, width, plain, spread in measured():
        ratio = plain / spread
        lines.append(f"| {entries} | {width} | {plain:.1%} | {spread:.1%} | {ratio:.2f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
