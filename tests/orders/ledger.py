"""Record what a walk over tiles moves between slow and fast memory while it runs.

This is the counting mode of the references: a ``Walk`` with a ledger tells it of every access. Slow
memory holds operands and results; fast memory holds one tile's worth at a time. Every read and
write is entered under the operand's name, separately for each batch item and query head, as kernels
own their tiles. ``plan.traffic`` predicts these numbers from the sizes alone.

A fill that is overwritten as a whole is not entered: the reference makes it, not the algorithm.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from tilewise.inspect.calls import Part
from tilewise.problem import Operands, Result
from tilewise.reference.tiles import Tile, Totals

_GRADIENTS = ("grad_q", "grad_k", "grad_v")


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

    def rows(self, part: Part, rows: range, **tensors: Tensor | None) -> None:
        """Enter what a tile of query rows reads: its queries, its sinks, and what else is given."""
        operands, problem = part.operands, part.problem
        each = problem.batch * problem.heads
        self.reads(q=each * len(rows) * problem.head_dim * operands.q.element_size())
        if operands.sinks is not None:
            self.reads(sinks=each * operands.sinks.element_size())
        for name, tensor in tensors.items():
            if tensor is not None:
                self.reads(**{name: tensor.numel() * tensor.element_size()})

    def keys(self, part: Part, columns: range, tile: Tile) -> None:
        """Enter what the tiles of all query heads read of their keys, values and pages.

        What finds a page is an int32, read once for keys and values together.
        """
        if part.page_size:
            pages = (columns.stop - 1) // part.page_size - columns.start // part.page_size + 1
            self.reads(block_table=tile.k.shape[0] * tile.k.shape[1] * pages * 4)
        scales = tile.k[..., 0].numel() * (4 if part.problem.stored else 0)  # float32
        self.reads(k=tile.k.numel() * part.operands.k.element_size() + scales)
        self.reads(v=tile.v.numel() * part.operands.v.element_size() + scales)

    def result(self, tile: Result, whole: Result) -> None:
        """Enter the bytes that a tile of rows writes to each field of the result, as stored."""
        for name, of, to in zip(Result._fields, tile, whole, strict=True):
            if of is not None and to is not None:
                self.writes(**{name: of.numel() * to.element_size()})

    def totals(self, totals: Totals, operands: Operands) -> None:
        """Enter the zeros that sums of keys begin with, and the sums as they become gradients."""
        for name, total, like in zip(_GRADIENTS, totals[:3], operands[:3], strict=True):
            if total is None:
                continue
            size = total.numel() * total.element_size()
            if name != "grad_q":
                self.writes(**{name: size})
            if total.dtype != like.dtype:
                self.reads(**{name: size})
                self.writes(**{name: like.numel() * like.element_size()})

    def judges(self, part: Part, queries: range, keys: range) -> None:
        """Enter what a mask reads to say of a block what of it is seen.

        That is done for every block of a walk, those that turn out empty among them. The positions
        that an expression loads depend on values; they are not entered.
        """
        problem, tensors = part.problem, part.operands.mask_tensors
        each, m, n = problem.batch * problem.heads, len(queries), len(keys)
        for instr in problem.mask:
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

    def scores(self, part: Part, tile: Tensor) -> None:
        """Enter the product of a tile ``[B, Hq, m, n]``, and what a score reads for it.

        The loads of expressions are left out.
        """
        tensors = part.operands.score_tensors
        self.multiplies(tile, part.problem.head_dim)
        each, (m, n) = tile.shape[0] * tile.shape[1], tile.shape[2:]
        for instr in part.problem.score:
            held = [tensors[slot] for slot in instr.slots]
            if instr.op == "alibi":
                self.reads(score=each * held[0].element_size())
            elif instr.op == "bias":
                self.reads(score=each * _piece(held[0], m, n) * held[0].element_size())


def _piece(tensor: Tensor, m: int, n: int) -> int:
    """Elements of a tile of a tensor whose last two dimensions may be broadcast (size 1)."""
    return (m if tensor.size(2) > 1 else 1) * (n if tensor.size(3) > 1 else 1)
