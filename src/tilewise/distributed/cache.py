"""Attention over keys of which each process keeps some: decoding over a split cache."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise.checks import check_both
from tilewise.distributed.attention import shared_facts
from tilewise.distributed.layout import Mesh, groups_of, standing
from tilewise.distributed.parts import Part, Running, Whole
from tilewise.distributed.peers import Peers, agreed, in_words, refusals_told
from tilewise.engine.call import Keywords, build_operands, build_problem, read_keywords
from tilewise.engine.dispatch import plan_of
from tilewise.engine.pages import Pages
from tilewise.errors import InvalidArgument, TilewiseError, Unsupported
from tilewise.functional import AttentionResult, MaskLike, ScoreLike
from tilewise.problem import Operands, Problem, Result
from tilewise.reference.merge import as_partial, merge_partial
from tilewise.validation import check_sinks
from tilewise.variants.float8 import scales_of
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.placing import later_keys
from tilewise.variants.program import Program, fitted
from tilewise.variants.values import Mask, Score


def split_cache_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    *,
    mesh: Mesh,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Compute attention of the same queries over keys that the processes keep in turn.

    The keys of a sequence are those of position 0, then those of position 1, and so on. Each
    process attends to its own, and ``merge`` joins the results in the order of positions. So every
    process gets the same output, to the bit. What travels is an output of the queries from each
    process, no key. Masks and scores count keys in the whole sequence. Forward only.

    Args:
        q: the same on every process: [B, Hq, M, D], or packed [Tq, Hq, D] with pages.
        k: of this process: [B, Hk, n, D]; or pages as in ``attention_paged``.
        v: [B, Hk, n, Dv], or pages.
        block_table: of pages, as in ``attention_paged``; None for keys in one piece.
        key_lengths: likewise: how many keys of each sequence this process keeps, 0 or more.
        cu_seqlens_q: likewise.
        mesh: a DeviceMesh of one dimension, or a ProcessGroup.
        mask: as in ``attention``, with its tensors for the whole sequence.
        score: likewise.
        scale: as in ``attention``.
        sinks: as in ``attention``.
        k_scale: of pages in 8 bits, as in ``attention_paged``.
        v_scale: likewise.
        return_lse: ask for an AttentionResult with lse.
        backend: as in ``attention``.
        timeout: how long to wait for a message; None for the group's own.

    Returns:
        The output [B, Hq, M, Dv] (packed [Tq, Hq, Dv]), or an AttentionResult.

    Raises:
        InvalidArgument, InvalidType, Unsupported: as ``attention_paged``; calls that differ, also
            in the values of q, or a call that another process has refused.
        LostPeer: a process did not answer in time.

    Source: Milakov and Gimelshein, 2018; split-key decoding: Dao et al., Flash-Decoding, 2023.
    """
    groups = groups_of(mesh, timeout)
    with refusals_told(groups, q):
        peers = standing(mesh, "ring", timeout).ring
        assert peers is not None
        if any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled():
            raise Unsupported(
                "gradients of attention over a split cache",
                fix="call context_parallel_attention, or wrap the call in torch.no_grad()",
            )
        pages = _pages(block_table, key_lengths, cu_seqlens_q)
        scales = scales_of(None, k_scale, v_scale)
        keywords = read_keywords(mask, score, scale, 0.0, None, backend, pages=pages, scales=scales)
        check_sinks(sinks, q.shape[1], q.device.type)
        problem = build_problem(q, k, v, keywords)
        operands = None
        if pages is not None:
            bare = keywords._replace(mask=Mask(()), score=Score(()))
            alone = problem._replace(mask=(), score=())
            operands = build_operands(alone, q, k, v, bare, None)
        same = {"q": q, "cu_seqlens_q": cu_seqlens_q, "tensor of sinks": sinks}
        given = {name: x for name, x in same.items() if x is not None}
        facts = shared_facts(problem, keywords) | in_words(given)
    counts = agreed(groups, facts, (problem.keys,), q.device)
    with peers.together(unless=(TilewiseError,)):
        if operands is None:
            own = [keys for (keys,) in counts]
            out, lse = _of_one_piece(peers, q, k, v, problem, keywords, own)
        else:
            out, lse = _of_pages(peers, problem, operands, keywords)
        outs = peers.everywhere("outputs", out, [out.shape] * peers.count)
        lses = peers.everywhere("outputs", lse, [lse.shape] * peers.count)
    if sinks is not None:
        of_sinks, own_lse = as_partial(sinks, out, lse)
        outs.append(of_sinks)
        lses.append(own_lse)
    out, lse = merge_partial(outs, lses)
    return AttentionResult(out, lse, None) if return_lse else out


def _pages(
    block_table: Tensor | None, key_lengths: Tensor | None, cu_seqlens_q: Tensor | None
) -> Pages | None:
    check_both("block_table", block_table, "key_lengths", key_lengths)
    if block_table is not None and key_lengths is not None:
        return Pages(block_table, key_lengths, cu_seqlens_q)
    if cu_seqlens_q is not None:
        raise InvalidArgument("cu_seqlens_q", "a tensor", "None without pages")
    return None


def _of_one_piece(
    peers: Peers,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    keywords: Keywords,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return out and lse over this process's keys; ``counts`` says how many each process has."""
    starts = list(accumulate(counts, initial=0))
    problem = problem._replace(keys=starts[-1])
    whole = Whole.of(problem, keywords, None, 0, q.device)
    running = Running(q, problem.value_dim, whole.floats)
    columns = range(*starts[peers.position : peers.position + 2])
    for piece in whole.pieces(range(problem.queries), columns):
        part = Part(whole, piece)
        running.add(part.rows, *part.forward(q, k, v, for_backward=False))
    return running.close()


def _of_pages(
    peers: Peers, problem: Problem, operands: Operands, keywords: Keywords
) -> tuple[Tensor, Tensor]:
    """Return out and lse over the keys in this process's pages.

    ``operands`` are without mask and score, which count the keys of all processes.
    """
    assert keywords.pages is not None
    device = operands.q.device
    lengths: list[int] = keywords.pages.key_lengths.tolist()
    every = torch.tensor(peers.gathered("sizes", lengths, device))
    first, total = every[: peers.position].sum(0), every.sum(0)
    places = torch.stack((first, total), dim=1).to(device)
    longest = int(total.max()) if len(total) else 0
    extent = Extent(problem.batch, problem.heads, problem.queries, longest, ragged=True)
    mask, score, dtype = keywords.mask, keywords.score, problem.dtype
    masks = lower_mask(mask.program, mask.captured, extent, device, dtype)
    tensors = lower_score(score.program, score.captured, extent, dtype, device)
    of_mask = _later(mask.program, "mask", masks, places)
    of_score = _later(score.program, "score", tensors, places)
    plan = plan_of(problem._replace(mask=of_mask[0], score=of_score[0]), keywords.backend)
    found: Result = plan.forward(
        operands._replace(mask_tensors=of_mask[1], score_tensors=of_score[1])
    )
    return found.out, found.lse


def _later(
    program: Program, kind: Literal["mask", "score"], tensors: tuple[Tensor, ...], places: Tensor
) -> tuple[Program, tuple[Tensor, ...]]:
    """Return a program over later keys, and the tensors in its slots."""
    if not program:
        return (), ()
    (moved,) = later_keys(fitted(program), kind, len(tensors))
    given = (*tensors, places)
    own = moved._replace(slots=tuple(range(len(moved.slots))))
    return (own,), tuple([given[slot] for slot in moved.slots])
