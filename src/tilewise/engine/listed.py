"""Calls with key lists: eagerly, and as the torch ops of traced calls.

Decoding a token by a list takes less than half a millisecond. An op around it adds 0.2 ms, and
0.6 ms with gradients, so eager calls go straight to ``ListedWork``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.engine.call import Keywords, build_operands
from tilewise.engine.dispatch import BACKEND_NAMES, candidates, check_name, plan_problem
from tilewise.engine.explanation import Explanation
from tilewise.engine.gathered import lists_at_once, small_problem
from tilewise.engine.key_lists import KeyBlocks, Listed, checked_key_lists, page_size
from tilewise.engine.listed_work import (
    Frame,
    ListedWork,
    OfLists,
    checked_call,
    frame_of,
    keywords_of,
    refuse,
    refuse_others,
    refuse_transforms,
)
from tilewise.engine.modes import PLAIN, readable, refuse_vmap, traced, transforms_active, wraps
from tilewise.engine.ops import (
    OpCall,
    absent,
    define,
    laid_out,
    promised,
    promised_gradients,
    result_of,
    returned,
    schema,
)
from tilewise.engine.paged import check_undifferentiated, refuse_gradient
from tilewise.engine.pages import Pages
from tilewise.engine.run import road
from tilewise.engine.shared_lists import MOST_ROWS, may_share
from tilewise.plan import Plan
from tilewise.problem import Needs, Operands, Problem, Result, Statistics
from tilewise.reference.merge import as_partial, merge_partial
from tilewise.torch_private import has_batch
from tilewise.variants.float8 import NO_SCALES, Scales, scales_of
from tilewise.variants.lower import Extent, lower_score, statistics_dtype
from tilewise.variants.program import encode
from tilewise.variants.values import Score

if TYPE_CHECKING:
    from tilewise.chips import Chip

_new = tuple.__new__


def attend_lists(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    lists: KeyBlocks,
    statistics: Statistics = "",
    out_alone: bool = False,
) -> Result:
    """Attention in which each query row reads the keys of its list alone.

    With ``out_alone``, read only the output from the result.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: dropout, queries in float8, raw scores, transforms; of paged keys gradients.
    """
    sinks = keywords.sinks
    if road(q, k, v, keywords) != "eager" or type(lists.indices) not in PLAIN:
        call, of_lists = lists_call(q, k, v, keywords, lists)
        found = torch.ops.tilewise.attention_lists(
            *call,
            *of_lists,
            statistics,
            # Autograd is above the op: only its caller knows whether it will ask for gradients.
            torch.is_grad_enabled()
            and any(x.requires_grad for x in (q, k, v, *call.score_tensors)),
            *keywords.scales[1:],
        )
        result = result_of(found[:6], statistics)
    else:
        frame = frame_of(q, k, v, keywords, lists)
        if keywords.pages is not None:
            check_undifferentiated(q, k, v, keywords)
        if keywords.score.program != frame.problem.score:
            # Kernels read the user's indices as dimensions that broadcast, and these have no wrong
            # ones: so they are looked at here.
            as_given = frame.problem._replace(score=keywords.score.program)
            build_operands(as_given, q, k, v, keywords._replace(sinks=None), None)
        leaves = (q, k, v, *keywords.score.captured)  # sinks come afterwards
        if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
            call, of_lists = lists_call(q, k, v, keywords, lists, frame)
            found = _Attend.apply(call, of_lists, statistics, q, k, v, *call.score_tensors)  # type: ignore[no-untyped-call]
            result = result_of(found[:6], statistics)
        else:
            alone = out_alone and sinks is None
            result = _at_once(q, k, v, keywords, lists, frame, statistics, alone)
    return result if sinks is None else _with_sinks(result, sinks)


def _at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    lists: KeyBlocks,
    frame: Frame,
    statistics: Statistics,
    out_alone: bool,
) -> Result:
    """Do as the forward op, eagerly and without gradients."""
    if keywords.score.captured:
        tensors = _score_tensors(frame.problem, keywords, q)
        keywords = keywords._replace(score=Score(frame.problem.score, tensors))
    work = ListedWork((q, k, v), keywords, lists.indices, frame)
    out, *rest = work.forward(statistics, False, out_alone)
    numbers = [None if x is None else _unseen(x) for x in rest]
    return _new(Result, (_unseen(laid_out(out, q)), *numbers))


def _unseen(x: Tensor) -> Tensor:
    """Return a result as no view: one made in no_grad could not be changed in place later."""
    return x.data


def _score_tensors(problem: Problem, keywords: Keywords, q: Tensor) -> tuple[Tensor, ...]:
    """Return what the score captured in kernel form, floats in the dtype of the statistics."""
    extent = Extent(problem.batch, problem.heads, 0, 0, ragged=True, check_values=False)
    if problem.layout == "dense" and keywords.pages is None:
        extent = extent._replace(queries=problem.queries, keys=problem.keys, ragged=False)
    score, wide = keywords.score, statistics_dtype(q.dtype)
    found = lower_score(score.program, score.captured, extent, q.dtype, q.device)
    return tuple([x.to(wide) if x.is_floating_point() else x for x in found])


def lists_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    lists: KeyBlocks,
    frame: Frame | None = None,
) -> tuple[OpCall, OfLists]:
    """Return a checked call as the ops take it, without its sinks; raises as ``attend_lists``.

    ``frame``: of the call, where it is known.
    """
    checked = checked_call(q, k, v, keywords, lists) if frame is None else frame[:3]
    problem, block, rows = checked
    score_tensors = _score_tensors(problem, keywords, q)
    indices = lists.indices
    cu_q, cu_k = keywords.cu_seqlens or (None, None)
    pages = keywords.pages or Pages(absent(indices), absent(indices), None)
    call = OpCall(
        q,
        k,
        v,
        list(keywords.mask.captured),
        list(score_tensors),
        None,
        None,
        cu_q if keywords.pages is None else pages.cu_seqlens_q,
        cu_k,
        keywords.mask.text,
        encode(problem.score),
        None if keywords.scale is None else problem.scale,
        0.0,
        keywords.backend,
    )
    return call, OfLists(indices, block, rows, pages.block_table, pages.key_lengths)


def explain_lists(
    problem: Problem,
    operands: Operands,
    device: torch.device,
    keywords: Keywords,
    lists: KeyBlocks,
    chip: Chip | None,
) -> Explanation:
    """Explain a call with key lists: its small problems, and what it moves beside a mask.

    It reads nothing of the operands but the lengths of sequences.
    """
    from tilewise.plan.traffic import InPlace, gathered_account
    from tilewise.plan.traffic.visits import lengths_of

    refuse_others(problem.dtype, keywords)
    indices, block, rows = checked_key_lists(lists, problem, device)
    many = indices.shape[-2] * (1 if problem.layout == "varlen" else problem.batch)
    share, width = problem.heads // problem.kv_heads, max(indices.shape[-1], 1) * block
    small = small_problem(problem, many * problem.kv_heads, rows * share, width)
    name = check_name(keywords.backend)
    plan = plan_problem(small, name)
    of_blocks = f" in blocks of {block}" if block > 1 else ""
    text = f"{many} of {width} keys{of_blocks}, each for {small.queries} rows of a key head"
    notes = (("lists", text), *keywords.mask.notes())
    together = [may_share(problem, rows, width, device, backward) for backward in (False, True)]
    if any(together):
        text = f"up to {MOST_ROWS} neighbours whose lists name mostly the same keys are one problem"
        text += "" if all(together) else ", in the backward pass alone"
        text += "; bytes below are those without it"
        notes += (("shared", text),)
    alone = problem.layout == "dense" and not problem.page_size
    paged = plan_problem(small._replace(page_size=page_size(block, problem.keys, alone)), name)
    in_place = None
    if not problem.page_size:
        notes += (("backward", _way_back(paged)),)
    if paged.in_place is not None:
        calls = -(-many // lists_at_once(problem.kv_heads, width))
        in_place = InPlace(paged.problem.page_size, calls)
    found = None
    if plan.loops is not None:
        loops = plan.loops
        if in_place is not None and paged.loops is not None:
            loops = loops._replace(backward=paged.loops.backward, keys=paged.loops.keys)
        bare = problem._replace(mask=(), score=())
        lengths = lengths_of(problem, operands)
        found = gathered_account(bare, many, small, loops, in_place, lengths)
    reasons = [
        (each.name, each.reasons or (f"it could, but {plan.backend!r} comes first",))
        for each in candidates(small, BACKEND_NAMES)
        if each.name != plan.backend
    ]
    return Explanation(plan, tuple(reasons), notes, found, chip)


def _way_back(paged: Plan) -> str:
    """Return how the backward of small problems in pages goes."""
    if paged.in_place is None:
        return "copies keys and values of a few lists at a time, for a core's cache"
    assert paged.loops is not None
    assert paged.loops.keys is not None
    tile = f"tiles of {paged.loops.keys[1]} keys"
    return f"reads keys where they lie; dK and dV by inverse lists, in {tile}"


def _with_sinks(result: Result, sinks: Tensor) -> Result:
    """Return the result with one more key for each head, whose value is 0."""
    out, lse, stats, max_logit, entropy, top_key = result
    nothing, sink = as_partial(sinks, out, lse)
    merged, total = merge_partial((out, nothing), (lse, sink))
    if entropy is not None:
        seen, there = lse != -math.inf, sink != -math.inf
        log_keys = torch.where(seen, lse - total, 0.0)
        log_sink = torch.where(there, sink - total, 0.0)
        entropy = log_keys.exp() * (entropy - log_keys) - log_sink.exp() * log_sink
        entropy = torch.where(seen, entropy, 0.0)
    return Result(merged, total, stats, max_logit, entropy, top_key)


class _Forward(NamedTuple):
    """What the forward op takes besides."""

    statistics: Statistics
    for_backward: bool
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class _Backward(NamedTuple):
    """The backward op's arguments before the call; the last two tensors are ``Listed``."""

    grad_out: Tensor
    grad_lse: Tensor | None
    grad_entropy: Tensor | None
    out: Tensor
    lse: Tensor
    stats: Tensor
    sets: Tensor
    counts: Tensor
    needs: Sequence[bool]


_CALLED, _OF_LISTS = len(OpCall._fields), len(OpCall._fields) + len(OfLists._fields)
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def work_of(
    call: OpCall,
    of_lists: OfLists,
    found: Listed | None = None,
    alone: bool = False,
    scales: Scales = NO_SCALES,
) -> ListedWork:
    """Return the work of a call as the ops take it: checked again, values included.

    It is that of the backward pass where the lists were found by the forward pass.
    """
    keywords = keywords_of(call, of_lists, scales)
    lists = KeyBlocks(of_lists.indices, of_lists.block, of_lists.query_block)
    frame = frame_of(*call[:3], keywords, lists)
    back = found is not None
    return ListedWork(call[:3], keywords, of_lists.indices, frame, found, alone, back)


def _work(
    call: OpCall, of_lists: OfLists, found: Listed | None = None, scales: Scales = NO_SCALES
) -> ListedWork:
    if transforms_active():  # a graph made outside of a transform comes straight here
        refuse_transforms()
    return work_of(call, of_lists, found, scales=scales)


def _attention_lists(*arguments: Any) -> tuple[Tensor, ...]:
    call, of_lists = OpCall(*arguments[:_CALLED]), OfLists(*arguments[_CALLED:_OF_LISTS])
    statistics, for_backward, *scales = _Forward(*arguments[_OF_LISTS:])
    work = _work(call, of_lists, scales=scales_of(None, *scales))
    return *returned(work.forward(statistics, for_backward), call.q), *work.listed


def _attention_lists_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, of_lists = OpCall(*arguments[:_CALLED]), OfLists(*arguments[_CALLED:_OF_LISTS])
    indices = of_lists.indices
    promise = promised(call.q, call.v.shape[-1], arguments[_OF_LISTS])
    packed = call.q.dim() == 3
    lists = indices.shape[1] if packed else indices.shape[0] * indices.shape[2]
    sets = (lists, indices.shape[-3], max(indices.shape[-1], 1))
    return (
        *promise,
        indices.new_empty(sets, dtype=torch.int32),
        indices.new_empty(sets[:2], dtype=torch.int64),
    )


_GIVEN = len(_Backward._fields)


def _backward(*arguments: Any) -> list[Tensor]:
    given, rest = _Backward(*arguments[:_GIVEN]), arguments[_GIVEN:]
    call, of_lists = OpCall(*rest[:_CALLED]), OfLists(*rest[_CALLED:])
    work = _work(call, of_lists, Listed(given.sets, given.counts))
    need_q, need_k, need_v, *need_scores = given.needs
    needs = Needs(need_q, need_k, need_v, tuple(need_scores))
    by_lse, by_entropy = (None if x is None else readable(x) for x in given[1:3])
    by_q, by_k, by_v, of_score = work.backward(
        Result(given.out, given.lse, given.stats),
        readable(given.grad_out),
        by_lse,
        by_entropy,
        needs,
    )
    if call.q.dim() == 3:
        by_k, by_v = (None if x is None else x[0].transpose(0, 1) for x in (by_k, by_v))
    found = [
        absent(like) if grad is None else laid_out(grad, like)
        for grad, like in zip((by_q, by_k, by_v), call[:3], strict=True)
    ]
    return [*found, *(absent(call.q) if grad is None else grad for grad in of_score)]


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given, call = _Backward(*arguments[:_GIVEN]), OpCall(*arguments[_GIVEN : _GIVEN + _CALLED])
    return promised_gradients(call, given.needs, call.score_tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (statistics, for_backward, *_) = inputs[:_OF_LISTS], _Forward(*inputs[_OF_LISTS:])
    out, lse, stats, max_logit, entropy, top_key, *sets = output
    ctx.mark_non_differentiable(stats, max_logit, top_key, *sets)
    if not statistics:
        ctx.mark_non_differentiable(entropy)
    ctx.set_materialize_grads(False)
    ctx.sizes = len(call[3]), len(call[4])
    tensors = [x for x in (*call[:3], *call[3], *call[4]) if x is not None]
    ctx.again = None if for_backward else statistics
    ctx.rest = call[9:_CALLED], call[_CALLED + 1 : _CALLED + 3]
    of_lists = OfLists(*call[_CALLED:])
    found = (of_lists.indices, of_lists.block_table, of_lists.key_lengths)
    ctx.save_for_backward(out, lse, stats, *sets, call[7], call[8], *found, *tensors)


def _op_backward(ctx: Any, grad_out: Tensor | None, *grads: Tensor | None) -> Any:
    needs, masks = ctx.needs_input_grad, ctx.sizes[0]
    of_scores = list(needs[4]) if ctx.sizes[1] else []
    of_inputs, of_score = _gradients(ctx, list(needs[:3]), of_scores, (grad_out, *grads))
    return (*of_inputs, [None] * masks, of_score, *(None,) * (len(needs) - 5))


def _gradients(
    ctx: Any,
    needs: list[bool],
    of_scores: list[bool],
    grads: tuple[Tensor | None, ...],
    at_once: bool = False,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of q, k and v, and of the score's tensors; None where not needed.

    ``at_once``: by the kernel of the backward op, without the op.
    """
    out, lse, stats, sets, counts, cu_q, cu_k, indices, table, lengths, *x = ctx.saved_tensors
    if table.dim() == 2:
        refuse_gradient()
    masks = ctx.sizes[0]
    text, blocks = ctx.rest
    captured = x[3 : 3 + masks], x[3 + masks :]
    call = (*x[:3], *captured, None, None, cu_q, cu_k, *text, indices, *blocks, table, lengths)
    if ctx.again is not None:
        # Traced where nothing wanted a gradient: the forward pass was not one for this pass.
        out, lse, stats, *_ = torch.ops.tilewise.attention_lists(*call, ctx.again, True)
    backward = _backward if at_once else torch.ops.tilewise.attention_lists_backward
    found = backward(
        torch.zeros_like(out) if grads[0] is None else grads[0],
        grads[1],
        grads[4],
        *(out, lse, stats, sets, counts),
        [*needs, *of_scores],
        *call,
    )
    of_inputs = [grad if need else None for grad, need in zip(found[:3], needs, strict=True)]
    return of_inputs, [
        grad if need else None for grad, need in zip(found[3:], of_scores, strict=True)
    ]


class _Attend(torch.autograd.Function):
    """An eager call with gradients: what the ops compute, without the ops."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, of_lists: OfLists, statistics: Statistics, *_: Tensor
    ) -> tuple[Tensor, ...]:
        """Do as the forward op; ``_`` are the tensors of the call that may want a gradient."""
        inputs = (*call, *of_lists, statistics, True)
        output = tuple([_unseen(x) for x in _attention_lists(*inputs)])
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Do as the backward op; by it where that is watched or derivatives of it are wanted."""
        needs = list(ctx.needs_input_grad[3:])
        watched = traced() or any(x is not None and (wraps(x) or has_batch(x)) for x in grads)
        at_once = not (watched or torch.is_grad_enabled() or transforms_active())
        of_inputs, of_score = _gradients(ctx, needs[:3], needs[3:], grads, at_once)
        return (None, None, None, *of_inputs, *of_score)


def _refuse_second(*_: Any) -> NoReturn:
    refuse("second derivative", "take one gradient, without create_graph=True")


define(
    "attention_lists",
    _attention_lists,
    _attention_lists_fake,
    schema(_RESULTS, OpCall, OfLists, _Forward),
    backward=_op_backward,
    save=_setup_context,
    vmap=refuse_vmap,
)
define(
    "attention_lists_backward",
    _backward,
    _backward_fake,
    schema("Tensor[]", _Backward, OpCall, OfLists),
    backward=_refuse_second,
    vmap=refuse_vmap,
)
