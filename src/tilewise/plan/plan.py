"""The Plan: how a problem runs, as an immutable value that a caller may hold."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from tilewise.plan.traffic.account import Account, Loops, cached
from tilewise.problem import Problem


class Tiles(NamedTuple):
    """The blocks that a kernel works in: rows by keys, and the parts a key range is cut in."""

    query_tile: int
    key_tile: int
    splits: int = 1


class Plan(NamedTuple):
    """The choice made for a Problem.

    Args:
        problem: what to compute.
        backend: who does it.
        tiles: in which blocks.
        reasons: why each backend asked before it was not chosen, as (name, reasons) pairs.
        forward, backward, output: the backend's kernels bound to the problem
            (``kernels.base.Prepared``): what makes a held plan quick to run.
        mask_text, score_text: the programs as text: a held plan is matched by these.
        signature: shapes, dtypes and devices of q, k, v that a held plan is for, as
            ``engine.call.reader`` reads them.
        shown: the same and the layouts, as ``engine.call.shown`` does.
        bare: a call by this plan needs no keyword beside it.
        loops: which loops the backend runs, for the account of bytes.
        row_max_unit: see ``kernels.base.Prepared``.
    """

    problem: Problem
    backend: str
    tiles: Tiles
    reasons: tuple[tuple[str, tuple[str, ...]], ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    mask_text: str
    score_text: str
    signature: Hashable = None
    shown: tuple[Any, ...] = ()
    bare: bool = False
    loops: Loops | None = None
    output: Callable[..., Any] | None = None
    row_max_unit: float = 1.0

    @property
    def account(self) -> Account:
        """Return what a call by this plan and plain attention move; computed on first use.

        Raises:
            InvalidArgument: the mask or score has tensors, or the result depends on the lengths of
                the sequences. Use ``tilewise.explain`` of the call instead.
        """
        assert self.loops is not None
        return cached(self.problem, self.loops)

    def __repr__(self) -> str:
        problem, tiles = self.problem, self.tiles
        return (
            f"Plan(backend={self.backend!r}, tiles={tiles.query_tile}x{tiles.key_tile}, "
            f"splits={tiles.splits}, {problem.layout}, {problem.dtype}, mask={self.mask_text!r}, "
            f"score={self.score_text!r})"
        )
