"""The measured work: a case where it is measured, its tensors, the passes, and what they must give.

``plain`` is the plain mathematics, row by row if need be: a method itself, and what holds others to
be exact::

    s = score(scale q k^T);  p = softmax(s where visible);  out = dropout(p) v

A row that sees no key gives 0. torch's autograd differentiates it.

Correctness comes before speed: some chunks of rows of all heads are computed in float64 and in the
work's own dtype, and an exact method is held to the 2x rule (``tilelab.common.exactness``). For
gradients the output's gradient is zero in all other rows, so that the sampled rows are all that the
gradients of keys and values gather. Short problems are compared whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from tilelab.cases.case import Case
from tilelab.cases.inputs import variant_of
from tilelab.cases.variants import Draw, listed_keys, uneven
from tilelab.common.exactness import judge
from tilewise import visible_pairs
from tilewise.inspect.calls import Part, apply_score, keep_mask, lowered, visible
from tilewise.problem import Operands, Problem
from tilewise.variants.values import as_mask

SEED = 1234  # of what our dropout drops; the others draw their own
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Work(Case):
    """A dense case where it is measured."""

    suite: str = field(default="", repr=False)  # whose it is
    device: str = field(default="cpu", repr=False)  # of the tensors
    # Of ours; None for the one that a call takes by itself.
    backend: str | None = field(default=None, repr=False)

    @cached_property
    def _variant(self) -> tuple[Any, Any]:
        return variant_of(self, self.device)

    @property
    def drawn_mask(self) -> Any:
        """What ``tilewise.attention`` takes as the mask; always the same for the same work."""
        return self._variant[0]

    @property
    def drawn_score(self) -> Any:
        """What ``tilewise.attention`` takes as the score."""
        return self._variant[1]

    @property
    def drawn_lists(self) -> Tensor:
        """As many keys for each row as ``listed`` says, int32 [M, K], the same for all heads."""
        device = torch.device(self.device)
        generator = torch.Generator(device).manual_seed(SEED)
        sizes = self.batch, self.heads, self.queries, self.keys, self.keys
        return listed_keys(Draw(*sizes, self.dtype, device, generator), self.listed)

    @property
    def timer(self) -> str:
        """What times its calls, as ``tilelab.common.clock`` names it."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def shape(self) -> dict[str, int]:
        """For the record; of ``lists`` with the query rows, which are fewer than the keys."""
        rows = ("queries",) if self.suite == "lists" else ()
        names = ("batch", "heads", "kv_heads", *rows, "head_dim")
        return {name: getattr(self, name) for name in names}

    @property
    def title(self) -> str:
        """Its name, length and dtype."""
        return f"{self.name}, {self.keys}, {self.type_name}"

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the M x N matrices of all heads, in the operands' dtype."""
        return self.batch * self.heads * self.queries * self.keys * self.dtype.itemsize


def work_of(case: Case, suite: str = "", device: str = "cpu", **more: Any) -> Work:
    """Return a case as a work; ``more`` are other fields of both."""
    own = {each.name: getattr(case, each.name) for each in fields(Case)}
    return Work(**{**own, "suite": suite, "device": device, **more})


class Given(NamedTuple):
    """The tensors: q [B, Hq, M, D], k [B, Hk, N, D], v [B, Hk, N, Dv]; the output's gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that gradients are taken of."""
        return self.q, self.k, self.v


class Prepared(NamedTuple):
    """The call of another package on one work."""

    # Returns the output, [B, Hq, M, Dv]; it packs first where there is something to pack.
    call: Callable[[], Tensor]
    pack: Callable[[], Any] | None = None  # the packing alone; None where there is none
    path: str = ""  # the code path that the package takes, such as "amx"


def draw(work: Work, factor: float = 1.0) -> Given:
    """Standard normal numbers, the same at every call; q, and so the scores, times ``factor``."""
    generator = torch.Generator(work.device).manual_seed(0)
    packed = work.layout == "bshd"

    def drawn(heads: int, rows: int, width: int, factor: float = 1.0) -> Tensor:
        sizes = (rows, heads) if packed else (heads, rows)
        shape = (work.batch, *sizes, width)
        made = torch.randn(shape, generator=generator, device=work.device) * factor
        made = made.to(work.dtype)
        return made.transpose(1, 2) if packed else made

    q = drawn(work.heads, work.queries, work.head_dim, factor)
    k = drawn(work.kv_heads, work.keys, work.head_dim)
    if work.layout == "latent":
        v = k[..., : work.value_dim]
    else:
        v = drawn(work.kv_heads, work.keys, work.value_dim)
    grad = drawn(work.heads, work.queries, work.value_dim)
    needed = work.passes != "forward"
    for x in (q, k, v):
        x.requires_grad_(needed)
    return Given(q, k, v, grad)


def call_of(work: Work, given: Given, attend: Attend) -> Callable[[], Any]:
    """Return one call of the passes; for the backward alone the forward is done here."""
    q, k, v, grad = given
    if work.passes == "forward":
        return lambda: attend(q, k, v)
    if work.passes == "both":
        return lambda: torch.autograd.grad(attend(q, k, v), given.leaves, grad)
    out = attend(q, k, v)
    return lambda: torch.autograd.grad(out, given.leaves, grad, retain_graph=True)


def problem_of(work: Work, given: Given) -> tuple[Problem, Operands]:
    """Return the work as the library's own problem, with everything lowered."""
    q, k, v, _ = (x.detach() for x in given)
    variant = {"mask": work.drawn_mask, "score": work.drawn_score}
    return lowered(q, k, v, **variant, dropout_p=work.dropout_p, seed=SEED)


def causal_pairs(lengths: Iterable[int]) -> float:
    """Return half the pairs of each square problem, as the field counts a causal mask."""
    return sum(length * length for length in lengths) / 2


def window_pairs(length: int, width: int) -> float:
    """Row m sees itself and the ``width - 1`` keys before it, as far as there are any."""
    ramp = min(width, length)
    return ramp * (ramp + 1) / 2 + (length - ramp) * float(ramp)


def pairs(case: Case) -> float:
    """Return the visible pairs of one head; causal squares count as half, as the field does."""
    if not case.mask:
        return float(case.queries * case.keys)
    if "documents_uneven" in case.mask:
        return causal_pairs(torch.tensor(uneven(case.keys)).diff().tolist())
    mask = as_mask(variant_of(case, "cpu")[0])
    first, *rest = mask.program
    if first.op == "band" and not rest and case.queries == case.keys:
        left = int(first.params[0])
        return causal_pairs([case.queries]) if left < 0 else window_pairs(case.queries, left + 1)
    seen = visible_pairs(mask, case.queries, case.keys, batch=case.batch, heads=case.heads)
    return seen.sum().item() / (case.batch * case.heads)


def flops(case: Case) -> float:
    """Return the operations of a pass: two products forward, and five backward.

    Forward these are ``q k^T`` and ``p v``, 2 D + 2 Dv for a visible pair. Backward they are the
    scores again, dK and dQ, of 2 D each, and dP and dV, of 2 Dv, whatever a kernel does twice.
    """
    of_keys, of_values = (3, 2) if case.passes == "backward" else (1, 1)
    widths = of_keys * case.head_dim + of_values * case.value_dim
    return 2 * case.batch * pairs(case) * case.heads * widths


Keep = Callable[[Tensor], Tensor]  # dropout


class Seen(NamedTuple):
    """The mask of some rows."""

    hidden: Tensor  # True for a pair that does not attend, bool [B or 1, Hq or 1, rows, N]
    # True for a row that sees nothing, [.., rows, 1]; None where there is none.
    blind: Tensor | None


def plain(work: Work, given: Given) -> Attend:
    """Attention that writes its matrix, with the mask made before."""
    problem, operands = problem_of(work, given)
    every = [range(work.queries)]
    seen = seen_rows(problem, operands, every)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(problem, operands, (q, k, v), every, seen, _dropping(work))

    return attend


def chunked(work: Work, given: Given, rows: int, *, again: bool = False) -> Attend:
    """Make the same call, some rows at a time: only their part of the matrix is ever there.

    Without ``again``, autograd keeps every part for the backward, and nothing is saved; with it
    each part is computed again there (checkpointing).
    """
    problem, operands = problem_of(work, given)
    parts = [range(i, min(i + rows, work.queries)) for i in range(0, work.queries, rows)]

    def one(q: Tensor, k: Tensor, v: Tensor, part: range) -> Tensor:
        seen = seen_rows(problem, operands, [part])
        return attend_rows(problem, operands, (q, k, v), [part], seen, _dropping(work))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.requires_grad:
            # In place: small outputs between large parts would leave holes in the heap.
            out = v.new_empty(*q.shape[:3], v.shape[-1])
            for part in parts:
                out[:, :, part.start : part.stop] = one(q, k, v, part)
            return out
        if not again:
            return torch.cat([one(q, k, v, part) for part in parts], dim=2)
        done = [checkpoint(one, q, k, v, part, use_reentrant=False) for part in parts]
        return torch.cat(done, dim=2)

    return attend


def _dropping(work: Work) -> Keep | None:
    if not work.dropout_p:
        return None
    return lambda p: dropout(p, work.dropout_p)


def rows_kept(work: Work, chunks: Sequence[range]) -> Keep | None:
    """Return the dropout of ours on the rows of some chunks."""
    if not work.dropout_p:
        return None
    sizes = {"batches": range(work.batch), "heads": range(work.heads), "keys": range(work.keys)}
    found = [keep_mask(SEED, work.dropout_p, **sizes, queries=rows) for rows in chunks]
    keep = torch.cat(found, dim=2)
    return lambda p: p * keep.to(p.device) / (1 - work.dropout_p)


def seen_rows(problem: Problem, operands: Operands, chunks: Sequence[range]) -> Seen | None:
    """Return which keys the rows of some chunks see; None for all."""
    if not problem.mask:
        return None
    every = slice(None)
    part = Part(problem, operands, 0, every, every)
    device = operands.q.device
    found = [
        visible(problem.mask, operands.mask_tensors, part.block(rows, range(problem.keys)), device)
        for rows in chunks
    ]
    hidden = ~(torch.cat(found, dim=2) if len(found) > 1 else found[0])
    blind = hidden.all(-1, keepdim=True)
    return Seen(hidden, blind if bool(blind.any()) else None)


def attend_rows(
    problem: Problem,
    operands: Operands,
    tensors: Sequence[Tensor],
    chunks: Sequence[range],
    seen: Seen | None,
    keep: Keep | None,
) -> Tensor:
    """Return the output of the rows of some chunks, one below the other, in the tensors' dtype.

    ``operands`` has captured tensors of mask and score; ``tensors`` are q, k and v, whole. ``seen``
    is of ``seen_rows``, and ``keep`` drops probabilities.
    """
    q, k, v = tensors
    if sum(len(rows) for rows in chunks) < problem.queries:
        q = cut(q, chunks)
    s = _product(q, k.mT).mul_(problem.scale)
    if problem.score:
        s = _scored(problem, operands, s, chunks, seen)
        s = s if seen is None else s.masked_fill(seen.hidden, -math.inf)
    elif seen is not None:
        s = s.masked_fill_(seen.hidden, -math.inf)
    p = s.softmax(-1)
    del s  # or the matrix is held beside what comes next
    if seen is not None and seen.blind is not None:
        p = p.masked_fill(seen.blind, 0.0)
    return _product(p if keep is None else keep(p), v)


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply [B, Hq, R, x] by [B, Hk, x, y]: the heads of a group lie one below the other."""
    batch, heads, count, width = rows.shape
    grouped = rows.reshape(batch, shared.shape[1], -1, width) @ shared
    return grouped.view(batch, heads, count, -1)


def _scored(
    problem: Problem, operands: Operands, s: Tensor, chunks: Sequence[range], seen: Seen | None
) -> Tensor:
    every, keys, sizes = slice(None), range(problem.keys), [len(rows) for rows in chunks]
    part = Part(problem, operands, 0, every, every)
    hidden = [None] * len(chunks) if seen is None else seen.hidden.split_with_sizes(sizes, dim=2)
    found = []
    for rows, scores, each in zip(chunks, s.split_with_sizes(sizes, dim=2), hidden, strict=True):
        block, shown = part.block(rows, keys), None if each is None else ~each
        found.append(apply_score(problem.score, operands.score_tensors, scores, block, shown)[0])
    return torch.cat(found, dim=2) if len(found) > 1 else found[0]


_WHOLE = 512  # rows up to which all are compared
_ROWS = 16  # of a chunk
_CHUNKS = 4


class Measured(NamedTuple):
    """The distance of a result from the exact one."""

    complaint: str  # what breaks the 2x rule; empty if nothing does
    largest: float  # the largest error of the output (of a backward: of the gradients)
    allowed: float  # what the rule allows it
    relative: float  # root mean square of the error over that of the exact values


def sampled(length: int) -> list[range]:
    """The chunks of rows that are compared: the first, the last and some between."""
    if length <= _WHOLE:
        return [range(length)]
    starts = [(length - _ROWS) * i // (_CHUNKS - 1) for i in range(_CHUNKS)]
    return [range(start, start + _ROWS) for start in starts]


def compare(work: Work, given: Given, attend: Attend) -> Measured:
    """Run a method once and compare."""
    chunks = sampled(work.queries)
    grad = torch.zeros_like(given.grad)
    for rows in chunks:
        grad[:, :, rows.start : rows.stop] = given.grad[:, :, rows.start : rows.stop]
    out = attend(*given.leaves)
    got = _outputs(work, cut(out, chunks), out, given.leaves, grad, chunks)
    with given.q.device:  # the reference makes what it needs on the default device
        exact = _plain(work, given, chunks, torch.float64)
        plain = _plain(work, given, chunks, given.q.dtype)
    found = [_judge(name, each, plain[name], exact[name]) for name, each in got.items()]
    wrong = [each.complaint for each in found if each.complaint]
    worst = max(found, key=lambda each: each.largest / each.allowed if each.allowed else math.inf)
    relative = max(each.relative for each in found)
    return worst._replace(complaint="; ".join(wrong), relative=relative)


def cut(x: Tensor, chunks: Sequence[range]) -> Tensor:
    """Return the rows of some chunks, [B, H, rows, D]."""
    return torch.cat([x[:, :, rows.start : rows.stop] for rows in chunks], dim=2)


def _outputs(
    work: Work,
    rows: Tensor,
    out: Tensor,
    leaves: Sequence[Tensor],
    grad: Tensor,
    chunks: Sequence[range],
) -> dict[str, Tensor]:
    """Return what the passes give: the output's ``rows``, and gradients of ``out``."""
    found = {} if work.passes == "backward" else {"out": rows.detach()}
    if work.passes != "forward":
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
        found |= {"dq": cut(dq, chunks), "dk": dk, "dv": dv}
    return found


def _plain(
    work: Work, given: Given, chunks: Sequence[range], dtype: torch.dtype
) -> dict[str, Tensor]:
    problem, operands = problem_of(work, given)
    seen = seen_rows(problem, operands, chunks)
    leaves = [x.detach().to(dtype).requires_grad_(work.passes != "forward") for x in given.leaves]
    out = attend_rows(problem, operands, leaves, chunks, seen, rows_kept(work, chunks))
    return _outputs(work, out, out, leaves, cut(given.grad, chunks).to(dtype), chunks)


def _judge(name: str, got: Tensor, plain: Tensor, exact: Tensor) -> Measured:
    verdict = judge(got, plain, exact)
    size = exact.square().mean().sqrt().item()
    error = (got.double() - exact).square().mean().sqrt().item()
    relative = error / size if size else 0.0
    return Measured(verdict.fault(name), verdict.error, verdict.allowed, relative)
