"""The calls: attention, attention_varlen, attention_paged, plan and explain."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Never, NoReturn, TypeAlias

import torch
from torch import Tensor

from tilewise.engine import dispatch
from tilewise.engine.call import (
    NO_KEYWORDS,
    Keywords,
    build_operands,
    build_problem,
    make_plan,
    read_keywords,
)
from tilewise.engine.explanation import Explanation, chip_of
from tilewise.engine.key_lists import KeyBlocks, KeyLists, read_key_lists
from tilewise.engine.listed import attend_lists, explain_lists
from tilewise.engine.pages import PagedStep, packed_or_paged, pages_of
from tilewise.engine.run import any_nested, autocast, run, run_paged
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.plan import Plan
from tilewise.problem import Operands, Result, Statistics
from tilewise.reference.blocks import Block
from tilewise.reference.programs import visible
from tilewise.torch_private import any_autocast
from tilewise.variants.float8 import scales_of
from tilewise.variants.guidance import refuse_keywords
from tilewise.variants.lower import Extent, lower_mask
from tilewise.variants.values import Mask, Score, as_mask

if TYPE_CHECKING:  # the IO model: imported for those who ask
    from tilewise.chips import Chip
    from tilewise.plan.traffic import Account

__all__ = [
    "AttentionResult",
    "Explanation",
    "KeyBlocks",
    "MaskLike",
    "PagedStep",
    "ScoreLike",
    "SoftmaxStats",
    "attention",
    "attention_paged",
    "attention_varlen",
    "explain",
    "plan",
    "visible_pairs",
]

MaskFunction: TypeAlias = Callable[..., Any]  # (b, h, m, n) -> bool
ScoreFunction: TypeAlias = Callable[..., Any]  # (s, b, h, m, n) -> s
MaskLike: TypeAlias = Mask | Tensor | MaskFunction | None
ScoreLike: TypeAlias = Score | ScoreFunction | Sequence[Score | ScoreFunction] | None


class SoftmaxStats(NamedTuple):
    """Statistics of each row's softmax, from the same pass; each [B, Hq, M] (varlen [Hq, Tq]).

    p[n] = exp(s[n] - lse) are the probabilities, before dropout, of the keys that the row sees.
    With sinks, p[sink] = exp(sink - lse) is one more outcome. Floats are float32 (float64 for
    float64).

    Args:
        max_logit: the largest score s[n] of a key, natural-log units; the sink does not count; -inf
            for a row that sees no key, NaN for a row with a NaN score. Without gradient.
        lse: the natural-log sum of exponentials, sink included; -inf for a row without keys and
            sink. Differentiable.
        entropy: -sum of p log p over the outcomes, in nats: 0 if one has all the weight, at most
            log of their number. A row that sees no key has 0. Differentiable.
        top1: int64, the key with the largest score, the first of equal ones, or the first with a
            NaN score; -1 for a row that sees no key. In a variable-length call keys count within
            their sequence. None unless ``return_stats="top1"``.
    """

    max_logit: Tensor
    lse: Tensor
    entropy: Tensor
    top1: Tensor | None


class AttentionResult(NamedTuple):
    """Result of a call with ``return_lse`` or ``return_stats``.

    Args:
        out: [B, Hq, M, Dv] (varlen [Tq, Hq, Dv]), q's dtype (bfloat16 for float8).
        lse: natural-log sum of exponentials, sink included, [B, Hq, M] (varlen [Hq, Tq]), float32
            (float64 for float64), differentiable; None unless ``return_lse``.
        stats: None unless ``return_stats``.
    """

    out: Tensor
    lse: Tensor | None
    stats: SoftmaxStats | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    keys: KeyLists | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool | Literal["top1"] = False,
    backend: str | None = None,
    plan: Plan | None = None,
    **unknown: Never,
) -> Any:
    """Exact attention that never writes the M x N matrix: out = softmax(score(scale q.k^T)) v.

    Args:
        q: [B, Hq, M, D], any strides. The output follows its memory order. Or q, k and v are
            nested tensors [B, H, j, D] of layout torch.jagged, computed as ``attention_varlen``
            does, without padding; whatever is returned is nested as q is.
        k: [B, Hk, N, D]; Hq must be a multiple of Hk (grouped queries: head h reads h // (Hq/Hk)).
        v: [B, Hk, N, Dv].
        mask: which pairs attend: a function ``(b, h, m, n) -> bool`` (see ``masks.function``), a
            Mask of ``tilewise.masks``, or a boolean tensor (True = attend) that broadcasts to
            [B, Hq, M, N]. A row that sees no key gives 0 and lse -inf.
        score: a function ``(s, b, h, m, n) -> s``, a Score of ``tilewise.scores``, or a sequence
            of them, applied in order.
        keys: the keys that each row reads, int32 or int64 [B, Hk or 1, M, K]: in any order, -1 for
            none, each once however often it is named. A mask hides some of them. Or KeyBlocks, for
            blocks of keys. Time and memory follow K, not N. Not for nested tensors, dropout and
            float8. See docs/key-lists.md.
        scale: s = scale * q.k; 1/sqrt(D) if None.
        sinks: floating [Hq]: one extra logit per query head in the denominator.
        q_scale: what the numbers of a float8 (e4m3fn) q are to be multiplied by: a floating tensor
            of one element, [Hq] or [B, Hq], on q's device and finite; None is 1. float8 is computed
            forward only, and its output is bfloat16.
        k_scale: of k in the same way, with k's heads.
        v_scale: of v in the same way, with v's heads.
        dropout_p: the probability in [0, 1) of dropping a pair; what stays is divided by 1 - p.
        seed: 64 bits that choose what is dropped, as a number or an int64 tensor of one element;
            None draws one from the generator of q's device. On a GPU it stays there: in a captured
            CUDA graph, None draws anew and a tensor on the device is read anew at each replay.
        return_lse: ask for an AttentionResult with lse.
        return_stats: ask for an AttentionResult with stats; "top1" has the top key of each row too.
        backend: None (choose), or a name of ``explain``; a named one never falls back.
        plan: a held Plan of ``tilewise.plan`` for a call like this one, to skip choosing.
        **unknown: refused, saying what to write for a keyword of another library.

    Returns:
        The output [B, Hq, M, Dv], or an AttentionResult where more is asked for. Gradients are
        defined for q, k, v, sinks and the floating tensors that a score reads, through the output,
        lse and the entropy; in eager calls also tangents (torch.func.jvp, forward_ad) and second
        derivatives (create_graph=True), but for the entropy.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: nothing here can do it, with each backend's reason.
        LostThreads: on several threads in a process that was forked after its parent used them;
            take one thread there (data loaders' workers do), or start the process by spawn.
    """
    if unknown:
        _refuse("attention", unknown)
    if (
        (mask is None and score is None and scale is None and sinks is None and backend is None)
        and (q_scale is None and k_scale is None and v_scale is None)
        and type(dropout_p) is float
        and dropout_p == 0.0
    ):
        keywords = NO_KEYWORDS
    else:
        scales = scales_of(q_scale, k_scale, v_scale)
        keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, scales=scales)
    if keys is not None:
        return _listed(q, k, v, keywords, keys, plan, _wanted(return_stats), return_lse)
    if return_stats is not False:
        return _with_stats(run(q, k, v, keywords, seed, plan, _wanted(return_stats)), return_lse)
    result = run(q, k, v, keywords, seed, plan, "", not return_lse)
    return AttentionResult(result.out, result.lse, None) if return_lse else result.out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    keys: KeyLists | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool | Literal["top1"] = False,
    backend: str | None = None,
    plan: Plan | None = None,
    **unknown: Never,
) -> Any:
    """Compute attention over sequences of different lengths, packed one after the other.

    Sequence i has the query rows cu_seqlens_q[i] to cu_seqlens_q[i + 1], and its keys likewise.
    Rows see only the keys of their own sequence. In masks, scores and dropout, b is the sequence's
    index, and m, n, M and N count within it. The first dimension of a captured tensor is the
    sequence. Its rows or keys cover at least the longest sequence.

    The keywords are those of ``attention``; a scale [B, heads] has a row per sequence, and key
    lists are [Hk or 1, Tq, K]. The operands
    q [Tq, Hq, D], k [Tk, Hk, D] and v [Tk, Hk, Dv] may have any strides. The offsets cu_seqlens_q
    and cu_seqlens_k are int32 or int64 [sequences + 1]. They start at 0, never decrease and end at
    Tq and Tk.

    Returns:
        The output [Tq, Hq, Dv], or an AttentionResult with lse [Hq, Tq].

    Raises:
        InvalidArgument, InvalidType, Unsupported: as ``attention``.
    """
    if unknown:
        _refuse("attention_varlen", unknown)
    packed = (cu_seqlens_q, cu_seqlens_k)
    scales = scales_of(q_scale, k_scale, v_scale)
    keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, packed, scales=scales)
    if keys is not None:
        return _listed(q, k, v, keywords, keys, plan, _wanted(return_stats), return_lse)
    if return_stats is not False:
        return _with_stats(run(q, k, v, keywords, seed, plan, _wanted(return_stats)), return_lse)
    result = run(q, k, v, keywords, seed, plan, "", not return_lse)
    return AttentionResult(result.out, result.lse, None) if return_lse else result.out


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor | PagedStep,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    keys: KeyLists | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    return_stats: bool | Literal["top1"] = False,
    backend: str | None = None,
    plan: Plan | None = None,
    **unknown: Never,
) -> Any:
    """Compute attention over keys and values in pages, found by a block table. Forward only.

    Sequence b has N = key_lengths[b] keys; key n is row n % page_size of the page
    block_table[b, n // page_size]. In masks and scores, b is the sequence's index, and m, n, M and
    N count within it. The first dimension of a captured tensor is the sequence. Its keys cover at
    least the longest sequence. Rows and pages without keys of a sequence may hold anything, and so
    may the block table beyond a sequence's keys.

    Args:
        q: [B, Hq, M, D]; or [Tq, Hq, D], packed as for ``attention_varlen``, with cu_seqlens_q.
        k_pages: [pages, Hk, page_size, D], any strides: memory [pages, page_size, Hk, D] is passed
            as ``k_pages.transpose(1, 2)``. Any page_size; multiples of the kernel's blocks of keys
            (of 128) read fastest.
        v_pages: [pages, Hk, page_size, Dv].
        block_table: int32 (or int64) [B, P], P pages for the longest sequence or more; or a
            ``PagedStep``, which is checked once for many calls and stands for the next two too.
        key_lengths: int32 (or int64) [B], each at most P * page_size.
        cu_seqlens_q: int32 or int64 [B + 1], or None.
        mask: as in ``attention``; a BlockMask is one for a variable-length call of these lengths.
        score: as in ``attention``.
        keys: as in ``attention``, or as in ``attention_varlen`` with cu_seqlens_q.
        scale: s = scale * q.k; 1/sqrt(D) if None.
        sinks: floating [Hq], as in ``attention``.
        q_scale: of float8 queries, as in ``attention``; [B, Hq] has a row per sequence.
        k_scale: of float8 keys in the same way; of pages in 8 bits [pages, Hk, page_size].
        v_scale: of float8 values in the same way, or as k_scale.
        return_lse: ask for an AttentionResult with lse.
        return_stats: ask for an AttentionResult with stats; "top1" has the top key of each row too.
        backend: None (choose), or a name of ``explain``.
        plan: a held Plan of ``tilewise.plan`` for a call like this one.
        **unknown: refused, as in ``attention``.

    Pages may be in 8 bits beside wider queries: int8 or float8_e4m3fn, the numbers of a row next to
    one another. Key n then stands for ``k_scale[page, head, row] * k_pages[page, head, row]``, and
    value n likewise. Both scales must be there. Kernels read such pages where they lie. With
    ``keys`` they read the listed rows and their scales alone.

    Values of block_table, key_lengths and cu_seqlens_q are checked if they are on the CPU. On a
    device they are not read, except in checked mode; kernels clamp lengths and page numbers to the
    valid range.

    Returns:
        The output [B, Hq, M, Dv] (packed [Tq, Hq, Dv]), or an AttentionResult.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: nothing here can do it, with each backend's reason; or a gradient is wanted; or
            queries in float8 with ``keys``.
    """
    if unknown:
        _refuse("attention_paged", unknown)
    pages, step = pages_of(block_table, key_lengths, cu_seqlens_q)
    scales = scales_of(q_scale, k_scale, v_scale)
    keywords = read_keywords(mask, score, scale, 0.0, sinks, backend, None, pages, scales, step)
    if keys is not None:
        wanted = _wanted(return_stats)
        return _listed(q, k_pages, v_pages, keywords, keys, plan, wanted, return_lse)
    result = run_paged(
        q, k_pages, v_pages, keywords, plan, _wanted(return_stats), out_alone=not return_lse
    )
    if return_stats is not False:
        return _with_stats(result, return_lse)
    return AttentionResult(result.out, result.lse, None) if return_lse else result.out


def _listed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keywords: Keywords,
    keys: KeyLists,
    plan: Plan | None,
    statistics: Statistics,
    return_lse: bool,
) -> Any:
    if plan is not None:
        required = "None with keys=: each few lists have a plan of their own"
        raise InvalidArgument("plan", "a held plan", required)
    if any_nested(q, k, v):
        fix = "call attention_varlen with x.values().transpose(0, 1) and x.offsets() of each"
        raise Unsupported("nested tensors with key lists (keys=)", fix=fix)
    if any_autocast():
        q, k, v = autocast(q, k, v)
    alone = not (statistics or return_lse)
    result = attend_lists(q, k, v, keywords, read_key_lists(keys), statistics, alone)
    if statistics:
        return _with_stats(result, return_lse)
    return AttentionResult(result.out, result.lse, None) if return_lse else result.out


def _refuse(call: str, unknown: Mapping[str, object]) -> NoReturn:
    """Refuse keywords that the call does not have: other libraries say them."""
    parameters = inspect.signature(globals()[call]).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    refuse_keywords(call, unknown, known)


def _wanted(return_stats: object) -> Statistics:
    if return_stats is True:
        return "rows"
    if return_stats is False:
        return ""
    required = 'True, False or "top1"'
    if not isinstance(return_stats, str):
        raise InvalidType("return_stats", f"a {type(return_stats).__name__}", required)
    if return_stats != "top1":
        raise InvalidArgument("return_stats", repr(return_stats), required)
    return "top1"


def _with_stats(result: Result, return_lse: bool) -> AttentionResult:
    out, lse, _, max_logit, entropy, top_key = result
    assert max_logit is not None
    assert entropy is not None
    stats = SoftmaxStats(max_logit, lse, entropy, top_key)
    return AttentionResult(out, lse if return_lse else None, stats)


def visible_pairs(
    mask: MaskLike,
    queries: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return which pairs a mask lets attend as a full tensor, to inspect or to test with.

    Args:
        mask: what ``attention`` takes.
        queries: M, query rows.
        keys: N, keys.
        batch: B, batch items.
        heads: Hq.
        device: where the mask's tensors are.

    Returns:
        bool [B, Hq, M, N] on the device.

    Raises:
        InvalidArgument, InvalidType: it is no mask, or captures tensors of other sizes.
    """
    shape = (batch, heads, queries, keys)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    read, device = as_mask(mask), torch.device(device)
    read_values = device.type == "cpu" and not torch.compiler.is_compiling()
    extent = Extent(*shape, check_values=read_values)
    captured = lower_mask(read.program, read.captured, extent, device)
    block = Block(range(queries), range(keys), queries, keys, range(batch), range(heads))
    return visible(read.program, captured, block, device).expand(shape).clone()


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Plan:
    """Return the plan of a call, to hold and to pass as ``plan=`` to calls of the same shapes.

    The plan keeps no tensor. Pass sinks, cu_seqlens and any mask or score that captures tensors
    again at the call. A mask or score that captures none may be left out there.

    Every argument is as the call will have it:

    * of ``attention``: q [B, Hq, M, D], k [B, Hk, N, D] and v [B, Hk, N, Dv];
    * of ``attention_varlen``: q [Tq, Hq, D], k [Tk, Hk, D] and v [Tk, Hk, Dv], with cu_seqlens_q
      and cu_seqlens_k [sequences + 1];
    * of ``attention_paged``: q either way, k and v [pages, Hk, page_size, D or Dv], with
      block_table [B, P] and key_lengths [B], and with cu_seqlens_q where q is packed.

    Raises:
        InvalidArgument, InvalidType, Unsupported: as the call.
    """
    if unknown:
        _refuse("plan", unknown)
    packed, pages = packed_or_paged(cu_seqlens_q, cu_seqlens_k, block_table, key_lengths, dropout_p)
    keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, packed, pages)
    made = make_plan(q, k, v, keywords)
    build_operands(made.problem, q, k, v, keywords, 0)  # checks captured tensors as a call does
    return made


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    keys: KeyLists | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    backend: str | None = None,
    chip: str | None = None,
    **unknown: Never,
) -> Explanation:
    """Explain how a call would run, what it moves, and why no other backend would run it.

    This computes no attention. It predicts bytes and times of the forward and the backward, for
    tilewise and for plain attention (docs/io-model.md).

    Every argument is as in ``plan``, such as q [B, Hq, M, D], and ``keys`` [B, Hk or 1, M, K] as in
    ``attention``. ``chip`` selects the caches and ceilings to predict with. It is a name in
    ``tilewise.chips.CHIPS`` of the kind of device that the tensors are on, "this", or None for the
    tensors' own device.

    Raises:
        InvalidArgument, InvalidType: as the call. A call that no backend supports is explained, not
            refused.
    """
    from tilewise.chips import named

    if unknown:
        _refuse("explain", unknown)
    packed, pages = packed_or_paged(cu_seqlens_q, cu_seqlens_k, block_table, key_lengths, dropout_p)
    keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, packed, pages)
    problem = build_problem(q, k, v, keywords)
    row = chip_of(q.device) if chip is None else _same_kind(named(chip), q.device)
    if keys is not None:
        operands = build_operands(problem, q, k, v, keywords, 0)
        return explain_lists(problem, operands, q.device, keywords, read_key_lists(keys), row)
    try:
        made: Plan | None = make_plan(q, k, v, keywords)
    except Unsupported:
        made = None
    found: Account | None = None
    unpredicted: tuple[tuple[str, str], ...] = ()
    if made is not None:
        operands = build_operands(made.problem, q, k, v, keywords, 0)
        found, unpredicted = _account(made, operands)
    chosen = None if made is None else made.backend
    reasons = [
        (candidate.name, candidate.reasons or (_passed_over(chosen, backend),))
        for candidate in dispatch.candidates(problem, dispatch.BACKEND_NAMES)
        if candidate.name != chosen
    ]
    notes = keywords.mask.notes()
    if made is not None:
        notes += dispatch.load(made.backend).notes(problem)
    return Explanation(made, tuple(reasons), notes + unpredicted, found, row)


def _same_kind(row: "Chip", device: torch.device) -> "Chip":
    if (row.kind == "cpu") != (device.type == "cpu"):
        raise InvalidArgument(
            "chip",
            f"{row.name}, a {row.kind}, for tensors on {device}",
            "a chip of the kind that the tensors are on",
            "For a chip that is not here: `tilewise explain --shape ... --chip NAME`.",
        )
    return row


def _account(
    made: Plan, operands: Operands
) -> "tuple[Account | None, tuple[tuple[str, str], ...]]":
    """Return the account of what a call moves, or None and why it is not predicted."""
    from tilewise.plan.traffic import account

    assert made.loops is not None
    try:
        return account(made.problem, made.loops, operands), ()
    except Unsupported as error:
        return None, (("bytes", f"not predicted: {error.what}; {error.fix}"),)


def _passed_over(chosen: str | None, asked_for: str | None) -> str:
    if asked_for is not None:
        return f"it could, but backend={asked_for!r} is asked for"
    if chosen is None:
        return "it could, but a slow reference runs only when it is asked for by name"
    return f"it could, but {chosen!r} comes first"
