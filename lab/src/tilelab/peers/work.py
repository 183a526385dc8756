"""The measured work: one attention, its tensors, and the passes that are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise import masks
from tilewise.inspect.calls import lowered
from tilewise.problem import Operands, Problem

__all__ = ["SEED", "Attend", "Given", "Pass", "Work", "call_of", "draw", "problem_of"]

SEED = 1234  # of what our dropout drops; the others draw their own
Pass = Literal["forward", "backward", "both"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Work:
    """One attention to measure.

    Args:
        suite: whose it is.
        case: names it among the suite's, the same at every length.
        length: keys, N, and queries, M, where ``queries`` is 0.
        dtype: of the operands, e.g. ``"float32"``.
        heads, kv_heads, head_dim, batch: Hq, Hk, D and B.
        passes: what one call does: the output, the gradients of q, k and v, or both.
        mask, score: what ``tilewise.attention`` takes.
        flex_mask, flex_score: the same as functions that FlexAttention takes, where they are none.
        padding: keys at the end that nobody sees; instead of a mask.
        queries: M, where it is not N.
        dropout_p: the probability of dropping a pair.
        statistics: which ones of its rows a call gives too, as ``return_stats`` takes it.
        device: of the tensors.
        backend: of ours; None for the one that a call takes by itself.
    """

    suite: str
    case: str
    length: int
    dtype: str = "float32"
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    batch: int = 1
    passes: Pass = "forward"
    mask: Any = None
    score: Any = None
    flex_mask: Any = None
    flex_score: Any = None
    padding: int = 0
    queries: int = 0
    dropout_p: float = 0.0
    statistics: bool | Literal["top1"] = False
    device: str = "cpu"
    backend: str | None = None

    @property
    def rows(self) -> int:
        """Queries of a head, M."""
        return self.queries or self.length

    @property
    def timer(self) -> str:
        """What times its calls, as ``tilelab.common.clock`` names it."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def masked(self) -> Any:
        """The mask with the padding in it."""
        if not self.padding:
            return self.mask
        kept = self.length - self.padding
        return masks.lengths(torch.full((self.batch,), kept, device=self.device))

    @property
    def shape(self) -> dict[str, int]:
        """For the record."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the N x N matrices of all heads, in the operands' dtype."""
        pairs = self.batch * self.heads * self.rows * self.length
        return int(pairs * getattr(torch, self.dtype).itemsize)


class Given(NamedTuple):
    """The tensors: q [B, Hq, M, D], k and v [B, Hk, N, D], and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that gradients are taken of."""
        return self.q, self.k, self.v


def draw(work: Work, factor: float = 1.0) -> Given:
    """Standard normal numbers, the same at every call.

    Args:
        work: whose.
        factor: q is multiplied by it, and so are the scores.
    """
    generator = torch.Generator().manual_seed(0)
    queries, keys = (work.heads, work.rows), (work.kv_heads, work.length)
    made = [
        torch.randn(work.batch, *sizes, work.head_dim, generator=generator)
        for sizes in (queries, keys, keys, queries)
    ]
    made[0] = made[0] * factor
    dtype = getattr(torch, work.dtype)
    q, k, v, grad = (x.to(dtype).to(work.device) for x in made)
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
    variant = {"mask": work.masked, "score": work.score}
    return lowered(q, k, v, **variant, dropout_p=work.dropout_p, seed=SEED)
