"""The eager path's autograd: one Function over a plan's two kernels.

A torch custom op in Python costs 10 to 25 us a call, so eager calls come here. ``ops.py`` serves
torch.compile and export over the same kernels. ``derivatives.py`` serves everything beyond one
gradient.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.engine.derivatives import gradients
from tilewise.engine.flat import Call, flat, leaves_of, needs_of
from tilewise.engine.modes import readable, transforms_active
from tilewise.errors import Unsupported
from tilewise.plan.plan import Plan
from tilewise.problem import Operands, Result, Statistics
from tilewise.torch_private import has_batch


def differentiable(operands: Operands, plan: Plan, statistics: Statistics = "") -> Result:
    """Run a plan's forward so that autograd knows its backward; operands are ``for_backward``."""
    call = Call(plan, operands.seed, len(operands.mask_tensors), operands.origin)
    return Result(
        *Attention.apply(call, statistics, operands, *flat(operands))  # type: ignore[no-untyped-call]
    )


class Attention(torch.autograd.Function):
    """Attention over the flat tensors of a call; gradients of its leaves."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, statistics: Statistics, operands: Operands, *x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the kernel and keep what its backward reads."""
        ctx.call = call
        # An lse that nobody used then comes back as None and costs the kernel nothing.
        ctx.set_materialize_grads(False)
        result: Result = call.plan.forward(operands, statistics)
        out, lse, stats = result[:3]
        ctx.save_for_backward(out, lse, stats, *x)
        if not statistics:
            ctx.mark_non_differentiable(stats)
            return out, lse, stats
        fixed = [x for x in (stats, result.max_logit, result.top_key) if x is not None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *rest: Any) -> Any:
        """Return the gradients that autograd requests, in the order of forward's arguments."""
        # Those of stats, max_logit, entropy and top_key, as far as the call had them.
        grad_entropy = rest[2] if len(rest) > 1 else None
        call: Call = ctx.call
        saved = ctx.saved_tensors
        (out, lse, stats), x = saved[:3], saved[3:]
        wanted = call.leaves(ctx.needs_input_grad[3:])
        several = any(each is not None and has_batch(each) for each in (grad_out, grad_lse, *rest))
        if several or torch.is_grad_enabled() or transforms_active():
            # With create_graph, or inside of transforms: the gradients have derivatives too.
            if grad_entropy is not None:
                raise Unsupported(
                    "tilewise has no second derivative and no batched gradient of the entropy",
                    fix="use the mathematics in plain torch where its gradient is differentiated; "
                    "ask for one gradient after the other",
                )
            found = gradients(call, wanted, (out, lse, stats[:2]), (grad_out, grad_lse), x)
            return (None, None, None, *call.spread(found))
        grad_out = torch.zeros_like(out) if grad_out is None else readable(grad_out)
        if grad_lse is not None:
            grad_lse = readable(grad_lse)
        if grad_entropy is not None:
            grad_entropy = readable(grad_entropy)
        grads = call.plan.backward(
            call.operands(x),
            Result(out, lse, stats),
            grad_out,
            grad_lse,
            needs_of(wanted),
            grad_entropy,
        )
        return (None, None, None, *call.spread(leaves_of(grads)))
