"""The eager path's autograd: one Function over a plan's two kernels.

A torch custom op in Python costs 10 to 25 us a call, so eager calls come here. ``ops.py`` serves
torch.compile and export over the same kernels. ``derivatives.py`` serves everything beyond one
gradient.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.engine.derivatives import gradients
from tilewise.engine.flat import Call, flat
from tilewise.engine.modes import transforms_active
from tilewise.errors import Unsupported
from tilewise.plan.plan import Plan
from tilewise.problem import Needs, Operands, Result, Statistics
from tilewise.torch_private import has_batch

__all__ = ["Attention", "differentiable"]

# The position of the first captured tensor among the arguments of forward after ctx.
_FIRST_CAPTURED = 10


def differentiable(operands: Operands, plan: Plan, statistics: Statistics = "") -> Result:
    """Run a plan's forward so that autograd knows its backward."""
    results = Attention.apply(  # type: ignore[no-untyped-call]
        plan,
        statistics,
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
    return Result(*results)


class Attention(torch.autograd.Function):
    """Attention over operands in kernel form; gradients of q, k, v, sinks and score tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        statistics: Statistics,
        seed: int | Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        mask_count: int,
        *captured: Tensor,
    ) -> tuple[Tensor | None, ...]:
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
            for_backward=True,
        )
        ctx.plan, ctx.seed, ctx.mask_count = plan, seed, mask_count
        # An lse that nobody used then comes back as None and costs the kernel nothing.
        ctx.set_materialize_grads(False)
        result: Result = plan.forward(operands, statistics)
        out, lse, stats = result[:3]
        ctx.save_for_backward(
            out, lse, stats, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *captured
        )
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
        out, lse, stats, q, k, v, sinks, cu_q, cu_k, *captured = ctx.saved_tensors
        split = ctx.mask_count
        operands = Operands(
            q, k, v, tuple(captured[:split]), tuple(captured[split:]), sinks, cu_q, cu_k, ctx.seed
        )
        wanted = ctx.needs_input_grad
        score_needs = wanted[_FIRST_CAPTURED + split :]
        several = any(each is not None and has_batch(each) for each in (grad_out, grad_lse, *rest))
        if several or torch.is_grad_enabled() or transforms_active():
            # With create_graph, or inside of transforms: the gradients have derivatives too.
            if grad_entropy is not None:
                raise Unsupported(
                    "tilewise has no second derivative and no batched gradient of the entropy",
                    fix="use the mathematics in plain torch where its gradient is differentiated; "
                    "ask for one gradient after the other",
                )
            call, x = Call(ctx.plan, ctx.seed, split), flat(operands)
            wishes, cotangents = (*wanted[3:7], *score_needs), (grad_out, grad_lse)
            leaves = gradients(call, wishes, (out, lse, stats[:2]), cotangents, x)
            spread = call.spread(leaves)
            return (None, None, None, *spread[:6], None, *spread[6:])
        needs = Needs(wanted[3], wanted[4], wanted[5], score_needs, wanted[6])
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.resolve_neg()
        if grad_lse is not None:
            grad_lse = grad_lse.resolve_neg()
        if grad_entropy is not None:
            grad_entropy = grad_entropy.resolve_neg()
        result = Result(out, lse, stats)
        grads = ctx.plan.backward(operands, result, grad_out, grad_lse, needs, grad_entropy)
        mask_grads = (None,) * split
        return (
            None,
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
