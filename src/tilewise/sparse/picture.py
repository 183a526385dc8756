"""A table of tiles drawn in characters."""

import torch
from torch import Tensor

# Of a cell's tiles: none visible, few, half or more of the pairs' tiles, all of them full.
_EMPTY, _THIN, _THICK, _FULL = "·", "░", "▒", "█"


def picture(covers: Tensor, width: int) -> list[str]:
    """The lines of a picture of one table [rows, columns], at most ``width`` characters wide.

    A character stands for one tile, or for a square of them where there are more: ``·`` all empty,
    ``█`` all full, ``▒`` at least half of them not empty, ``░`` fewer.
    """
    rows, columns = covers.shape
    if rows == 0 or columns == 0:
        return []
    across = -(-columns // width)
    # Characters are about twice as high as wide.
    along = max(1, -(-rows // max(1, width // 2)))
    lines = []
    for top in range(0, rows, along):
        band = covers[top : top + along]
        cells = [band[:, left : left + across] for left in range(0, columns, across)]
        lines.append("".join([_cell(cell) for cell in cells]))
    return lines


def _cell(tiles: Tensor) -> str:
    seen = int(torch.count_nonzero(tiles))
    if seen == 0:
        return _EMPTY
    if bool((tiles == 2).all()):
        return _FULL
    return _THICK if 2 * seen >= tiles.numel() else _THIN
