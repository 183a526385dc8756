"""Calls whose keys lie in pages: eagerly, and as the torch op that everything that traces sees.

There are no gradients: a call that could want one is refused, and so are transforms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.engine.call import Keywords, build_operands, build_problem, cached_plan, read_keywords
from tilewise.engine.modes import refuse_vmap, transforms_active
from tilewise.engine.ops import RESULTS, define, promised, result_of, returned, schema
from tilewise.engine.pages import Pages
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.plan import Plan
from tilewise.problem import UNSEEN, Problem, Result, Statistics
from tilewise.variants.float8 import scales_of
from tilewise.variants.program import decode
from tilewise.variants.values import Mask, Score

_new = tuple.__new__


def refuse_paged_transforms() -> None:
    """Refuse a call inside of torch.func transforms or of a forward-mode level."""
    if transforms_active():
        raise Unsupported(
            "tilewise has no torch.func transforms and no forward-mode derivatives of paged keys",
            fix="call attention_paged outside of them",
        )


def check_undifferentiated(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords) -> None:
    """Refuse a call that could want a gradient."""
    tensors = (q, k, v, keywords.sinks, *keywords.scales, *keywords.score.captured)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        refuse_gradient()


def check_rows(problem: Problem, k: Tensor, v: Tensor, keywords: Keywords) -> None:
    """Rows in 8 bits: each has a scale, and its numbers next to one another."""
    if problem.stored is None:
        return
    required = f"[{k.shape[0]}, {problem.kv_heads}, {problem.page_size}], one for each row"
    for letter, pages, scale in (("k", k, keywords.scales.k), ("v", v, keywords.scales.v)):
        if scale is None or scale.shape[0] != k.shape[0]:
            came = "None" if scale is None else f"shape {tuple(scale.shape)}"
            fix = f"Or pass pages in q's dtype, {problem.dtype}." if scale is None else ""
            came += f" for pages of {problem.stored}"
            raise InvalidArgument(f"{letter}_scale", came, required, fix)
        if pages.shape[3] > 1 and pages.stride(3) != 1:
            came = f"stride {pages.stride(3)} in its last dimension"
            raise InvalidArgument(f"{letter}_pages", came, "1 for numbers in 8 bits")


def refuse_gradient(*_: Any) -> NoReturn:
    """Raise Unsupported: the derivative of calls with pages."""
    raise Unsupported(
        "tilewise has no gradients of paged keys",
        fix="call attention_paged in torch.no_grad() or inference_mode(), or detach; to "
        "differentiate, lay the keys out one after the other for attention or attention_varlen",
    )


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    plan: Plan | None,
    statistics: Statistics,
    out_alone: bool = False,
) -> Result:
    """Attention over plain tensors, by a held plan if one is given."""
    if plan is None:
        plan = cached_plan(q, k, v, keywords)
    check_undifferentiated(q, k, v, keywords)
    check_rows(plan.problem, k, v, keywords)
    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    step, output = keywords.step, plan.output if out_alone and not statistics else None
    if step is not None and output is not None and step.covers(plan.problem, k.shape[0]):
        return _new(Result, (output(q, k, v, *step.pages), *UNSEEN))
    operands = build_operands(plan.problem, q, k, v, keywords, None, out_alone)
    result: Result = plan.forward(operands, statistics)
    return result


def call_paged(
    q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, statistics: Statistics
) -> Result:
    """Attention through the op, while tracing or over tensors that are not plain."""
    problem = build_problem(q, k, v, keywords)
    check_undifferentiated(q, k, v, keywords)
    check_rows(problem, k, v, keywords)
    assert keywords.pages is not None
    if keywords.step is not None:
        keywords.step.covers(problem, k.shape[0])
    found = torch.ops.tilewise.attention_paged(
        q,
        k,
        v,
        *keywords.pages,
        list(keywords.mask.captured),
        list(keywords.score.captured),
        keywords.sinks,
        keywords.mask.text,
        keywords.score.text,
        None if keywords.scale is None else problem.scale,
        keywords.backend,
        statistics,
        *keywords.scales,
    )
    return result_of(found, statistics)


class _Call(NamedTuple):
    """What the op takes, in this order."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    key_lengths: Tensor
    cu_seqlens_q: Tensor | None
    mask_tensors: Sequence[Tensor]
    score_tensors: Sequence[Tensor]
    sinks: Tensor | None
    mask: str
    score: str
    scale: float | None
    backend: str | None
    statistics: Statistics
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def _attention_paged(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _Call(*arguments)
    keywords = read_keywords(
        Mask(decode(call.mask), tuple(call.mask_tensors)),
        Score(decode(call.score), tuple(call.score_tensors)),
        call.scale,
        0.0,
        call.sinks,
        call.backend,
        pages=Pages(call.block_table, call.key_lengths, call.cu_seqlens_q),
        scales=scales_of(call.q_scale, call.k_scale, call.v_scale),
    )
    # A graph made outside of a transform and run inside of one comes straight here.
    refuse_paged_transforms()
    result = attend_pages(call.q, call.k_pages, call.v_pages, keywords, None, call.statistics)
    return returned(result, call.q)


def _attention_paged_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _Call(*arguments)
    return promised(call.q, call.v_pages.shape[-1], call.statistics)


define(
    "attention_paged",
    _attention_paged,
    _attention_paged_fake,
    schema(RESULTS, _Call),
    backward=refuse_gradient,
    vmap=refuse_vmap,
)
