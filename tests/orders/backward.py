"""The backward in the orders of the GPU backend and of the CPU core (see the package)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tests.orders.forward import Visit, Visits
from tests.orders.ledger import Ledger
from tilewise.inspect.calls import Part, parts
from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.reference.blocks import Walk
from tilewise.reference.programs import score_gradient
from tilewise.reference.tiled import RowState, tile_gradient
from tilewise.reference.tiles import (
    Tile,
    Totals,
    accumulators,
    key_spans,
    key_tiles,
    normaliser,
    part_rows,
    part_view,
    product,
    query_tiles,
    score_tile,
    sum_group,
)
from tilewise.variants.lower import statistics_dtype

Delta = Literal["pass", "first", "each"]
_Q_K_V = Needs(True, True, True)


def backward_by_tiles(
    problem: Problem, operands: Operands, result: Result, grad_out: Tensor, walk: Walk
) -> Grads:
    """Compute the backward with one owner per sum: delta, then dQ by rows, then dK, dV by keys."""
    call = _Call(problem, operands, result, grad_out, walk, folded=True)
    for part in parts(problem, operands, walk):
        delta = call.delta_pass(part)
        views = call.totals.of(part, problem)
        for rows in query_tiles(part):
            call.query_owner(part, rows, delta, views)
        call.key_owners(part, delta)
    return call.totals.grads(operands)


def backward_keys_outside(
    problem: Problem,
    operands: Operands,
    result: Result,
    grad_out: Tensor,
    walk: Walk,
    partial: torch.dtype | None = None,
    delta: Delta = "pass",
) -> Grads:
    """Compute the backward with tiles of keys outside: dQ of a row is a sum in slow memory.

    Args:
        problem: what to compute.
        operands: with what.
        result: of a forward pass.
        grad_out: shaped as its out.
        walk: tile sizes and ledger.
        partial: what the unfinished dQ is stored in; None for the compute dtype.
        delta: where rowsum(dO * O) comes from: a pass of its own, the first visit of a tile of
            rows (which stores it), or each visit again (algorithm 4 to the letter).
    """
    call = _Call(problem, operands, result, grad_out, walk)
    kept = partial or call.dtype
    for part in parts(problem, operands, walk):
        deltas = call.delta_pass(part) if delta == "pass" else call.deltas(part)
        visits = Visits(part)
        call.key_owners(part, deltas, _Shares(visits, delta, kept))
        visits.store_untouched(part, "grad_q", problem.head_dim * operands.q.element_size())
    return call.totals.grads(operands)


def backward_in_turns(
    problem: Problem, operands: Operands, result: Result, grad_out: Tensor, walk: Walk
) -> Grads:
    """Compute the backward with tiles of keys outside; a last pass makes dQ of its sums."""
    call = _Call(problem, operands, result, grad_out, walk, folded=True)
    for part in parts(problem, operands, walk):
        visits = Visits(part)
        call.key_owners(part, call.delta_pass(part), _Shares(visits, "pass", None))
        call.ledger.reads(sums=call.of_visited(part, visits) * call.dtype.itemsize)
        of_rows = part.operands.q
        call.ledger.writes(grad_q=of_rows.numel() * of_rows.element_size())
    return call.totals.grads(operands)


class _Shares(NamedTuple):
    """How tiles of keys add to the dQ of the rows that they meet.

    ``delta`` is that of ``backward_keys_outside``. ``kept``: in which dQ is left; None for the
    compute dtype, in sums of their own.
    """

    visits: Visits
    delta: Delta
    kept: torch.dtype | None


class _TileGradients(NamedTuple):
    """One tile: dQ ``[B, Hq, m, D]``, and dK, dV ``[B, Hk, n, .]`` summed over groups."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Call:
    """A backward pass: its tensors, and each access to slow memory with its entry.

    ``folded``: the pass over the rows turns the statistics and delta into the two numbers a row
    that the others read; else these read the statistics, and delta beside them.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        result: Result,
        grad_out: Tensor,
        walk: Walk,
        folded: bool = False,
    ) -> None:
        self.folded = folded
        self.problem, self.result, self.grad_out = problem, result, grad_out
        self.dtype = statistics_dtype(problem.dtype)
        self.ledger = walk.ledger or Ledger()
        scores = (False,) * len(operands.score_tensors)
        needs = _Q_K_V._replace(score_tensors=scores)
        self.totals = accumulators(problem, operands, needs, self.dtype)

    def _of_rows(self, tensor: Tensor, part: Part, rows: range) -> Tensor:
        return part_view(tensor, part.queries, self.problem)[:, :, rows.start : rows.stop]

    def deltas(self, part: Part) -> Tensor:
        """rowsum(dO * O) of a part, ``[B, Hq, M]``; entered by whoever reads it."""
        out, grad_out = (
            part_view(tensor, part.queries, self.problem).to(self.dtype)
            for tensor in (self.result.out, self.grad_out)
        )
        # A dead row's out is 0; what its gradient holds does not matter.
        return torch.where(out == 0, 0.0, out * grad_out).sum(-1)

    def delta_pass(self, part: Part) -> Tensor:
        """Run the pass over the rows, which comes before the others."""
        found = self.deltas(part)
        rows = found.numel() * part.problem.value_dim
        self.ledger.reads(out=rows * self.result.out.element_size())
        self.ledger.reads(grad_out=rows * self.grad_out.element_size())
        row_numbers = found.numel() * found.element_size()
        if self.folded:
            self.ledger.reads(stats=2 * row_numbers)
        self.ledger.writes(delta=(2 if self.folded else 1) * row_numbers)
        return found

    def enter_delta(self, part: Part, rows: range, delta: Delta, first: bool) -> None:
        """Enter how a visit comes by the delta of its rows."""
        count = part.problem.batch * part.problem.heads * len(rows)
        stored = count * self.dtype.itemsize
        if delta == "pass" or (delta == "first" and not first):
            self.ledger.reads(delta=(2 if self.folded else 1) * stored)
            return
        size = self.result.out.element_size()
        self.ledger.reads(out=count * part.problem.value_dim * size)
        if delta == "first":
            self.ledger.writes(delta=stored)

    def _read_rows(self, part: Part, rows: range) -> Tensor:
        """Return the queries of a tile; enter them, their dO and their statistics."""
        q = part.operands.q[:, :, rows.start : rows.stop]
        grad = self._of_rows(self.grad_out, part, rows)
        count = q.shape[0] * q.shape[1] * len(rows)
        self.ledger.reads(q=q.numel() * q.element_size())
        self.ledger.reads(grad_out=grad.numel() * grad.element_size())
        if not self.folded:
            self.ledger.reads(stats=2 * count * self.dtype.itemsize)
        return q.to(self.dtype)

    def load_rows(self, part: Part, rows: range, columns: range) -> Tile | None:
        """A tile for which keys are there already and queries are read; None if it is empty."""
        q = part.operands.q[:, :, rows.start : rows.stop].to(self.dtype)
        tile = score_tile(part, rows, columns, q)
        if tile is not None:
            self._read_rows(part, rows)
        return tile

    def load_keys(self, part: Part, columns: range) -> tuple[Tensor, Tensor]:
        """Keys and values of a tile, ``[B, Hk, n, .]``, which a group of query heads shares."""
        k, v = (x[:, :, columns.start : columns.stop] for x in part.operands[1:3])
        self.ledger.reads(k=k.numel() * k.element_size(), v=v.numel() * v.element_size())
        return k.to(self.dtype), v.to(self.dtype)

    def store_keys(self, part: Part, columns: range, sums: list[Tensor], views: Totals) -> None:
        """The finished gradients of a tile of keys."""
        names = (("grad_k", views.k, sums[0]), ("grad_v", views.v, sums[1]))
        for name, total, share in names:
            assert total is not None
            total[:, :, columns.start : columns.stop] = share
            self.ledger.writes(**{name: share.numel() * part.operands.k.element_size()})

    def gradients(
        self, part: Part, rows: range, tile: Tile, deltas: Tensor, wanted: str = "qkv"
    ) -> _TileGradients:
        """Return what a tile adds to the gradients of its rows and keys, and enter its products."""
        problem = part.problem
        span = slice(rows.start, rows.stop)
        stats = part_rows(self.result.stats, part.queries, self.problem)[..., span]
        grad_out = self._of_rows(self.grad_out, part, rows).to(self.dtype)
        state = RowState(grad_out, None, *normaliser(part, stats, self.dtype), None)
        found = tile_gradient(part, tile, state)
        ds = found.p * (found.dp - deltas[..., span, None])
        q = part.operands.q[:, :, span].to(self.dtype)
        if tile.seen is not None:
            ds = torch.where(tile.seen, ds, 0.0)
            q = torch.where(tile.seen.any(-1, keepdim=True), q, 0.0)
        none = [None] * len(part.operands.score_tensors)
        tensors = part.operands.score_tensors
        ds = score_gradient(problem.score, tensors, tile.saved, ds, tile.block, none)
        ds = ds * problem.scale
        group = problem.heads // problem.kv_heads
        if "q" in wanted:
            self.ledger.multiplies(ds, problem.head_dim)
        if "k" in wanted:
            self.ledger.multiplies(ds, problem.head_dim, problem.value_dim)
        return _TileGradients(
            product(ds, tile.k),
            sum_group(product(ds.transpose(-1, -2), q), group),
            sum_group(product(found.dropped.transpose(-1, -2), found.grad_out), group),
        )

    def query_owner(self, part: Part, rows: range, deltas: Tensor, views: Totals) -> None:
        """The dQ of a tile of rows, by a walk over the keys."""
        q = self._read_rows(part, rows)
        self.enter_delta(part, rows, "pass", first=True)
        grad_q = torch.zeros_like(q)
        for tile in key_tiles(part, rows, q):
            grad_q += self.gradients(part, rows, tile, deltas, "q").q
        assert views.q is not None
        views.q[:, :, rows.start : rows.stop] = grad_q
        self.ledger.writes(grad_q=grad_q.numel() * part.operands.q.element_size())

    def key_owners(self, part: Part, deltas: Tensor, shares: _Shares | None = None) -> None:
        """The dK and dV of each tile of keys, by a walk over the queries of its group.

        ``shares``: each tile also adds what it has of dQ; None where dQ has a walk of its own.
        """
        views = self.totals.of(part, self.problem)
        for columns in key_spans(part):
            k, v = self.load_keys(part, columns)
            sums = [torch.zeros_like(k), torch.zeros_like(v)]
            for rows in query_tiles(part):
                tile = self.load_rows(part, rows, columns)
                if tile is None:
                    continue
                if shares is None:
                    self.enter_delta(part, rows, "pass", first=True)
                    found = self.gradients(part, rows, tile, deltas, "k")
                else:
                    visit = shares.visits.count(rows)
                    self.enter_delta(part, rows, shares.delta, visit.first)
                    found = self.gradients(part, rows, tile, deltas)
                    self.add_query_share(part, rows, found.q, visit, shares.kept, views)
                for total, share in zip(sums, (found.k, found.v), strict=True):
                    total += share
            self.store_keys(part, columns, sums, views)

    def of_visited(self, part: Part, visits: Visits) -> int:
        """Return how many numbers of dQ there are in the rows that a tile of keys has visited."""
        each = part.problem.batch * part.problem.heads * part.problem.head_dim
        return each * sum(len(rows) for rows in visits.begun)

    def add_query_share(
        self,
        part: Part,
        rows: range,
        share: Tensor,
        visit: Visit,
        kept: torch.dtype | None,
        views: Totals,
    ) -> None:
        """A visit's share of dQ: read unless it is the first, left in ``kept`` unless the last."""
        assert views.q is not None
        span = slice(rows.start, rows.stop)
        name, left = ("grad_q", kept) if kept else ("sums", self.dtype)
        if not visit.first:
            share = share + views.q[:, :, span]
            self.ledger.reads(**{name: share.numel() * left.itemsize})
        stored = part.operands.q.dtype if visit.last and kept else left
        views.q[:, :, span] = share if visit.last else share.to(left).to(share.dtype)
        self.ledger.writes(**{name: share.numel() * stored.itemsize})
