"""The measured work: a case where it is measured, its tensors, and the passes that are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.cases.case import Case
from tilelab.cases.inputs import variant_of
from tilelab.cases.variants import Draw, listed_keys, uneven
from tilewise import visible_pairs
from tilewise.inspect.calls import lowered
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
    """Standard normal numbers, the same at every call.

    Args:
        work: whose.
        factor: q is multiplied by it, and so are the scores.
    """
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
