"""The eager path's autograd: one Function over a plan's two kernels.

A torch custom op in Python costs 10 to 25 us a call, so eager calls come here; ``ops.py`` serves
torch.compile and export over the same kernels, ``derivatives.py`` what goes beyond one gradient.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.engine.derivatives import gradients
from tilewise.engine.flat import Call, flat
from tilewise.engine.modes import transforms_active
from tilewise.plan.plan import Plan
from tilewise.problem import Needs, Operands, Result

__all__ = ["Attention", "differentiable"]

# The position of the first captured tensor among the arguments of forward after ctx.
_FIRST_CAPTURED = 9


def differentiable(operands: Operands, plan: Plan) -> Result:
    """Run a plan's forward so that autograd knows its backward."""
    out, lse, stats = Attention.apply(  # type: ignore[no-untyped-call]
        plan,
        operands.seed,
        operands.q,
        operands.k,
        operands.v,
        operands.sinks,
        operands.cu_seqlens_q,
        operands.cu_seqlens_k,
        len(operands.mask_tensors),
        *operands.mask_tensors,
        *operands.score_tensors,
    )
    return Result(out, lse, stats)


class Attention(torch.autograd.Function):
    """Attention over operands in kernel form; gradients of q, k, v, sinks and score tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        seed: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        mask_count: int,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel and keep what its backward reads."""
        operands = Operands(
            q,
            k,
            v,
            captured[:mask_count],
            captured[mask_count:],
            sinks,
            cu_seqlens_q,
            cu_seqlens_k,
            seed,
        )
        result = plan.forward(operands)
        ctx.plan, ctx.seed, ctx.mask_count = plan, seed, mask_count
        ctx.save_for_backward(*result, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *captured)
        ctx.mark_non_differentiable(result.stats)
        # An lse that nobody used then comes back as None and costs the kernel nothing.
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        """The gradients that autograd asks for, in the order of forward's arguments."""
        out, lse, stats, q, k, v, sinks, cu_q, cu_k, *captured = ctx.saved_tensors
        split = ctx.mask_count
        operands = Operands(
            q, k, v, tuple(captured[:split]), tuple(captured[split:]), sinks, cu_q, cu_k, ctx.seed
        )
        wanted = ctx.needs_input_grad
        score_needs = wanted[_FIRST_CAPTURED + split :]
        if torch.is_grad_enabled() or transforms_active():
            # With create_graph, or inside of transforms: the gradients have derivatives too.
            call, x = Call(ctx.plan, ctx.seed, split), flat(operands)
            result, cotangents = (out, lse, stats), (grad_out, grad_lse)
            leaves = gradients(call, (*wanted[2:6], *score_needs), result, cotangents, x)
            spread = call.spread(leaves)
            return (None, None, *spread[:6], None, *spread[6:])
        needs = Needs(wanted[2], wanted[3], wanted[4], score_needs, wanted[5])
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.resolve_neg()
        if grad_lse is not None:
            grad_lse = grad_lse.resolve_neg()
        grads = ctx.plan.backward(operands, Result(out, lse, stats), grad_out, grad_lse, needs)
        mask_grads = (None,) * split
        return (
            None,
            None,
            grads.q,
            grads.k,
            grads.v,
            grads.sinks,
            None,
            None,
            None,
            *mask_grads,
            *grads.score_tensors,
        )
