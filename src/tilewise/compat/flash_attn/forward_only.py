"""Results without a gradient that say so when somebody differentiates them, and not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewise.errors import Unsupported


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
        """Refuse."""
        raise Unsupported(ctx.reason, fix=ctx.fix)


def _tied(
    reason: str, fix: str, found: tuple[Tensor, ...], wanting: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Tied.apply(reason, fix, len(found), *found, *wanting)  # type: ignore[no-untyped-call]
    return made
