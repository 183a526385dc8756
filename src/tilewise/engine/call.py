"""Plan a call and build its operands, for the eager path and the torch ops.

This code is written for low overhead. A call that was made before costs one tuple and one dict
lookup. When the lookup misses, all checks run. Checks of values or captured tensors run on every
call. ``Call`` has a plan without tensors: autograd Functions take and give those as flat lists.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engine.dispatch import PLANS, check_name, load, plan_problem, tensor_reader
from tilewise.engine.pages import PagedStep, Pages, counts_of, lower_pages, signs
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.plan import Plan
from tilewise.problem import START, Grads, Needs, Operands, Problem
from tilewise.reference.philox import seed_tensor
from tilewise.reference.programs import check_indices
from tilewise.torch_private import is_batched, left_alone, without_wrappers
from tilewise.validation import (
    check_cu_seqlens,
    dense_problem,
    lower_sinks,
    paged_problem,
    varlen_problem,
)
from tilewise.variants.float8 import (
    FLOAT8,
    NO_SCALES,
    Scales,
    check_row_scales,
    check_scales,
    lower_scales,
    refuse_gradients,
)
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.outside import is_checked, refuse_outside
from tilewise.variants.values import Mask, Score, as_mask, as_score

_NO_MASK = Mask(())
_NO_SCORE = Score(())
# What reading a tensor raises that has no shape (nested), no memory, or is none.
UNREADABLE = (AttributeError, TypeError, RuntimeError, BufferError)


class Keywords(NamedTuple):
    """Arguments of a call other than q, k and v: the keywords of ``functional.attention``, read."""

    mask: Mask
    score: Score
    scale: float | None
    dropout_p: float
    sinks: Tensor | None
    backend: str | None
    # The pair (queries, keys) of a variable-length call, or None.
    cu_seqlens: tuple[Tensor, Tensor] | None
    plain: bool  # no tensor beside q, k and v comes with the call
    pages: Pages | None = None  # what finds the keys of a paged call, whose ``cu_seqlens`` is None
    scales: Scales = NO_SCALES  # of float8 q, k and v
    step: PagedStep | None = None  # what ``pages`` come from, if it was checked before the call


def read_keywords(
    mask: object,
    score: object,
    scale: float | None,
    dropout_p: float,
    sinks: Tensor | None,
    backend: str | None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    pages: Pages | None = None,
    scales: Scales = NO_SCALES,
    step: PagedStep | None = None,
) -> Keywords:
    """The keywords of a call as one value; mask and score as programs, empty ones for None."""
    read_mask = _NO_MASK if mask is None else as_mask(mask)
    read_score = _NO_SCORE if score is None else score if type(score) is Score else as_score(score)
    captured = len(read_mask.captured) + len(read_score.captured)
    alone = cu_seqlens is None and pages is None and scales is NO_SCALES
    plain = captured == 0 and sinks is None and alone
    numbers = (scale, dropout_p)
    return Keywords(
        read_mask, read_score, *numbers, sinks, backend, cu_seqlens, plain, pages, scales, step
    )


NO_KEYWORDS = read_keywords(None, None, None, 0.0, None, None)


def shown(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return what a plan depends on in q, k and v, read in Python; without strides."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        q.layout,
        k.layout,
        v.layout,
    )


@cache
def reader() -> Callable[[Tensor, Tensor, Tensor], Hashable]:
    """Return a reader of the same for tensors with memory: a backend's if one is quicker."""
    return tensor_reader() or shown


@left_alone
def cached_plan(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, wrapped: bool = False) -> Plan:
    """Return the plan of a call, made at its first time.

    ``wrapped``: transforms may have put wrappers without memory around the tensors.
    """
    try:
        if keywords is NO_KEYWORDS and not wrapped:
            key: Hashable = reader()(q, k, v)
            return PLANS.young[key]
        key = shown(q, k, v) if wrapped else reader()(q, k, v), keywords_key(keywords)
        return PLANS.young[key]
    except KeyError:
        plan = PLANS.find(key)
    except UNREADABLE:
        # That, or something is not hashable: validation names it.
        return make_plan(q, k, v, keywords)
    if plan is None:
        plan = make_plan(q, k, v, keywords)
        PLANS.add(key, plan)
    return plan


def keywords_key(keywords: Keywords) -> tuple[Any, ...]:
    """Return what a plan depends on beside q, k and v; values of tensors are not read."""
    mask, score, scale, dropout_p, _, backend, _, plain, *_ = keywords
    return (
        mask.text,
        score.text,
        scale,
        type(scale),  # True is 1.0, and no scale
        dropout_p,
        type(dropout_p),
        backend,
        None if plain else _tensors_key(keywords),
    )


def _tensors_key(keywords: Keywords) -> tuple[Any, ...]:
    """Return what a plan depends on in sinks, cu_seqlens, pages and scales."""
    if keywords.step is not None:
        return keywords.step.signs, signs(keywords.sinks, *keywords.scales)
    packed = keywords.cu_seqlens or (None, None)
    return signs(keywords.sinks, *packed, *(keywords.pages or ()), *keywords.scales)


@left_alone
def make_plan(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords) -> Plan:
    """Return the plan of a call, from nothing."""
    problem = build_problem(q, k, v, keywords)
    plan = plan_problem(problem, check_name(keywords.backend))
    # Text with a "[" names slots: such a mask or score has tensors to bring at every call.
    bare = (
        not (problem.dropout_p or problem.sinks or keywords.cu_seqlens is not None)
        and keywords.pages is None
        and "[" not in plan.mask_text + plan.score_text
    )
    try:
        signature = reader()(q, k, v)
    except UNREADABLE:
        signature = None
    return plan._replace(signature=signature, shown=shown(q, k, v), bare=bare)


def build_problem(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords) -> Problem:
    """Return the problem of a call, checked (all but captured tensors and values)."""
    problem = _problem_of(q, k, v, keywords)
    check_call_scales(problem, keywords.scales)
    return problem


def check_call_scales(problem: Problem, scales: Scales) -> None:
    """The scales of a call are for its operands."""
    if problem.stored is not None:
        check_row_scales(scales, problem.kv_heads, problem.page_size, problem.device)
    elif scales is not NO_SCALES:
        heads = (problem.heads, problem.kv_heads, problem.kv_heads)
        check_scales(scales, problem.dtype, problem.batch, heads, problem.device)


def _problem_of(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords) -> Problem:
    mask, score, scale, dropout_p, sinks, *_ = keywords
    asked: dict[str, Any] = {"mask": mask.program, "score": score.program}
    asked |= {"scale": scale, "dropout_p": dropout_p, "sinks": sinks}
    if keywords.pages is not None:
        return paged_problem(q, k, v, *keywords.pages, **asked)
    if keywords.cu_seqlens is None:
        return dense_problem(q, k, v, **asked)
    return varlen_problem(q, k, v, *keywords.cu_seqlens, **asked)


def build_operands(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    seed: int | Tensor | None,
    out_alone: bool = False,
    for_backward: bool = False,
) -> Operands:
    """Return the operands in kernel form; captured tensors, cu_seqlens and seed are checked."""
    cu_q = cu_k = block_table = key_lengths = None
    mask_tensors, score_tensors = keywords.mask.captured, keywords.score.captured
    extent = Extent(problem.batch, problem.heads, problem.queries, problem.keys)
    if keywords.pages is not None:
        stays = _stay_on_device(problem, keywords)
        pages, step = keywords.pages, keywords.step
        if step is not None and step.covers(problem, k.shape[0]) and not stays:
            extent = step.extent(problem) if mask_tensors or score_tensors else extent
        else:
            pages, extent = lower_pages(problem, pages, q, k, stays)
        block_table, key_lengths, cu_q = pages
    elif keywords.cu_seqlens is not None:
        cu_q, cu_k = keywords.cu_seqlens
        stays = _stay_on_device(problem, keywords)
        starts: list[list[int]] = []
        if not stays or is_checked():
            starts = [
                check_cu_seqlens("cu_seqlens_q", cu_q, problem.queries),
                check_cu_seqlens("cu_seqlens_k", cu_k, problem.keys),
            ]
        device = q.device if stays else torch.device("cpu")
        cu_q = cu_q.to(device, torch.int64).contiguous()
        cu_k = cu_k.to(device, torch.int64).contiguous()
        if mask_tensors or score_tensors:
            # Without starts only the kernels know the lengths.
            extent = extent._replace(queries=0, keys=0, ragged=True)
            extent = ragged_extent(problem, *starts) if starts else extent
    if mask_tensors or score_tensors:
        refuse_outside(problem.mask, problem.score, mask_tensors, score_tensors, extent)
    if mask_tensors:
        if problem.device != "cpu":
            extent = extent._replace(check_values=False)
        mask_tensors = lower_mask(problem.mask, mask_tensors, extent, q.device, q.dtype)
    if score_tensors:
        score_tensors = lower_score(problem.score, score_tensors, extent, q.dtype, q.device)
    checks = is_checked() and (mask_tensors or score_tensors)
    bits: int | Tensor = 0
    if seed is not None or problem.dropout_p:
        on_device = problem.device != "cpu" or reads_on_device(keywords.backend)
        bits = read_seed(seed, problem, q.device, on_device)
    operands = Operands(
        q,
        k,
        v,
        mask_tensors,
        score_tensors,
        lower_sinks(keywords.sinks, q.dtype),
        cu_q,
        cu_k,
        bits,
        block_table=block_table,
        key_lengths=key_lengths,
        for_backward=for_backward,
        out_alone=out_alone,
    )
    if keywords.scales is not NO_SCALES:
        operands = with_scales(operands, keywords.scales, problem)
    if checks:
        check_indices(problem, operands, keywords.mask.captured, keywords.score.captured)
    return operands


def with_scales(operands: Operands, scales: Scales, problem: Problem) -> Operands:
    """Return the operands with the scales of a call in kernel form."""
    if problem.stored is not None:
        rows = [None if x is None else x.to(torch.float32).resolve_neg() for x in scales[1:]]
        return operands._replace(k_scale=rows[0], v_scale=rows[1])
    heads = (problem.heads, problem.kv_heads, problem.kv_heads)
    q, k, v = lower_scales(scales, problem.batch, heads)
    return operands._replace(q_scale=q, k_scale=k, v_scale=v)


def check_forward_only(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords) -> None:
    """Refuse a call of float8 of which a gradient may be wanted."""
    if q.dtype is FLOAT8:
        refuse_gradients((q, k, v, keywords.sinks, *keywords.scales, *keywords.score.captured))


def _stay_on_device(problem: Problem, keywords: Keywords) -> bool:
    """Return whether cu_seqlens go to the kernels unread: reading them would stall the device."""
    return problem.device != "cpu" and (
        keywords.backend is None or reads_on_device(keywords.backend)
    )


def reads_on_device(backend: str | None) -> bool:
    """Return whether a backend is asked for that reads lengths, pages and seeds on q's device."""
    return backend is not None and load(backend).reads_on_device


def ragged_extent(problem: Problem, starts_q: Sequence[int], starts_k: Sequence[int]) -> Extent:
    """Return what captured tensors of packed sequences are broadcast against."""
    return Extent.of_sequences(problem.heads, counts_of(starts_q), counts_of(starts_k))


# The core takes the seed of dropout as a number. The GPU's kernels read a tensor on their device,
# so nothing waits for the device. A CUDA graph draws anew at each replay, because the captured draw
# is part of the graph.
_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
# torch.randint's largest bound: 63 random bits.
_SEED_LIMIT = 2**63 - 1


def draw_seed(device: torch.device) -> Tensor:
    """Draw one int64 from torch's generator of a device; checkpointing and compile replay it."""
    return torch.randint(0, _SEED_LIMIT, (), dtype=torch.int64, device=device)


def read_seed(
    seed: int | Tensor | None, problem: Problem, device: torch.device, on_device: bool
) -> int | Tensor:
    """Return the seed of a call as its kernels take it; drawn if there is none.

    Returns:
        A number in [0, 2**64); with ``on_device`` an int64 tensor of one element, which is not
        read here.

    Raises:
        Unsupported: a seed that a vmap made one for each call.
        InvalidArgument, InvalidType: no seed; or a CPU tensor while a CUDA graph is captured.
    """
    if seed is None:
        seed = draw_seed(device) if problem.dropout_p else 0
    required = "an integer or an int64 tensor of one element"
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            came = f"a tensor of {seed.dtype}, shape {tuple(seed.shape)}"
            raise InvalidArgument("seed", came, required)
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidType("seed", f"a {type(seed).__name__}", required)
    elif not -(2**63) <= seed < 2**64:
        raise InvalidArgument("seed", str(seed), "a number of 64 bits")
    if not problem.dropout_p:
        return 0
    if isinstance(seed, Tensor):
        if is_batched(seed):
            raise Unsupported(
                "tilewise has no dropout that differs from call to call under torch.func.vmap",
                fix='vmap(..., randomness="same"), or put the vmapped dimension into the batch',
            )
        seed = without_wrappers(seed)
    if not on_device:
        return (seed if isinstance(seed, int) else int(seed.item())) & _SEED_BITS
    if not isinstance(seed, Tensor):
        return seed_tensor(seed, device)
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if seed.device != device and captured:
        raise InvalidArgument(
            "seed",
            f"a tensor on {seed.device} while a CUDA graph is captured, which would repeat the "
            "value of this moment at every replay",
            f"an int64 tensor on {device}, or None",
            "Leave seed out, and each replay draws another mask; or fill a tensor on the device "
            "before each replay.",
        )
    # A copy: the backward pass needs the value of now, whatever is written there meanwhile.
    return without_wrappers(seed.detach().reshape(()).to(device, copy=True))


# Tensors as a flat list, None where there is none; differentiable ones first and last.
Tensors = Sequence[Tensor | None]


@dataclass(eq=False, slots=True)  # frozen takes 0.4 us more to make
class Call:
    """A call without its tensors, never changed; no pytree, so torch.func leaves it as it is.

    The tensors ``x`` of a call are q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, mask tensors, score
    tensors. Its *leaves* are those that have derivatives: q, k, v, sinks, score tensors.
    """

    plan: Plan
    seed: int | Tensor
    masks: int
    origin: tuple[int, int, int, int] = START

    def operands(self, x: Sequence[Any]) -> Operands:
        """Return the operands of flat tensors."""
        q, k, v, sinks, cu_q, cu_k = x[:6]
        last = 6 + self.masks
        captured = tuple(x[6:last]), tuple(x[last:])
        return Operands(q, k, v, *captured, sinks, cu_q, cu_k, self.seed, self.origin)

    def leaves(self, per_tensor: Sequence[Any]) -> tuple[Any, ...]:
        """Return what belongs to the leaves, of something for each tensor."""
        return (*per_tensor[:4], *per_tensor[6 + self.masks :])

    def spread(self, per_leaf: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inverse of ``leaves``, with None for the other tensors."""
        return (*per_leaf[:4], None, None, *(None,) * self.masks, *per_leaf[4:])


def flat(operands: Operands) -> tuple[Tensor | None, ...]:
    """Return the tensors of operands in the order of ``Call``."""
    q, k, v, mask_tensors, score_tensors, sinks, cu_q, cu_k = operands[:8]
    return (q, k, v, sinks, cu_q, cu_k, *mask_tensors, *score_tensors)


def split(call: Call, rest: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(per leaf, per tensor) of one list; there are 2 + masks more tensors than leaves."""
    count = (len(rest) - 2 - call.masks) // 2
    return rest[:count], rest[count:]


def needs_of(flags: Sequence[bool]) -> Needs:
    """Return the needs of leaves, from a flag for each."""
    return Needs(flags[0], flags[1], flags[2], tuple(flags[4:]), flags[3])


def leaves_of(grads: Grads) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of the leaves."""
    return (grads.q, grads.k, grads.v, grads.sinks, *grads.score_tensors)


def wanted(call: Call, grads: Grads, needs: Sequence[bool], x: Tensors) -> tuple[Tensor, ...]:
    """Return the gradients that are needed, each in its leaf's dtype."""
    return tuple(
        torch.zeros_like(leaf) if grad is None else grad.to(leaf.dtype)
        for grad, need, leaf in zip(leaves_of(grads), needs, call.leaves(x), strict=True)
        if need
    )
