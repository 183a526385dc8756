"""The problems that stand for a kind of call: small ones for exactness, large ones for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise import masks, scores
from tilewise.lab.gpu_check.problems import Draw, ProblemCase
from tilewise.lab.tune.jobs import Job

__all__ = ["large", "small"]

_HIDDEN, _BATCH, _LENGTH, _DOCUMENT = 2048, 4, 4096, 1024
_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0))


def _causal(draw: Draw) -> Any:
    return masks.causal()


def _document(draw: Draw) -> Any:
    """Documents of a quarter of the keys, causal within each."""
    per_document = max(1, min(_DOCUMENT, draw.keys // 4))
    ids = (draw.whole(0, per_document, draw.batch, draw.keys) == 0).long().cumsum(1)
    return masks.document(ids, ids[:, -draw.queries :]) & masks.causal()


def _alibi(draw: Draw) -> Any:
    return scores.alibi(draw.positive(draw.heads))


def _alibi_softcap(draw: Draw) -> Any:
    return [_alibi(draw), scores.softcap(20.0)]


def _bias(draw: Draw) -> Any:
    return scores.bias(draw.normal(1, draw.heads, draw.queries, draw.keys))


_SMALL = {
    "plain": (
        ProblemCase("causal", mask=_causal, keys=400, kv_heads=2),
        ProblemCase("full", keys=200, kv_heads=2),
    ),
    "+": (
        ProblemCase("causal alibi softcap", mask=_causal, score=_alibi_softcap, kv_heads=2),
        ProblemCase("bias", score=_bias, keys=200),
        ProblemCase("causal dropout", mask=_causal, dropout_p=0.2),
        ProblemCase("causal varlen", mask=_causal, lengths=_SEQUENCES, kv_heads=2),
    ),
    "*": (
        ProblemCase("document", mask=_document, keys=400, kv_heads=2),
        ProblemCase("document alibi dropout", mask=_document, score=_alibi, dropout_p=0.2),
    ),
}
_LARGE = {
    "plain": (ProblemCase("causal", mask=_causal), ProblemCase("full")),
    "+": (
        ProblemCase("causal alibi", mask=_causal, score=_alibi),
        ProblemCase("causal varlen", mask=_causal, lengths=((_LENGTH, _LENGTH),) * _BATCH),
    ),
    "*": (ProblemCase("document", mask=_document),),
}
_SHRINK, _TINY_WIDTH = 8, 16


def small(job: Job, tiny: bool) -> list[ProblemCase]:
    """Problems whose results are compared with the reference's; lengths that no block divides.

    Args:
        job: whose kind they are of.
        tiny: for the interpreter.
    """
    return [_sized(case, job, tiny) for case in _SMALL[job.kind]]


def large(job: Job, tiny: bool) -> list[ProblemCase]:
    """Problems that are timed, 16k tokens each; tiny ones measure nothing."""
    heads = max(1, _HIDDEN // job.width)
    wide = [
        replace(case, batch=_BATCH, heads=heads, kv_heads=heads, queries=_LENGTH)
        for case in _LARGE[job.kind]
    ]
    return [_sized(case, job, tiny) for case in (_LARGE[job.kind] if tiny else wide)]


def _sized(case: ProblemCase, job: Job, tiny: bool) -> ProblemCase:
    """The problem with its widths, and as many keys as queries where it does not say."""
    if not tiny:
        keys = case.keys or case.queries
        return replace(case, keys=keys, head_dim=job.width, value_dim=job.width)
    lengths = tuple((min(m, 40), min(n, 40)) for m, n in case.lengths[:2])
    return replace(
        case,
        batch=1,
        heads=2,
        kv_heads=1 if case.kv_heads < case.heads else 2,
        queries=case.queries // _SHRINK,
        keys=(case.keys or case.queries) // _SHRINK,
        head_dim=_TINY_WIDTH,
        value_dim=_TINY_WIDTH,
        lengths=lengths,
    )
