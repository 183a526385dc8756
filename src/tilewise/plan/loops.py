"""Which loops a backend runs: what an account of its bytes is made from."""

from typing import Literal, NamedTuple, TypeAlias

BackwardOrder: TypeAlias = Literal["by_tiles", "in_turns", "keys_outside", "rows_outside"]


class Loops(NamedTuple):
    """Which loops a backend runs, in tiles of (queries, keys).

    Args:
        forward: of the forward pass, queries outside.
        order: of the backward: a function of ``plan.traffic.tiled``.
        backward: of the backward; where it has two walks, of that for dQ.
        keys: of the walk for dK and dV, where there is one; None for ``backward``.
        split_keys: keys that one program of the forward walks over, whose result is then merged
            with the others'; 0 for all of them.
        shared: whether a group of query heads walks together in such a forward.
        products: the dtype in which the forward multiplies, e.g. "float16", where it is not that of
            the operands.
        blocks: in which a tile of ``backward`` is computed, each skipped alone where it is empty;
            None for the tile as a whole.
    """

    forward: tuple[int, int]
    order: BackwardOrder
    backward: tuple[int, int]
    keys: tuple[int, int] | None = None
    split_keys: int = 0
    shared: bool = False
    products: str = ""
    blocks: tuple[int, int] | None = None
