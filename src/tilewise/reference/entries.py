"""Enter the tiled forward and backward in a ledger, operand by operand."""

from __future__ import annotations

from torch import Tensor

from tilewise.problem import Operands, Result
from tilewise.reference.blocks import Part
from tilewise.reference.ledger import Ledger
from tilewise.reference.totals import Totals

_GRADIENTS = ("grad_q", "grad_k", "grad_v")


def enter_reads(part: Part, rows: range, **tensors: Tensor | None) -> None:
    """Enter what a tile of query rows reads: its queries, its sinks, and what else is given."""
    ledger, operands, problem = part.walk.ledger, part.operands, part.problem
    assert ledger is not None
    each = problem.batch * problem.heads
    ledger.reads(q=each * len(rows) * problem.head_dim * operands.q.element_size())
    if operands.sinks is not None:
        ledger.reads(sinks=each * operands.sinks.element_size())
    for name, tensor in tensors.items():
        if tensor is not None:
            ledger.reads(**{name: tensor.numel() * tensor.element_size()})


def enter_result(ledger: Ledger, tile: Result, whole: Result) -> None:
    """Enter the bytes that a tile of rows writes to each field of the result, as it is stored."""
    for name, of, to in zip(Result._fields, tile, whole, strict=True):
        if of is not None and to is not None:
            ledger.writes(**{name: of.numel() * to.element_size()})


def enter_totals(ledger: Ledger, totals: Totals, operands: Operands) -> None:
    """The zeros that sums of keys begin with, and the sums as they become gradients."""
    for name, total, like in zip(_GRADIENTS, totals[:3], operands[:3], strict=True):
        if total is None:
            continue
        size = total.numel() * total.element_size()
        if name != "grad_q":
            ledger.writes(**{name: size})
        if total.dtype != like.dtype:
            ledger.reads(**{name: size})
            ledger.writes(**{name: like.numel() * like.element_size()})
