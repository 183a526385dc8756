"""The problems that stand for a kind of call: small ones for exactness, large ones for time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from tilelab.cases.case import Case
from tilelab.cases.table import problem
from tilelab.tune.jobs import Job

_HIDDEN, _BATCH, _LENGTH = 2048, 4, 4096
_CACHED, _KEYS, _GROUP = 1024, 16384, 4  # of decoding: the width of the heads that share keys
_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0))
_CAUSAL, _DOCUMENTS = ("causal",), ("documents_of_1k", "causal", "and")
_CAPPED = ("alibi", "softcap")

_Cases: TypeAlias = dict[str, tuple[Case, ...]]
_SMALL: _Cases = {
    "plain": (
        problem("causal", mask=_CAUSAL, keys=400, kv_heads=2),
        problem("full", keys=200, kv_heads=2),
    ),
    "+": (
        problem("causal alibi softcap", mask=_CAUSAL, score=_CAPPED, kv_heads=2),
        problem("bias", score=("bias_wide",), keys=200),
        problem("causal dropout", mask=_CAUSAL, dropout_p=0.2),
        problem("causal varlen", mask=_CAUSAL, sequences=_SEQUENCES, kv_heads=2),
        problem("causal in pages", mask=_CAUSAL, keys=400, kv_heads=2, page_size=16),
    ),
    "*": (
        problem("document", mask=_DOCUMENTS, keys=400, kv_heads=2),
        problem("document alibi dropout", mask=_DOCUMENTS, score=("alibi",), dropout_p=0.2),
    ),
}
_LARGE: _Cases = {
    "plain": (problem("causal", mask=_CAUSAL), problem("full")),
    "+": (
        problem("causal alibi", mask=_CAUSAL, score=("alibi",)),
        problem("causal varlen", mask=_CAUSAL, sequences=((_LENGTH, _LENGTH),) * _BATCH),
    ),
    "*": (problem("document", mask=_DOCUMENTS),),
}
_FEW = problem("full", queries=3, keys=1200, kv_heads=2)
_FEW_SMALL: _Cases = {
    "plain": (_FEW, replace(_FEW, name="causal", mask=_CAUSAL)),
    "+": (
        replace(_FEW, name="causal alibi softcap", mask=_CAUSAL, score=_CAPPED),
        replace(_FEW, name="bias", score=("bias_wide",)),
        replace(_FEW, name="causal dropout", mask=_CAUSAL, dropout_p=0.2),
        replace(_FEW, name="causal in pages", mask=_CAUSAL, page_size=16),
    ),
    "*": (
        replace(_FEW, name="document", mask=_DOCUMENTS),
        replace(
            _FEW, name="document alibi dropout", mask=_DOCUMENTS, score=("alibi",), dropout_p=0.2
        ),
    ),
}
_ONE = problem("full", queries=1, keys=_KEYS, kv_heads=2)
_FEW_LARGE: _Cases = {
    "plain": (_ONE,),
    "+": (replace(_ONE, name="causal alibi", mask=_CAUSAL, score=("alibi",)),),
    "*": (replace(_ONE, name="document", mask=_DOCUMENTS),),
}
_SHRINK, _TINY_WIDTH, _LARGEST_TINY = 8, 16, 40


def small(job: Job, tiny: bool) -> list[Case]:
    """Problems whose results are compared with the reference's; lengths that no block divides.

    Args:
        job: whose kind they are of.
        tiny: for the interpreter.
    """
    cases = (_FEW_SMALL if job.pass_name == "decode" else _SMALL)[job.kind]
    if job.pass_name not in ("forward", "decode"):  # no gradient knows pages
        cases = tuple(case for case in cases if not case.page_size)
    return [_sized(case, job, tiny) for case in cases]


def large(job: Job, tiny: bool) -> list[Case]:
    """Problems that are timed; tiny ones measure nothing.

    They have 16k tokens; those of decoding have eight sequences of one query and 16k keys.
    """
    few = job.pass_name == "decode"
    cases = (_FEW_LARGE if few else _LARGE)[job.kind]
    heads = max(1, (_CACHED if few else _HIDDEN) // job.width)
    shape: dict[str, Any] = {"batch": _BATCH, "heads": heads, "kv_heads": heads}
    if few:
        shape |= {"batch": 2 * _BATCH, "heads": _GROUP * heads}
    else:
        shape |= {"queries": _LENGTH, "keys": _LENGTH}
    wide = cases if tiny else [replace(case, **shape) for case in cases]
    return [_sized(case, job, tiny) for case in wide]


def _sized(case: Case, job: Job, tiny: bool) -> Case:
    """Return the problem in the job's dtype and width, or tiny."""
    if not tiny:
        return replace(case, dtype=job.type, head_dim=job.width, value_dim=job.width)
    sequences = case.sequences
    if sequences is not None:
        sequences = tuple((min(m, _LARGEST_TINY), min(n, _LARGEST_TINY)) for m, n in sequences[:2])
    return replace(
        case,
        batch=1,
        heads=2,
        kv_heads=1 if case.kv_heads < case.heads else 2,
        queries=_shrunk(case.queries),
        keys=_shrunk(case.keys),
        head_dim=_TINY_WIDTH,
        value_dim=_TINY_WIDTH,
        dtype=job.type,
        sequences=sequences,
    )


def _shrunk(length: int) -> int:
    """Return a length that takes the interpreter no long time; one that is tiny already stays."""
    return length if length <= _LARGEST_TINY else min(length // _SHRINK, 4 * _LARGEST_TINY)
