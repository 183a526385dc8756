"""Visits of the tiles of rows of a part, where the outer loop is over tiles of keys."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.inspect.calls import Part
from tilewise.reference.programs import Cover, cover
from tilewise.reference.tiles import key_spans, query_tiles

__all__ = ["Visit", "Visits"]


class Visit(NamedTuple):
    """Whether a visit of a tile of rows is its first, and its last."""

    first: bool
    last: bool


class Visits:
    """Count the visits of each tile of rows of a part, out of its total."""

    def __init__(self, part: Part) -> None:
        problem, tensors = part.problem, part.operands.mask_tensors
        self.left = {
            rows: sum(
                cover(problem.mask, tensors, part.block(rows, columns)) is not Cover.EMPTY
                for columns in key_spans(part)
            )
            for rows in query_tiles(part)
        }
        self.untouched = [rows for rows, times in self.left.items() if times == 0]
        self.begun: set[range] = set()

    def count(self, rows: range) -> Visit:
        """Enter one more visit."""
        first = rows not in self.begun
        self.begun.add(rows)
        self.left[rows] -= 1
        return Visit(first, self.left[rows] == 0)

    def store_untouched(self, part: Part, name: str, row_bytes: int) -> None:
        """Enter the zeros of rows that no tile of keys has visited."""
        if part.walk.ledger is not None:
            each = part.problem.batch * part.problem.heads
            size = sum(len(rows) for rows in self.untouched) * row_bytes
            part.walk.ledger.writes(**{name: each * size})
