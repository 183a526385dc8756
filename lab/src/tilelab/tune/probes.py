"""The problems that stand for a kind of call: small ones for exactness, large ones for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from tilelab.gpu_check.problems import Draw, ProblemCase, alibi, bias, causal
from tilelab.tune.jobs import Job
from tilewise import masks, scores

__all__ = ["PAGED", "large", "small"]

PAGED = "paged"  # a layout of keys and values that ``Work`` makes
_HIDDEN, _BATCH, _LENGTH, _DOCUMENT = 2048, 4, 4096, 1024
_CACHED, _KEYS, _GROUP = 1024, 16384, 4  # of decoding: the width of the heads that share keys
_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0))


def _document(draw: Draw) -> Any:
    """Documents of a quarter of the keys, causal within each."""
    per_document = max(1, min(_DOCUMENT, draw.keys // 4))
    ids = (draw.whole(0, per_document, draw.batch, draw.keys) == 0).long().cumsum(1)
    return masks.document(ids, ids[:, -draw.queries :]) & masks.causal()


def _alibi_softcap(draw: Draw) -> Any:
    return [alibi(draw), scores.softcap(20.0)]


_Cases: TypeAlias = dict[str, tuple[ProblemCase, ...]]
_SMALL: _Cases = {
    "plain": (
        ProblemCase("causal", mask=causal, keys=400, kv_heads=2),
        ProblemCase("full", keys=200, kv_heads=2),
    ),
    "+": (
        ProblemCase("causal alibi softcap", mask=causal, score=_alibi_softcap, kv_heads=2),
        ProblemCase("bias", score=bias, keys=200),
        ProblemCase("causal dropout", mask=causal, dropout_p=0.2),
        ProblemCase("causal varlen", mask=causal, lengths=_SEQUENCES, kv_heads=2),
        ProblemCase("causal in pages", mask=causal, keys=400, kv_heads=2, layout=PAGED),
    ),
    "*": (
        ProblemCase("document", mask=_document, keys=400, kv_heads=2),
        ProblemCase("document alibi dropout", mask=_document, score=alibi, dropout_p=0.2),
    ),
}
_LARGE: _Cases = {
    "plain": (ProblemCase("causal", mask=causal), ProblemCase("full")),
    "+": (
        ProblemCase("causal alibi", mask=causal, score=alibi),
        ProblemCase("causal varlen", mask=causal, lengths=((_LENGTH, _LENGTH),) * _BATCH),
    ),
    "*": (ProblemCase("document", mask=_document),),
}
_FEW = ProblemCase("full", queries=3, keys=1200, kv_heads=2)
_FEW_SMALL: _Cases = {
    "plain": (_FEW, replace(_FEW, name="causal", mask=causal)),
    "+": (
        replace(_FEW, name="causal alibi softcap", mask=causal, score=_alibi_softcap),
        replace(_FEW, name="bias", score=bias),
        replace(_FEW, name="causal dropout", mask=causal, dropout_p=0.2),
        replace(_FEW, name="causal in pages", mask=causal, layout=PAGED),
    ),
    "*": (
        replace(_FEW, name="document", mask=_document),
        replace(_FEW, name="document alibi dropout", mask=_document, score=alibi, dropout_p=0.2),
    ),
}
_ONE = ProblemCase("full", queries=1, keys=_KEYS, kv_heads=2)
_FEW_LARGE: _Cases = {
    "plain": (_ONE,),
    "+": (replace(_ONE, name="causal alibi", mask=causal, score=alibi),),
    "*": (replace(_ONE, name="document", mask=_document),),
}
_SHRINK, _TINY_WIDTH, _LARGEST_TINY = 8, 16, 40


def small(job: Job, tiny: bool) -> list[ProblemCase]:
    """Problems whose results are compared with the reference's; lengths that no block divides.

    Args:
        job: whose kind they are of.
        tiny: for the interpreter.
    """
    cases = (_FEW_SMALL if job.pass_name == "decode" else _SMALL)[job.kind]
    if job.pass_name not in ("forward", "decode"):  # no gradient knows pages
        cases = tuple(case for case in cases if case.layout != PAGED)
    return [_sized(case, job, tiny) for case in cases]


def large(job: Job, tiny: bool) -> list[ProblemCase]:
    """Problems that are timed; tiny ones measure nothing.

    They have 16k tokens; those of decoding have eight sequences of one query and 16k keys.
    """
    few = job.pass_name == "decode"
    cases = (_FEW_LARGE if few else _LARGE)[job.kind]
    heads = max(1, (_CACHED if few else _HIDDEN) // job.width)
    shape: dict[str, Any] = {"batch": _BATCH, "heads": heads, "kv_heads": heads, "queries": _LENGTH}
    if few:
        shape |= {"batch": 2 * _BATCH, "heads": _GROUP * heads, "queries": 1}
    wide = cases if tiny else [replace(case, **shape) for case in cases]
    return [_sized(case, job, tiny) for case in wide]


def _sized(case: ProblemCase, job: Job, tiny: bool) -> ProblemCase:
    """Return the problem with its widths, and as many keys as queries where it does not say."""
    keys = case.keys or case.queries
    if not tiny:
        return replace(case, keys=keys, head_dim=job.width, value_dim=job.width)
    lengths = tuple((min(m, _LARGEST_TINY), min(n, _LARGEST_TINY)) for m, n in case.lengths[:2])
    return replace(
        case,
        batch=1,
        heads=2,
        kv_heads=1 if case.kv_heads < case.heads else 2,
        queries=_shrunk(case.queries),
        keys=_shrunk(keys),
        head_dim=_TINY_WIDTH,
        value_dim=_TINY_WIDTH,
        lengths=lengths,
    )


def _shrunk(length: int) -> int:
    """Return a length that takes the interpreter no long time; one that is tiny already stays."""
    return length if length <= _LARGEST_TINY else min(length // _SHRINK, 4 * _LARGEST_TINY)
