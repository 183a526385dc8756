"""Gradients of calls by other libraries' interfaces.

``gradients_of`` computes them from an output and an lse that were kept between two passes.
``forward_only`` is for calls without any: results say so when somebody differentiates them, and not
before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.engine.call import Keywords, build_problem
from tilewise.errors import Unsupported
from tilewise.variants.lower import Extent, lower_score, statistics_dtype
from tilewise.variants.program import encode, fitted


class Forward(NamedTuple):
    """Operands and results of a forward pass, [B, heads, rows, ...] or packed [rows, heads, ...].

    ``out`` and ``lse`` may be of more keys than k has: those of merged results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def gradients_of(
    forward: Forward,
    dout: Tensor,
    keywords: Keywords,
    seed: Tensor | None,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> list[Tensor]:
    """Return the gradients of q, k and v, in their shapes; what is not needed is empty.

    An lse of -inf or +inf is that of a row without keys. ``dout`` is the gradient of the output.
    ``keywords`` and ``seed`` are those of the forward pass, with the starts of packed sequences.
    """
    q, k, v, out, lse = forward
    problem = build_problem(q, k, v, keywords)
    program, captured = keywords.score.program, keywords.score.captured
    packed = keywords.cu_seqlens
    sizes = (0, 0) if packed else (problem.queries, problem.keys)
    extent = Extent(problem.batch, problem.heads, *sizes, packed is not None, check_values=False)
    lowered = lower_score(program, captured, extent, q.dtype, q.device)
    lse = lse.to(statistics_dtype(q.dtype)).contiguous()
    lse = torch.where(lse == torch.inf, -torch.inf, lse)  # rows without keys, as tilewise has them
    found: list[Tensor] = torch.ops.tilewise.attention_backward(
        dout,
        None,
        None,
        out,
        lse,
        None,  # of the stats that the kernels keep
        [*needed, False, *(False for _ in lowered)],
        q,
        k,
        v,
        list(keywords.mask.captured),
        list(lowered),
        None,
        seed,
        *(packed or (None, None)),
        keywords.mask.text,
        encode(fitted(program)),
        None if keywords.scale is None else problem.scale,
        problem.dropout_p,
        None,
        True,  # out and lse may be of more keys than these
    )
    return found[:3]


def forward_only(
    what: str, fix: str, found: tuple[Tensor, ...], given: Mapping[str, Tensor | None]
) -> tuple[Tensor, ...]:
    """Return results that were computed without gradients, tied to what would want one.

    A silently missing gradient would be worse than an error, and an error for a tensor that merely
    requires a gradient would refuse calls that flash-attn answers.

    Returns:
        The results. Where gradients are on and an argument requires one, they require one too, and
        a backward pass through them raises ``Unsupported``. torch.compile leaves its graph for
        that, and with fullgraph=True refuses: a graph for training has its backward pass from the
        start.
    """
    if not torch.is_grad_enabled():
        return found
    wanting = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    if not wanting:
        return found
    reason = f"{next(iter(wanting))} requires a gradient, and {what} has none"
    tie: Callable[..., tuple[Tensor, ...]] = _tied
    if torch.compiler.is_compiling():
        compiler: Any = torch.compiler
        tie = compiler.disable(_tied, reason="a gradient that is refused has no place in a graph")
    return tie(reason, fix, found, tuple(wanting.values()))


class _Tied(torch.autograd.Function):
    """Results whose backward pass raises."""

    @staticmethod
    def forward(
        ctx: Any, reason: str, fix: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Keep the words of the error; the results are the first ``count`` tensors."""
        ctx.reason, ctx.fix = reason, fix
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise Unsupported(ctx.reason, fix=ctx.fix)


def _tied(
    reason: str, fix: str, found: tuple[Tensor, ...], wanting: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Tied.apply(reason, fix, len(found), *found, *wanting)  # type: ignore[no-untyped-call]
    return made
