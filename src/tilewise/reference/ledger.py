"""Record what a walk over tiles moves between slow and fast memory while it runs.

This is the counting mode of the references. Slow memory holds operands and results; fast memory
holds one tile's worth at a time. Every read and write is entered under the operand's name,
separately for each batch item and query head, as kernels own their tiles. ``plan.traffic`` predicts
these numbers from the sizes alone.

A fill that is overwritten as a whole is not entered: the reference makes it, not the algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tilewise.variants.program import Program


class Ledger:
    """Bytes read and written by operand, operations of products, and exponentials.

    Attributes:
        read: bytes from slow to fast memory, by the operand's name.
        written: bytes from fast to slow memory, by the operand's name.
        flops: floating-point operations of matrix products; a multiply-add is two.
        exponentials: powers taken.
    """

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.flops = 0
        self.exponentials = 0

    def reads(self, **bytes_of: int) -> None:
        """Enter bytes that were read."""
        self.read.update(bytes_of)

    def writes(self, **bytes_of: int) -> None:
        """Enter bytes that were written."""
        self.written.update(bytes_of)

    def multiplies(self, scores: Tensor, *widths: int) -> None:
        """Enter products with a tile of the score matrix.

        Args:
            scores: the tile, ``[B, Hq, m, n]``.
            widths: the third side of each product.
        """
        self.flops += 2 * scores.numel() * sum(widths)

    def looks_up(self, keys: range, page_size: int, each: int) -> None:
        """Enter what finds the pages of a tile of keys: an int32 for each page, ``each`` times.

        It is read once for keys and values together. Without pages (0) nothing is.
        """
        if page_size:
            pages = (keys.stop - 1) // page_size - keys.start // page_size + 1
            self.reads(block_table=each * pages * 4)

    def judges(
        self, mask: Program, tensors: Sequence[Tensor], queries: range, keys: range, each: int
    ) -> None:
        """Enter what a mask reads to say of a block what of it is seen, ``each`` times.

        That is done for every block of a walk, those that turn out empty among them. The positions
        that an expression loads depend on values; they are not entered.
        """
        m, n = len(queries), len(keys)
        for instr in mask:
            held = [tensors[slot] for slot in instr.slots]
            if instr.op == "below" and held:
                self.reads(mask=each * held[0].element_size())
            elif instr.op == "same_document":
                sizes = zip(held, (m, n), strict=True)
                self.reads(mask=each * sum(ids.element_size() * size for ids, size in sizes))
            elif instr.op == "dense":
                self.reads(mask=each * _piece(held[0], m, n) * held[0].element_size())
            elif instr.op in ("blocks", "tiles"):
                across, along = (int(size) for size in instr.params[:2])
                rows = (queries.stop - 1) // across - queries.start // across + 1
                columns = (keys.stop - 1) // along - keys.start // along + 1
                self.reads(mask=each * rows * columns * held[0].element_size())

    def scores(self, score: Program, tensors: Sequence[Tensor], tile: Tensor) -> None:
        """Enter what a score reads for a tile ``[B, Hq, m, n]`` (expressions' loads apart)."""
        each, (m, n) = tile.shape[0] * tile.shape[1], tile.shape[2:]
        for instr in score:
            held = [tensors[slot] for slot in instr.slots]
            if instr.op == "alibi":
                self.reads(score=each * held[0].element_size())
            elif instr.op == "bias":
                self.reads(score=each * _piece(held[0], m, n) * held[0].element_size())


def _piece(tensor: Tensor, m: int, n: int) -> int:
    """Elements of a tile of a tensor whose last two dimensions may be broadcast (size 1)."""
    return (m if tensor.size(2) > 1 else 1) * (n if tensor.size(3) > 1 else 1)


class Walk(NamedTuple):
    """How a reference goes over the score matrix.

    Args:
        query_tile, key_tile: the largest tile that it works on at once.
        ledger: where every access to slow memory is written down (``reference.ledger.Ledger``);
            None for nowhere.
    """

    query_tile: int = 128
    key_tile: int = 128
    ledger: Ledger | None = None


WALK = Walk()
