"""One call: which road it takes, and along it from the arguments to a Result."""

from typing import Any

import torch
from torch import Tensor

from tilewise.engine import ops
from tilewise.engine.autograd import differentiable
from tilewise.engine.call import Asked, build_operands, cached_plan, signature
from tilewise.engine.modes import needs_op, refuse_transforms, transforms_active
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.plan.plan import Plan
from tilewise.problem import Operands, Problem, Result, check_cu_tensors, check_sinks
from tilewise.variants.values import Mask, Score, as_mask, as_score

__all__ = ["NO_MASK", "NO_SCORE", "read_mask", "read_score", "run", "run_planned"]

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch.is_autocast_enabled
NO_MASK = Mask(())
NO_SCORE = Score(())
_AUTOCAST_FROM = (torch.float32, torch.bfloat16, torch.float16)


def read_mask(mask: Any) -> Mask:
    """``mask=`` as a Mask; the empty program for None."""
    if mask is None:
        return NO_MASK
    return mask if type(mask) is Mask else as_mask(mask)


def read_score(score: Any) -> Score:
    """``score=`` as one Score; the empty program for None."""
    if score is None:
        return NO_SCORE
    return score if type(score) is Score else as_score(score)


def run(q: Tensor, k: Tensor, v: Tensor, asked: Asked, seed: int | Tensor | None) -> Result:
    """Attention as asked (``functional.attention``)."""
    if transforms_active():
        refuse_transforms((q, k, v, asked.sinks, *asked.mask.captured, *asked.score.captured))
    if _is_compiling() or needs_op(q, k, v):
        q, k, v = _autocast(q, k, v)
        return ops.call(q, k, v, asked, seed)
    if _autocast_enabled("cpu" if q.is_cpu else q.device.type):
        q, k, v = _autocast(q, k, v)
    plan = cached_plan(q, k, v, asked)
    return _execute(
        plan,
        q,
        k,
        v,
        asked.cu_seqlens,
        asked.mask.captured,
        asked.score.captured,
        asked.sinks,
        seed,
    )


def _execute(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    mask_tensors: tuple[Tensor, ...],
    score_tensors: tuple[Tensor, ...],
    sinks: Tensor | None,
    seed: int | Tensor | None,
) -> Result:
    """Run a plan eagerly, under autograd where a gradient may be wanted."""
    problem = plan.problem
    if q.is_neg() or k.is_neg() or v.is_neg():
        # The imaginary part of a conjugate: its sign is a flag that kernels do not see.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if (
        sinks is None
        and cu_seqlens is None
        and seed is None
        and not mask_tensors
        and not score_tensors
        and not problem.dropout_p
    ):
        operands = Operands(q, k, v)
    else:
        operands = build_operands(
            problem, q, k, v, cu_seqlens, mask_tensors, score_tensors, sinks, seed
        )
    if _grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or any(tensor.requires_grad for tensor in score_tensors)
    ):
        return differentiable(operands, plan)
    result: Result = plan.forward(operands)
    return result


def run_planned(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, asked: Asked, seed: int | Tensor | None
) -> Result:
    """Attention by a held plan: the call's mask and score, if said, must be the plan's.

    Raises:
        InvalidArgument, InvalidType: the call is not the one that the plan is for.
    """
    if _is_compiling() or transforms_active() or needs_op(q, k, v):
        check_plan(plan, asked)
        return run(q, k, v, _asked_of(plan, asked), seed)
    if _autocast_enabled("cpu" if q.is_cpu else q.device.type):
        q, k, v = _autocast(q, k, v)
    check_plan(plan, asked)
    if plan.signature != signature(q, k, v):
        raise InvalidArgument(
            "plan",
            f"a plan for {_describe(plan.signature)}",
            f"one for {_describe(signature(q, k, v))}",
            "Make it with tilewise.plan() from tensors like these.",
        )
    return _execute(
        plan,
        q,
        k,
        v,
        asked.cu_seqlens,
        asked.mask.captured,
        asked.score.captured,
        asked.sinks,
        seed,
    )


def check_plan(plan: Plan, asked: Asked) -> None:
    """Refuse a held plan that is for other keywords than the call's."""
    if type(plan) is not Plan:
        raise InvalidType("plan", f"a {type(plan).__name__}", "a Plan made by tilewise.plan()")
    problem = plan.problem
    mask, score, scale, dropout_p, sinks, backend, cu_seqlens = asked
    # Text with a "[" names slots: such a mask or score has tensors to bring.
    if (
        (mask.text != plan.mask_text and (mask.text or "[" in plan.mask_text))
        or (score.text != plan.score_text and (score.text or "[" in plan.score_text))
        or (scale is not None and scale != problem.scale)
        or dropout_p != problem.dropout_p
        or (backend is not None and backend != plan.backend)
        or (sinks is not None) != problem.sinks
        or (cu_seqlens is not None) != (problem.layout == "varlen")
    ):
        raise InvalidArgument(
            "plan",
            f"{plan!r} (scale {problem.scale:g}, dropout_p {problem.dropout_p:g}, "
            f"sinks {problem.sinks})",
            f"the plan of this call: mask={mask.text!r}, score={score.text!r}, scale={scale}, "
            f"dropout_p={dropout_p}, backend={backend!r}, sinks {sinks is not None}",
            "Say the same keywords as to tilewise.plan(); a mask or score that captures tensors "
            "must be passed again.",
        )
    if sinks is not None or cu_seqlens is not None:
        _check_plan_tensors(problem, sinks, cu_seqlens)


def _check_plan_tensors(
    problem: Problem, sinks: Tensor | None, cu_seqlens: tuple[Tensor, Tensor] | None
) -> None:
    """The shapes that a plan was checked for once and a call may have changed."""
    check_sinks(sinks, problem.heads, problem.device)
    if cu_seqlens is not None:
        check_cu_tensors(*cu_seqlens)
        if cu_seqlens[0].shape[0] != problem.batch + 1:
            raise InvalidArgument(
                "plan",
                f"a plan for {problem.batch} sequences",
                f"one for {cu_seqlens[0].shape[0] - 1}",
            )


def _asked_of(plan: Plan, asked: Asked) -> Asked:
    """The keywords of a call with those of its plan filled in."""
    problem = plan.problem
    mask, score = asked.mask, asked.score
    return asked._replace(
        mask=mask if mask.text else Mask(problem.mask),
        score=score if score.text else Score(problem.score),
        scale=problem.scale,
        backend=plan.backend,
    )


def _describe(sign: tuple[Any, ...]) -> str:
    q, k, v = (list(shape) for shape in sign[:3])
    return f"q {q}, k {k}, v {v}, {sign[3]}, on {sign[6]}"


def _autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k, v in autocast's dtype, as scaled_dot_product_attention has them; float64 stays."""
    if not isinstance(q, Tensor) or q.is_meta or not _autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _AUTOCAST_FROM:
        return tensor
    return tensor.to(dtype)
