"""Which loops a backend runs: what an account of its bytes is made from."""

from typing import Literal, NamedTuple, TypeAlias

BackwardOrder: TypeAlias = Literal["by_tiles", "in_turns", "keys_outside", "rows_outside"]


class Loops(NamedTuple):
    """Which loops a backend runs, in tiles of (queries, keys)."""

    forward: tuple[int, int]  # of the forward pass, queries outside
    order: BackwardOrder  # of the backward: a function of ``plan.traffic.tiled``
    backward: tuple[int, int]  # of the backward; where it has two walks, of that for dQ
    # Of the walk for dK and dV, where there is one; None for ``backward``.
    keys: tuple[int, int] | None = None
    # Keys that one program of the forward walks over, whose result is then merged with the others';
    # 0 for all of them.
    split_keys: int = 0
    shared: bool = False  # whether a group of query heads walks together in such a forward
    # The dtype in which the forward multiplies, e.g. "float16", where it is not that of the
    # operands.
    products: str = ""
    # In which a tile of ``backward`` is computed, each skipped alone where it is empty; None for
    # the tile as a whole.
    blocks: tuple[int, int] | None = None
