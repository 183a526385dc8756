"""The torch ops, which torch.compile, torch.export and other tracers see of tilewise.

An op carries q, k, v, the captured tensors and the variant as text without shapes. The Problem is
completed inside, so one graph serves every shape. Eager calls do not come here, because a Python op
costs 10 to 25 us a call. They go through ``autograd.py``, over the same kernels.

``define`` registers these ops and all others of tilewise.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from tilewise.engine.call import (
    Keywords,
    build_operands,
    build_problem,
    cached_plan,
    check_forward_only,
    draw_seed,
    read_keywords,
)
from tilewise.engine.modes import (
    refuse_forward_mode,
    refuse_second_derivative,
    refuse_vmap,
    transforms_active,
)
from tilewise.engine.pages import Pages
from tilewise.kernels import stats_of
from tilewise.plan import Plan
from tilewise.problem import Needs, Operands, Problem, Result, Statistics, output_like
from tilewise.reference.philox import seed_tensor
from tilewise.torch_private import jit_tracing
from tilewise.validation import lower_sinks
from tilewise.variants.float8 import FLOAT8, NO_SCALES, Scales, refuse_backward, scales_of
from tilewise.variants.lower import Extent, lower_score, statistics_dtype
from tilewise.variants.program import decode, encode, fitted
from tilewise.variants.values import Mask, Score


def define(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None = None,
    *,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> None:
    """Define ``torch.ops.tilewise.NAME``, which changes none of its arguments.

    Each definition looks for the source of its caller. The first one in a file reads the paths of
    all modules that are loaded, a millisecond beside torch. So all ops come through this file.

    The kernel computes the op on any device. ``fake`` returns tensors like the kernel's, without
    values. The schema is that of the kernel's annotations if None. ``backward`` and ``save`` are
    its derivative and ``setup_context``, as ``torch.library.register_autograd`` takes them; without
    these a backward pass through the op raises. ``vmap`` is its batching rule.
    """
    op = torch.library.custom_op(f"tilewise::{name}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    if vmap is not None:
        op.register_vmap(vmap)


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    seed: int | Tensor | None,
    statistics: Statistics = "",
) -> Result:
    """Attention through the op, while tracing or over tensors that are not plain."""
    problem = build_problem(q, k, v, keywords)
    check_forward_only(q, k, v, keywords)
    # Biases and sinks are brought to kernel form out here, where autograd sees it.
    score_tensors = lower_score(
        keywords.score.program, keywords.score.captured, _traced_extent(problem), q.dtype, q.device
    )
    if seed is None and problem.dropout_p > 0:
        seed = draw_seed(q.device)
    elif isinstance(seed, int):
        seed = seed_tensor(seed, q.device)
    sinks = lower_sinks(keywords.sinks, q.dtype)
    leaves = (q, k, v, *score_tensors) if sinks is None else (q, k, v, *score_tensors, sinks)
    cu_q, cu_k = keywords.cu_seqlens or (None, None)
    found = torch.ops.tilewise.attention(
        q,
        k,
        v,
        list(keywords.mask.captured),
        list(score_tensors),
        sinks,
        seed,
        cu_q,
        cu_k,
        keywords.mask.text,
        encode(fitted(keywords.score.program)),
        None if keywords.scale is None else problem.scale,
        problem.dropout_p,
        keywords.backend,
        statistics,
        *keywords.scales,
        # A graph of torch.jit.trace serves calls with gradients and without, as it was traced.
        jit_tracing() is not None
        or (torch.is_grad_enabled() and any(x.requires_grad for x in leaves)),
    )
    return result_of(found, statistics)


def result_of(found: tuple[Tensor, ...], statistics: Statistics) -> Result:
    """Return what an op returned as a result."""
    out, lse, stats, max_logit, entropy, top_key = found
    if not statistics:
        return Result(out, lse, stats)
    return Result(out, lse, stats, max_logit, entropy, top_key if statistics == "top1" else None)


def _traced_extent(problem: Problem) -> Extent:
    """Return the extent known while tracing: all of a dense call, no lengths of packed ones."""
    ragged = problem.layout == "varlen"
    queries, keys = (0, 0) if ragged else (problem.queries, problem.keys)
    return Extent(problem.batch, problem.heads, queries, keys, ragged, check_values=False)


class OpCall(NamedTuple):
    """What the forward and the backward op take of a call, in this order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask_tensors: Sequence[Tensor]
    score_tensors: Sequence[Tensor]
    sinks: Tensor | None
    seed: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    mask: str
    score: str
    scale: float | None
    dropout_p: float
    backend: str | None

    def keywords(self, scales: Scales = NO_SCALES, pages: Pages | None = None) -> Keywords:
        """Return the keywords of the call; with pages its ``cu_seqlens`` do not count."""
        cu_seqlens = None
        if pages is None and self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            cu_seqlens = (self.cu_seqlens_q, self.cu_seqlens_k)
        return read_keywords(
            Mask(decode(self.mask), tuple(self.mask_tensors)),
            Score(decode(self.score), tuple(self.score_tensors)),
            self.scale,
            self.dropout_p,
            self.sinks,
            self.backend,
            cu_seqlens,
            pages,
            scales,
        )


class _Forward(NamedTuple):
    """What the forward op takes besides."""

    statistics: Statistics
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    for_backward: bool = True


class _Backward(NamedTuple):
    """The backward op's arguments before the call."""

    grad_out: Tensor
    grad_lse: Tensor | None
    grad_entropy: Tensor | None
    out: Tensor
    lse: Tensor
    stats: Tensor | None
    needs: Sequence[bool]


class _Partial(NamedTuple):
    """The backward op's arguments after the call."""

    partial: bool = False


def schema(returns: str, *groups: Any) -> str:
    """Return the schema of an op that takes the fields of these named tuples, in their order."""
    fields = []
    for group in groups:
        for name, annotation in get_type_hints(group).items():
            default = f"={group._field_defaults[name]}" if name in group._field_defaults else ""
            fields.append(f"{_SCHEMA_TYPES[annotation]} {name}{default}")
    return f"({', '.join(fields)}) -> {returns}"


_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[bool]: "bool[]",
    str: "str",
    Statistics: "str",
    str | None: "str?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    int: "int",
}


def _planned(call: OpCall, keywords: Keywords) -> tuple[Plan, Operands]:
    """The plan and operands of an op call over real tensors: checked again, values included."""
    if transforms_active():
        # A graph made outside of a forward-mode level and run inside of one comes straight here.
        refuse_forward_mode()
    q, k, v = call.q, call.k, call.v
    plan = cached_plan(q, k, v, keywords)
    return plan, build_operands(plan.problem, q, k, v, keywords, call.seed)


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in exactly the memory order that the fake kernel promises (``output_like``)."""
    swapped = like.dim() == 4 and like.stride(2) > like.stride(1)
    plain = tensor.transpose(1, 2) if swapped else tensor
    if plain.is_contiguous():
        return tensor
    return output_like(like, tensor.shape[-1]).copy_(tensor)


def own(tensor: Tensor) -> Tensor:
    """The tensor at the start of its memory: a backend may cut several out of one allocation."""
    at_start = tensor.is_contiguous() and tensor.storage_offset() == 0
    return tensor if at_start else tensor.clone(memory_format=torch.contiguous_format)


RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_CALLED = len(OpCall._fields)


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, more = OpCall(*arguments[:_CALLED]), _Forward(*arguments[_CALLED:])
    keywords = call.keywords(scales_of(more.q_scale, more.k_scale, more.v_scale))
    plan, operands = _planned(call, keywords)
    # Autograd is above the op: only whoever called it knows whether it will ask for gradients.
    operands = operands._replace(for_backward=more.for_backward)
    return returned(plan.forward(operands, more.statistics), call.q)


def returned(result: Result, q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a result as an op returns it; ``promised`` says how."""
    out, lse, stats = laid_out(result.out, q), own(result.lse), own(result.stats)
    max_logit, entropy, top_key = (
        lse.new_empty((0,), dtype=dtype) if found is None else own(found)
        for found, dtype in zip(result[3:], (lse.dtype, lse.dtype, torch.int64), strict=True)
    )
    return out, lse, stats, max_logit, entropy, top_key


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    call, more = OpCall(*arguments[:_CALLED]), _Forward(*arguments[_CALLED:])
    return promised(call.q, call.v.shape[-1], more.statistics)


def promised(
    q: Tensor, width: int, statistics: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what an op over q, dense or packed, returns for values of a width: without values."""
    rows = q.shape[:-1] if q.dim() == 4 else (q.shape[1], q.shape[0])
    dtype = statistics_dtype(q.dtype)
    facts = rows if statistics else (0,)
    return (
        output_like(q, width),
        q.new_empty(rows, dtype=dtype),
        q.new_empty((3 if statistics else 2, *rows), dtype=dtype),
        q.new_empty(facts, dtype=dtype),
        q.new_empty(facts, dtype=dtype),
        q.new_empty(rows if statistics == "top1" else (0,), dtype=torch.int64),
    )


def _backward_groups(arguments: tuple[Any, ...]) -> tuple[_Backward, OpCall, _Partial]:
    first = len(_Backward._fields)
    last = first + _CALLED
    return (
        _Backward(*arguments[:first]),
        OpCall(*arguments[first:last]),
        _Partial(*arguments[last:]),
    )


def _backward(*arguments: Any) -> list[Tensor]:
    given, call, (partial,) = _backward_groups(arguments)
    plan, operands = _planned(call, call.keywords())
    needs, stats = given.needs, given.stats
    wanted = Needs(needs[0], needs[1], needs[2], tuple(needs[4:]), needs[3], partial)
    if stats is None:  # another library made lse
        stats = stats_of(given.lse, plan.row_max_unit)
    result = Result(given.out, given.lse, stats)
    grads = plan.backward(
        operands, result, given.grad_out, given.grad_lse, wanted, given.grad_entropy
    )
    found = [
        *(
            absent(like) if grad is None else laid_out(grad, like)
            for grad, like in zip((grads.q, grads.k, grads.v), call[:3], strict=True)
        ),
        absent(call.q) if grads.sinks is None else own(grads.sinks),
    ]
    for index, tensor in enumerate(call.score_tensors):
        grad = grads.score_tensors[index] if index < len(grads.score_tensors) else None
        found.append(absent(call.q) if grad is None else own(grad.to(tensor.dtype)))
    return found


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given, call, _ = _backward_groups(arguments)
    return promised_gradients(call, given.needs, (call.sinks, *call.score_tensors))


def promised_gradients(
    call: OpCall, needs: Sequence[bool], captured: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return what a backward op returns for q, k, v and what is captured: without values."""
    found = [
        output_like(like, like.shape[-1]) if need else absent(like)
        for need, like in zip(needs[:3], call[:3], strict=True)
    ]
    for need, like_or_none in zip(needs[3:], captured, strict=True):
        like = call.q if like_or_none is None else like_or_none
        found.append(like.new_empty(like.shape) if need else absent(call.q))
    return found


def absent(like: Tensor) -> Tensor:
    """Stands for what was not wanted: an op must return a tensor."""
    return like.new_empty((0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask_tensors, score_tensors, sinks, seed, cu_q, cu_k, *constants = inputs
    out, lse, stats, max_logit, _, top_key = output
    *constants, statistics, _, _, _, for_backward = constants
    ctx.mask_count, ctx.constants = len(mask_tensors), tuple(constants)
    ctx.statistics_again = None if for_backward else statistics
    fixed = (stats, max_logit, top_key) if statistics else output[2:]
    ctx.mark_non_differentiable(*fixed)
    ctx.set_materialize_grads(False)
    saved = (out, lse, stats, q, k, v, sinks, seed, cu_q, cu_k)
    ctx.save_for_backward(*saved, *mask_tensors, *score_tensors)


def _op_backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    _stats: Any,
    _max_logit: Any,
    grad_entropy: Tensor | None,
    _top_key: Any,
) -> Any:
    out, lse, stats, q, k, v, sinks, seed, cu_q, cu_k, *captured = ctx.saved_tensors
    if q.dtype is FLOAT8:
        refuse_backward()
    mask_tensors, score_tensors = captured[: ctx.mask_count], captured[ctx.mask_count :]
    need_q, need_k, need_v, _, need_scores, need_sinks, *_ = ctx.needs_input_grad
    need_scores = list(need_scores) if score_tensors else []
    call = (q, k, v, mask_tensors, score_tensors, sinks, seed, cu_q, cu_k, *ctx.constants)
    if ctx.statistics_again is not None:
        # Traced where nothing wanted a gradient: the forward pass was not one for this pass.
        out, lse, stats, *_ = torch.ops.tilewise.attention(*call, ctx.statistics_again)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs = [need_q, need_k, need_v, need_sinks, *need_scores]
    grads = torch.ops.tilewise.attention_backward(
        grad_out, grad_lse, grad_entropy, out, lse, stats, needs, *call
    )
    return (
        grads[0] if need_q else None,
        grads[1] if need_k else None,
        grads[2] if need_v else None,
        [None] * len(mask_tensors),
        [grad if need else None for grad, need in zip(grads[4:], need_scores, strict=True)],
        grads[3] if need_sinks else None,
        # torch leaves out what stands at its default at the end.
        *(None,) * (len(ctx.needs_input_grad) - 6),
    )


define(
    "attention",
    _attention,
    _attention_fake,
    schema(RESULTS, OpCall, _Forward),
    backward=_op_backward,
    save=_setup_context,
    vmap=refuse_vmap,
)
define(
    "attention_backward",
    _backward,
    _backward_fake,
    schema("Tensor[]", _Backward, OpCall, _Partial),
    backward=refuse_second_derivative,
    vmap=refuse_vmap,
)
