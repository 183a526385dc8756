"""Run one call: choose its road, and follow it from the arguments to a Result.

``road`` checks once what surrounds the call. ``run`` and ``run_paged`` branch on its answer:

- ``"eager"``: the kernel, by a cached or held plan. With gradients, one autograd node.
- ``"watched"``: the torch ops of ``ops.py``. Nested tensors are packed sequences here.
- ``"transformed"``: the derivatives of ``autograd.py`` (torch.func, forward mode).
- ``"transformed watched"``: what both can do together. The rest is refused.

The checks in ``road`` and in the eager part of ``run`` are ordered for low overhead of a small
eager call.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from tilewise.engine import ops
from tilewise.engine.autograd import attend, differentiable
from tilewise.engine.call import (
    NO_KEYWORDS,
    Keywords,
    build_operands,
    build_problem,
    cached_plan,
    check_call_scales,
    check_forward_only,
    reader,
    shown,
)
from tilewise.engine.modes import PLAIN, refuse_batched, refuse_constants, refuse_transforms
from tilewise.engine.paged import attend_pages, call_paged, refuse_paged_transforms
from tilewise.engine.pages import Pages
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.plan import Plan
from tilewise.problem import UNSEEN, Operands, Problem, Result, Statistics
from tilewise.torch_private import (
    any_autocast,
    dispatch_modes,
    functorch_active,
    in_forward_level,
    jit_tracing,
    left_alone,
)
from tilewise.validation import check_cu_tensors, check_page_tensors, check_sinks
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.values import Mask, Score

Road = Literal["eager", "watched", "transformed", "transformed watched"]

_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch.is_autocast_enabled
# What Operands(q, k, v, for_backward=..., out_alone=...) says, which takes three times as long.
_new = tuple.__new__
_NOTHING_ELSE = tuple(Operands._field_defaults.values())[:-2]
AUTOCAST_FROM = (torch.float32, torch.bfloat16, torch.float16)
_NESTED_FORM = "a nested tensor [B, H, j, D] of layout torch.jagged, ragged in dimension 2"


def road(q: Any, k: Any, v: Any, keywords: Keywords = NO_KEYWORDS) -> Road:
    """Return the road of a call with these tensors in the current context.

    Some programs watch torch's operations: torch.compile, a dispatch mode, torch.jit.trace, a
    tensor subclass, a meta tensor. They would not see the kernel behind an eager call, and would
    record its output as a constant. Such calls go through the torch ops.
    """
    plain = type(q) is type(k) is type(v) is Tensor  # quicker to ask than the sets
    watched = (
        _is_compiling()
        or dispatch_modes() > 0
        or (not plain and not PLAIN.issuperset((type(q), type(k), type(v))))
        or not (keywords.plain or PLAIN.issuperset(map(type, tensors_of(keywords))))
        or q.is_meta
        or jit_tracing() is not None
    )
    if functorch_active() or in_forward_level():
        return "transformed watched" if watched else "transformed"
    return "watched" if watched else "eager"


def tensors_of(keywords: Keywords) -> list[Tensor]:
    """Return the tensors of a call beside q, k and v."""
    mask, score, sinks, packed = keywords[0], keywords[1], keywords[4], keywords[6]
    others = (sinks, *(packed or ()), *(keywords.pages or ()), *keywords.scales)
    return [*mask.captured, *score.captured, *(x for x in others if x is not None)]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    seed: int | Tensor | None,
    plan: Plan | None = None,
    statistics: Statistics = "",
    out_alone: bool = False,
) -> Result:
    """Compute the requested attention (``functional.attention``), by a held plan if one is given.

    With ``out_alone``, read only the output from the result. ``out_alone`` excludes ``statistics``.
    """
    way = road(q, k, v, keywords)
    if way != "eager":
        if way == "watched":
            return _run_watched(q, k, v, keywords, seed, plan, statistics)
        if statistics:
            fix = "ask for return_stats outside of them"
            raise Unsupported("tilewise has no statistics inside of torch.func transforms", fix=fix)
        return _run_transformed(q, k, v, keywords, seed, plan, way == "transformed watched")
    if any_autocast():
        q, k, v = autocast(q, k, v)
    if plan is None:
        plan = cached_plan(q, k, v, keywords)
    else:
        _check_plan(plan, q, k, v, keywords)
    if q.is_neg() or k.is_neg() or v.is_neg():
        # The imaginary part of a conjugate: its sign is a flag that kernels do not see.
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    gradient = _grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (not keywords.plain and _captured_gradient(keywords))
    )
    bare, alone = seed is None and keywords.plain, out_alone and not gradient
    if bare and out_alone and plan.output is not None and not gradient:
        return _new(Result, (plan.output(q, k, v), *UNSEEN))
    if bare and not plan.problem.dropout_p:
        operands = _new(Operands, (q, k, v, *_NOTHING_ELSE, gradient, alone))
    else:
        operands = build_operands(plan.problem, q, k, v, keywords, seed, alone, gradient)
    if gradient:
        check_forward_only(q, k, v, keywords)
        return differentiable(operands, plan, statistics)
    result: Result = plan.forward(operands, statistics)
    return result


def run_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    plan: Plan | None = None,
    statistics: Statistics = "",
    out_alone: bool = False,
) -> Result:
    """Attention over pages as asked (``functional.attention_paged``), or through its op."""
    refuse_paged_transforms()
    way = road(q, k, v, keywords)
    if any_autocast():
        q, k, v = autocast(q, k, v)
    if way != "eager":
        if plan is not None:
            _check_keywords(plan, keywords)
            keywords = _keywords_of(plan, keywords)
        return call_paged(q, k, v, keywords, statistics)
    if plan is not None:
        _check_plan(plan, q, k, v, keywords)
    return attend_pages(q, k, v, keywords, plan, statistics, out_alone)


def _captured_gradient(keywords: Keywords) -> bool:
    """Return whether sinks, scales or something that the score captured may want a gradient."""
    tensors = (keywords.sinks, *keywords.scales, *keywords.score.captured)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _run_transformed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    seed: int | Tensor | None,
    plan: Plan | None,
    watched: bool,
) -> Result:
    """Attention inside of torch.func transforms or of a forward-mode level."""
    tensors = (q, k, v, keywords.sinks, *keywords.mask.captured, *keywords.score.captured)
    refuse_transforms(tensors, watched)
    if q.dtype is FLOAT8:
        raise Unsupported(
            "tilewise computes float8 forward only, and not inside of torch.func transforms or of "
            "forward-mode derivatives",
            fix="call it outside of them; to differentiate, compute in bfloat16",
        )
    if watched:
        return _run_watched(q, k, v, keywords, seed, plan, "")
    refuse_constants(keywords.score)
    refuse_batched(keywords.cu_seqlens)
    q, k, v = autocast(q, k, v)
    if plan is None:
        plan = cached_plan(q, k, v, keywords, wrapped=True)
    else:
        _check_plan(plan, q, k, v, keywords, wrapped=True)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    return attend(build_operands(plan.problem, q, k, v, keywords, seed), plan)


def _run_watched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    seed: int | Tensor | None,
    plan: Plan | None,
    statistics: Statistics,
) -> Result:
    """Attention through the torch ops; a held plan then only fills in keywords."""
    if any_nested(q, k, v):
        result = run(*_packed(q, k, v, keywords), seed, plan, statistics)
        return _nested(result, q)
    if plan is not None:
        _check_keywords(plan, keywords)
        keywords = _keywords_of(plan, keywords)
    q, k, v = autocast(q, k, v)
    return ops.call(q, k, v, keywords, seed, statistics)


@left_alone
def _check_plan(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, wrapped: bool = False
) -> None:
    """Refuse a held plan that is for another call (``wrapped``: as in ``cached_plan``)."""
    if keywords is not NO_KEYWORDS or type(plan) is not Plan or not plan.bare:
        _check_keywords(plan, keywords)
    try:
        made, read = (plan.shown, shown) if wrapped else (plan.signature, reader())
        same = made == read(q, k, v)
    except (TypeError, RuntimeError, BufferError):
        # A nested tensor has no shape: validation names it.
        build_problem(q, k, v, keywords)
        raise
    if not same:
        raise InvalidArgument(
            "plan",
            f"a plan for {_describe(plan.shown)}",
            f"one for {_describe(shown(q, k, v))}",
            "Make it with tilewise.plan() from tensors like these.",
        )


def _check_keywords(plan: Plan, keywords: Keywords) -> None:
    """Refuse a held plan that is for other keywords than the call's."""
    if type(plan) is not Plan:
        raise InvalidType("plan", f"a {type(plan).__name__}", "a Plan made by tilewise.plan()")
    problem = plan.problem
    mask, score, scale, dropout_p, sinks, backend, cu_seqlens, *_ = keywords
    pages = keywords.pages
    packed = cu_seqlens is not None if pages is None else pages.cu_seqlens_q is not None
    # Text with a "[" names slots: such a mask or score has tensors to bring.
    if (
        (mask.text != plan.mask_text and (mask.text or "[" in plan.mask_text))
        or (score.text != plan.score_text and (score.text or "[" in plan.score_text))
        or (scale is not None and scale != problem.scale)
        or dropout_p != problem.dropout_p
        or (backend is not None and backend != plan.backend)
        or (sinks is not None) != problem.sinks
        or packed != (problem.layout == "varlen")
        or (pages is not None) != (problem.page_size > 0)
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
    check_call_scales(problem, keywords.scales)
    if sinks is not None or cu_seqlens is not None:
        _check_plan_tensors(problem, sinks, cu_seqlens)
    if pages is not None:
        _check_plan_pages(problem, pages)


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


def _check_plan_pages(problem: Problem, pages: Pages) -> None:
    """The block table of a call by a held plan has the shape of the plan's."""
    check_page_tensors(*pages)
    made = (problem.batch, problem.keys // problem.page_size)
    if tuple(pages.block_table.shape) != made:
        raise InvalidArgument(
            "plan",
            f"a plan for a block table {list(made)}",
            f"one for {list(pages.block_table.shape)}",
        )


def _keywords_of(plan: Plan, keywords: Keywords) -> Keywords:
    """Return the keywords of a call with those of its plan filled in."""
    problem = plan.problem
    mask, score = keywords.mask, keywords.score
    return keywords._replace(
        mask=mask if mask.text else Mask(problem.mask),
        score=score if score.text else Score(problem.score),
        scale=problem.scale,
        backend=plan.backend,
    )


def _describe(sign: tuple[Any, ...]) -> str:
    q, k, v = (list(shape) for shape in sign[:3])
    return f"q {q}, k {k}, v {v}, {sign[3]}, on {sign[6]}"


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast brings a tensor to; None for what it leaves alone."""
    kind = x.device.type
    if x.dtype not in AUTOCAST_FROM or x.is_meta or not _autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast(q: Any, *others: Any) -> tuple[Any, ...]:
    """Tensors in autocast's dtype, as scaled_dot_product_attention has them; float64 stays."""
    if not isinstance(q, Tensor) or q.is_meta or not _autocast_enabled(q.device.type):
        return (q, *others)
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(
        [
            x.to(dtype) if isinstance(x, Tensor) and x.dtype in AUTOCAST_FROM else x
            for x in (q, *others)
        ]
    )


def any_nested(q: Any, k: Any, v: Any) -> bool:
    """Return whether a call has a nested tensor; of anything at all."""
    return any(getattr(x, "is_nested", False) is True for x in (q, k, v))


def _packed(q: Any, k: Any, v: Any, keywords: Keywords) -> tuple[Tensor, Tensor, Tensor, Keywords]:
    """Return the variable-length call that a nested one is.

    A nested tensor [B, H, j, D] is packed already: its values are [H, T, D] and its offsets are
    cu_seqlens. Nothing is padded and nothing is copied.
    """
    if keywords.cu_seqlens is not None:
        required = "packed tensors [T, H, D]: a nested tensor has its own lengths"
        raise InvalidArgument("q, k, v", "nested tensors", required, "Call attention.")
    named = (("q", q), ("k", k), ("v", v))
    kinds = [name for name, x in named if getattr(x, "is_nested", False)]
    if len(kinds) < 3:
        came = "a nested tensor beside one that is not"
        raise InvalidArgument(kinds[0], came, "q, k and v all nested, or none of them")
    for name, x in named:
        _check_nested(name, x)
    for name, x, like, other in (("k", k, q, "q"), ("v", v, k, "k")):
        if x.shape[0] != like.shape[0]:
            required = f"those of {other}, {like.shape[0]}"
            raise InvalidArgument(name, f"{x.shape[0]} sequences", required)
    if not _same_lengths(k, v):
        fix = "Make one from the other's offsets: torch.nested.nested_tensor_from_jagged."
        raise InvalidArgument("v", "sequences of other lengths than k's", "k's lengths", fix)
    cu_seqlens = (q.offsets(), k.offsets())
    rows_q, rows_k, rows_v = (x.values().transpose(0, 1) for x in (q, k, v))
    return (rows_q, rows_k, rows_v, keywords._replace(cu_seqlens=cu_seqlens, plain=False))


def _nested(result: Result, q: Any) -> Result:
    """Return a variable-length result with its rows nested as those of q; ``stats`` stay packed."""

    def of_rows(values: Tensor | None) -> Any:
        if values is None:
            return None
        return torch.nested.nested_tensor_from_jagged(values, q.offsets(), jagged_dim=2)

    return result._replace(
        out=of_rows(result.out.transpose(0, 1)),
        lse=of_rows(result.lse),
        max_logit=of_rows(result.max_logit),
        entropy=of_rows(result.entropy),
        top_key=of_rows(result.top_key),
    )


def _check_nested(name: str, x: Any) -> None:
    if x.layout is not torch.jagged:
        fix = "Make it with torch.nested.nested_tensor(parts, layout=torch.jagged)."
        raise InvalidArgument(name, f"a nested tensor of layout {x.layout}", _NESTED_FORM, fix)
    ragged = x._ragged_idx
    if x.dim() != 4 or ragged != 2:
        raise InvalidArgument(
            name,
            f"a nested tensor of {x.dim()} dimensions, ragged in dimension {ragged}",
            _NESTED_FORM,
            "x.unflatten(-1, (H, D)).transpose(1, 2) makes it of [B, j, H * D].",
        )
    if x.lengths() is not None:
        raise InvalidArgument(name, "a nested tensor with holes", "one without", "x.contiguous()")


def _same_lengths(k: Any, v: Any) -> bool:
    """Return whether two have the same lengths; on a device only a common origin can be seen."""
    if k.shape[2] == v.shape[2]:
        return True
    if _is_compiling() or not k.is_cpu:
        return False
    return torch.equal(k.offsets(), v.offsets())
