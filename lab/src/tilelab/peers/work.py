"""The measured work: one attention, its tensors, and the passes that are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilelab.cases.case import Case
from tilelab.cases.inputs import variant_of
from tilewise import masks
from tilewise.inspect.calls import lowered
from tilewise.problem import Operands, Problem

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
        packed: rows [B, S, H, D] in memory, as sequences one after the other have them.
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
    packed: bool = False
    device: str = "cpu"
    backend: str | None = None

    @classmethod
    def of(cls, case: Case, suite: str, passes: Pass, device: str = "cpu") -> Work:
        """Return a dense case, whose values are as wide as its keys, as a work."""
        mask, score = variant_of(case, device)
        return cls(
            suite,
            case.name,
            case.keys,
            str(case.dtype).removeprefix("torch."),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.batch,
            passes,
            mask,
            score,
            queries=case.queries,
            dropout_p=case.dropout_p,
            device=device,
        )

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
    generator = torch.Generator(work.device).manual_seed(0)

    def drawn(heads: int, rows: int, factor: float = 1.0) -> Tensor:
        sizes = (rows, heads) if work.packed else (heads, rows)
        shape = (work.batch, *sizes, work.head_dim)
        made = torch.randn(shape, generator=generator, device=work.device) * factor
        made = made.to(getattr(torch, work.dtype))
        return made.transpose(1, 2) if work.packed else made

    q = drawn(work.heads, work.rows, factor)
    k, v = (drawn(work.kv_heads, work.length) for _ in range(2))
    grad = drawn(work.heads, work.rows)
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


def causal_pairs(lengths: Iterable[int]) -> float:
    """Return half the pairs of each square problem, as the field counts a causal mask."""
    return sum(length * length for length in lengths) / 2


def window_pairs(length: int, width: int) -> float:
    """Row m sees itself and the ``width - 1`` keys before it, as far as there are any."""
    ramp = min(width, length)
    return ramp * (ramp + 1) / 2 + (length - ramp) * float(ramp)


def flops(pairs: float, heads: int, head_dim: int, *, backward: bool = False) -> float:
    """Return the operations of a pass: two products forward, and 2.5 times that backward.

    Forward these are ``q k^T`` and ``p v``, 4 D for a visible pair. Backward there are five
    (the scores again, dP, dV, dK, dQ), whatever a kernel does twice.

    Args:
        pairs: visible pairs of one head, over the whole batch.
        heads: query heads.
        head_dim: D, which Dv is too.
        backward: the gradients of q, k and v alone.
    """
    forward = 4 * pairs * heads * head_dim
    return 2.5 * forward if backward else forward
