"""How a problem is done: the Plan, an immutable value that a caller may hold."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.problem import Problem

__all__ = ["Plan", "Tiles"]


class Tiles(NamedTuple):
    """The blocks that a kernel works in: rows by keys, and the parts a key range is cut in."""

    query_tile: int
    key_tile: int
    splits: int = 1


class Plan(NamedTuple):
    """The choice made for a Problem.

    Args:
        problem: what is asked.
        backend: who does it.
        tiles: in which blocks.
        reasons: why each backend asked before it was not chosen, as (name, reasons) pairs.
        forward, backward: the backend's kernels bound to the problem
            (``kernels.base.Prepared``): what makes a held plan quick to run.
        mask_text, score_text: the programs as text: a held plan is matched by these.
        signature: shapes, dtypes, devices and layouts of q, k, v that a held plan is for.
        bare: a call by this plan needs no keyword beside it.
    """

    problem: Problem
    backend: str
    tiles: Tiles
    reasons: tuple[tuple[str, tuple[str, ...]], ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    mask_text: str
    score_text: str
    signature: tuple[Any, ...] = ()
    bare: bool = False

    def __repr__(self) -> str:
        problem, tiles = self.problem, self.tiles
        return (
            f"Plan(backend={self.backend!r}, tiles={tiles.query_tile}x{tiles.key_tile}, "
            f"splits={tiles.splits}, {problem.layout}, {problem.dtype}, mask={self.mask_text!r}, "
            f"score={self.score_text!r})"
        )
