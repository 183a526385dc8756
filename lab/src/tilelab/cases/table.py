"""The rows: every attention that is tested, checked, compiled, tuned or measured.

A row says which rooms select it (``Case.uses``), and ``rows`` is how they do. Sections differ in
the sizes of their rows. A row of one section may name uses beside the section's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch

from tilelab.cases.case import Case, Goal, Pass, Use
from tilewise.variants.float8 import FLOAT8


def rows(use: Use) -> list[Case]:
    """Return the rows of a use, in order."""
    return [case for case in ROWS if use in case.uses]


def find(use: Use, name: str) -> Case:
    """Return the row of that name."""
    return next(case for case in rows(use) if case.name == name)


def _used(use: Use, *cases: Case) -> tuple[Case, ...]:
    """Return rows with one more use."""
    return tuple(replace(case, uses=(use, *case.uses)) for case in cases)


_CAUSAL = ("causal",)
_WIDE: dict[str, Any] = {"queries": 200, "keys": 200}
_GROUPED: dict[str, Any] = {"heads": 6, "kv_heads": 2}

# In float32 (``of`` gives the other dtypes).
_TESTS = _used(
    "tests",
    Case("plain", **_WIDE),
    Case("one-row", queries=1, keys=257, head_dim=64, value_dim=64),
    Case("one-key", queries=33, keys=1),
    Case("one-pair", batch=1, heads=1, kv_heads=1, queries=1, keys=1, head_dim=1, value_dim=1),
    Case("no-rows", queries=0, mask=("causal",)),
    Case("no-keys", keys=0, mask=("causal",)),
    Case("no-keys-sinks", keys=0, sinks=True, score=("bias_keys",)),
    Case("no-batch", batch=0, mask=("lengths",), score=("bias",)),
    Case(
        "long",
        batch=1,
        queries=521,
        keys=1030,
        head_dim=16,
        value_dim=16,
        mask=("causal",),
        score=("bias_keys",),
    ),
    Case("causal", **_WIDE, mask=("causal",), head_dim=64, value_dim=64),
    Case("causal-long-keys", queries=64, keys=191, mask=("causal",)),
    Case("causal-dead-rows", queries=191, keys=64, mask=("causal",)),
    Case("causal-top", queries=65, keys=191, mask=("causal_top",)),
    Case("window", queries=257, keys=257, mask=("window",)),
    Case("window-cross", queries=129, keys=200, mask=("window",)),
    Case("window-left", queries=200, keys=129, mask=("window_left",)),
    Case("window-right-top", queries=129, keys=200, mask=("window_right",)),
    Case("diagonal", queries=129, keys=129, mask=("diagonal",)),
    Case("prefix", queries=129, keys=191, mask=("prefix",)),
    Case("prefix-each", batch=3, queries=129, keys=129, mask=("prefix_each",)),
    Case("lengths", batch=4, queries=65, keys=257, mask=("lengths",)),
    Case("lengths-causal", batch=3, **_WIDE, mask=("lengths", "causal", "and")),
    Case("document", queries=200, keys=200, mask=("document",)),
    Case("document-causal", batch=3, **_WIDE, mask=("document_each", "causal", "and")),
    Case("document-or", queries=129, keys=65, mask=("document_each", "window", "or")),
    Case("inverted", queries=200, keys=200, mask=("window", "not", "lengths", "and")),
    Case("nested", **_WIDE, mask=("causal", "document", "not", "or", "bool_keys", "and", "not")),
    Case("bool", queries=65, keys=129, mask=("bool",)),
    Case("bool-pairs", queries=129, keys=65, mask=("bool_pairs",)),
    Case("bool-keys", batch=3, queries=33, keys=257, mask=("bool_keys",)),
    Case("bool-rows", queries=129, keys=33, mask=("bool_rows",)),
    Case("nothing", queries=65, keys=65, mask=("nothing",)),
    Case("nothing-sinks", queries=65, keys=65, mask=("nothing",), sinks=True),
    Case("alibi", **_WIDE, heads=4, kv_heads=4, mask=("causal",), score=("alibi",)),
    Case("alibi-each", queries=65, keys=129, heads=3, kv_heads=3, score=("alibi_each",)),
    Case("softcap", queries=129, keys=129, mask=("causal",), score=("softcap",)),
    Case("softcap-tight", queries=65, keys=65, score=("softcap_tight",)),
    Case("bias", queries=65, keys=129, score=("bias",)),
    Case("bias-heads", batch=3, queries=129, keys=65, score=("bias_heads",), mask=("causal",)),
    Case("bias-keys", queries=129, keys=200, score=("bias_keys",)),
    Case("bias-rows", queries=129, keys=65, score=("bias_rows",)),
    Case("bias-one", queries=65, keys=65, score=("bias_one",), mask=("lengths",)),
    Case("bias-wide", queries=65, keys=65, score=("bias_wide",)),
    Case("bias-inf", queries=65, keys=129, score=("bias_inf",)),
    Case("two-biases", queries=65, keys=65, score=("bias_heads", "softcap_tight", "bias_keys")),
    Case("cap-bias-alibi", queries=65, keys=129, score=("softcap_tight", "bias", "alibi")),
    Case("sinks", queries=129, keys=129, sinks=True, mask=("causal",)),
    Case("sinks-dead-rows", queries=129, keys=65, sinks=True, mask=("causal",)),
    Case("dropout", queries=129, keys=129, dropout_p=0.3),
    Case("dropout-causal", queries=65, keys=200, dropout_p=0.1, mask=("causal",), **_GROUPED),
    Case("dropout-all", queries=65, keys=67, dropout_p=0.5, sinks=True, score=("bias",)),
    Case("grouped", queries=129, keys=129, **_GROUPED, mask=("causal",)),
    Case("multi-query", queries=65, keys=200, heads=5, kv_heads=1),
    Case(
        "grouped-all",
        **_WIDE,
        **_GROUPED,
        mask=("bool",),
        score=("alibi", "bias_heads"),
        sinks=True,
    ),
    Case("bshd", **_WIDE, **_GROUPED, layout="bshd", mask=("causal",)),
    Case("strided", queries=65, keys=129, layout="strided"),
    Case("expanded", queries=65, keys=129, layout="expanded", mask=("causal",)),
    Case("sliced", queries=65, keys=129, layout="sliced", score=("softcap",)),
    Case("scale-zero", scale=0.0, mask=("causal",)),
    Case("scale-negative", scale=-0.7, score=("softcap",)),
    Case("wide", queries=65, keys=65, head_dim=256, value_dim=128),
    Case("widest", batch=1, queries=33, keys=65, head_dim=512, value_dim=512),
    Case("narrow", queries=129, keys=65, head_dim=3, value_dim=111, mask=("causal",)),
    Case("odd", queries=63, keys=191, head_dim=80, value_dim=40, mask=("window",)),
    Case("varlen", sequences=((65, 65), (1, 1), (129, 129), (17, 17)), mask=("causal",)),
    Case(
        "varlen-cross", sequences=((33, 64), (0, 5), (7, 0), (64, 33)), mask=("causal",), **_GROUPED
    ),
    Case(
        "varlen-all",
        sequences=((65, 33), (20, 65)),
        mask=("lengths", "window", "and"),
        score=("softcap", "alibi_each", "bias"),
        sinks=True,
        dropout_p=0.2,
    ),
    Case(
        "varlen-document",
        sequences=((65, 65), (33, 33)),
        mask=("document_each",),
        layout="bshd",
        score=("bias_keys",),
    ),
    Case("varlen-strided", sequences=((33, 65), (65, 65)), layout="strided", sinks=True),
    Case("varlen-none", sequences=(), mask=("causal",)),
)


def _problem(name: str, **changes: Any) -> Case:
    """Return a case of the size that the GPU check and the tuner take where they say no other.

    No tile divides its lengths. There are as many keys as queries, key heads as heads, and values
    are as wide as keys, where ``changes`` says nothing else. Keys of -1 are one more than the
    setting decodes with.
    """
    fields: dict[str, Any] = {"heads": 4, "queries": 321, "head_dim": 64} | changes
    usual = {
        "kv_heads": fields["heads"],
        "keys": fields["queries"],
        "value_dim": fields["head_dim"],
    }
    return Case(name, **{**usual, **fields})


_DOCUMENTS = ("documents_of_40", "causal", "and")
_GROUPED_8: dict[str, Any] = {"heads": 8, "kv_heads": 2}
_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0), (200, 200))

# Every feature once.
_ACCURACY = _used(
    "accuracy",
    _problem("full D64", every_dtype=True),
    _problem("causal D64", mask=_CAUSAL, every_dtype=True),
    _problem("full D128", head_dim=128),
    _problem("causal D128", head_dim=128, mask=_CAUSAL, every_dtype=True),
    _problem("full D256", head_dim=256, heads=2),
    _problem("causal D256", head_dim=256, heads=2, mask=_CAUSAL),
    _problem("grouped 8:2", **_GROUPED_8, mask=_CAUSAL, head_dim=128),
    _problem("multi-query", heads=5, kv_heads=1, keys=200),
    _problem("window", mask=("window_share",), every_dtype=True),
    _problem("document", mask=_DOCUMENTS, every_dtype=True),
    _problem("alibi", mask=_CAUSAL, score=("alibi",), every_dtype=True),
    _problem("table of tiles", mask=(*_DOCUMENTS, "tiles")),
    _problem("table of tiles D128", mask=(*_DOCUMENTS, "tiles"), head_dim=128, every_dtype=True),
    _problem("varlen", sequences=_SEQUENCES, mask=_CAUSAL, every_dtype=True, **_GROUPED_8),
    _problem("dropout", dropout_p=0.2, every_dtype=True),
    _problem("sinks", sinks=True, mask=_CAUSAL),
    _problem("sinks D128", sinks=True, mask=_CAUSAL, head_dim=128, every_dtype=True),
    _problem("softcap", score=("softcap_tight",)),
    _problem("bias", score=("bias_wide",), every_dtype=True),
    _problem("odd widths", head_dim=80, value_dim=40, mask=_CAUSAL),
    _problem("narrow", head_dim=3, value_dim=111),
    _problem("D192 Dv128", head_dim=192, value_dim=128, mask=_CAUSAL),
    _problem("one row", queries=1, keys=1000, **_GROUPED_8, head_dim=128),
    _problem(
        "one row, long keys",
        queries=1,
        keys=-1,
        **_GROUPED_8,
        head_dim=128,
        mask=_CAUSAL,
        every_dtype=True,
    ),
    _problem(
        "few rows, long keys",
        queries=7,
        keys=-1,
        heads=6,
        kv_heads=1,
        mask=("lengths",),
        score=("alibi",),
        sinks=True,
    ),
    _problem("few rows, dropout", queries=16, keys=-1, mask=_CAUSAL, dropout_p=0.2),
    _problem("few rows, window", queries=5, keys=-1, mask=("window_share",), head_dim=256),
    _problem("one key", queries=33, keys=1),
    _problem("no rows", queries=0, keys=65),
    _problem("dead rows", keys=100, mask=_CAUSAL, sinks=True),
    _problem("long keys", queries=65, keys=700, mask=_CAUSAL),
    _problem("prefix", mask=("prefix",)),
    _problem("lengths", batch=4, mask=("lengths",)),
    _problem("boolean tensor", mask=("bool",)),
    _problem("layout of tiles", mask=("layout",)),
    _problem("dilated", mask=("dilated",)),
    _problem("windows of heads", mask=("windows_of_heads",)),
    _problem("bias of keys", score=("bias_keys",), mask=_CAUSAL),
    _problem("relative table", score=("relative",), every_dtype=True),
    _problem("buckets", score=("buckets",)),
    _problem("temperature", score=("temperature",), mask=_CAUSAL),
    _problem("rows and keys", score=("rows_keys",)),
    _problem(
        "everything",
        score=("temperature", "softcap", "relative", "alibi"),
        mask=_DOCUMENTS,
        sinks=True,
        **_GROUPED_8,
    ),
    _problem("dropout, grouped", dropout_p=0.5, mask=_CAUSAL, sinks=True, **_GROUPED_8),
    _problem(
        "varlen, variants",
        sequences=_SEQUENCES,
        mask=("window_share",),
        score=("alibi",),
        sinks=True,
    ),
    _problem("varlen, dropout", sequences=_SEQUENCES, dropout_p=0.3),
    _problem("heads last", layout="bshd", mask=_CAUSAL, **_GROUPED_8),
    _problem("strided", layout="strided", queries=129),
    _problem("scale below 0", scale=-0.3, mask=_CAUSAL),
    _problem("D512", head_dim=512, batch=1, heads=2, queries=129),
    _problem("key lists", listed=64, mask=_CAUSAL, score=("alibi",), keys=500, **_GROUPED_8),
    _problem("key lists, learned", listed=40, score=("relative",), sinks=True),
    _problem(
        "blocks of keys",
        listed=5,
        list_block=64,
        list_rows=32,
        keys=1024,
        mask=_CAUSAL,
        every_dtype=True,
        **_GROUPED_8,
    ),
)

_TUNED_DOCUMENTS = ("documents_of_1k", "causal", "and")
_CAPPED = ("alibi", "softcap")

_TUNED = _used(
    "tune small",
    _problem("causal", mask=_CAUSAL, keys=400, kv_heads=2),
    _problem("full", keys=200, kv_heads=2),
    _problem("causal alibi softcap", mask=_CAUSAL, score=_CAPPED, kv_heads=2),
    _problem("bias", score=("bias_wide",), keys=200),
    _problem("causal dropout", mask=_CAUSAL, dropout_p=0.2),
    _problem("causal varlen", mask=_CAUSAL, sequences=_SEQUENCES[:5], kv_heads=2),
    _problem("causal in pages", mask=_CAUSAL, keys=400, kv_heads=2, page_size=16),
    _problem("document", mask=_TUNED_DOCUMENTS, keys=400, kv_heads=2),
    _problem("document alibi dropout", mask=_TUNED_DOCUMENTS, score=("alibi",), dropout_p=0.2),
)


def _compiled(words: str, *widths: int, quick: Sequence[int] = (), **more: Any) -> list[Case]:
    """Return a row for each width, of training size: Triton sees strides that 16 divides.

    ``widths`` are of queries, keys and values; ``quick`` are those that ``--quick`` has. Few
    queries are the last ones. Float8 has no backward pass, nor have latent vectors.
    """
    varlen, dtype = "sequences" in more, more.get("dtype", torch.bfloat16)
    trains = dtype is not FLOAT8 and not {"statistics", "layout"} & more.keys()
    fields: dict[str, Any] = {
        "layout": "contiguous" if varlen else "bshd",
        "passes": "both" if trains else "forward",
        "queries": 4096,
        "uses": ("gate",),
    }
    fields |= {"dtype": dtype, **more}
    return [
        Case(
            f"D{width} {words}",
            batch=2,
            heads=16,
            kv_heads=8,
            keys=4096,
            head_dim=width,
            value_dim=min(width, 512),
            quick=width in quick,
            **fields,
        )
        for width in widths
    ]


_EACH = ("document_each", "causal", "and")
_FEW = ("few_documents", "causal", "and")
_EIGHT: dict[str, Any] = {"dtype": FLOAT8}
_SINGLE: dict[str, Any] = {"dtype": torch.float32}
_INT8: dict[str, Any] = {"stored": torch.int8}
_FP8: dict[str, Any] = {"stored": FLOAT8}
_ONE: dict[str, Any] = {"queries": 1, "kind": "decode"}
_PREFILL: dict[str, Any] = {"mask": _CAUSAL, "passes": "forward"}
_FOUR: dict[str, Any] = {"queries": 4, "kind": "decode"}
_CAP: dict[str, Any] = {"mask": _CAUSAL, "score": _CAPPED}
_FACTS: dict[str, Any] = {"sinks": True, "statistics": "top1"}
# Lists of single keys and of blocks of them, each for 64 rows.
_LISTED: dict[str, Any] = {"listed": 1024, "list_rows": 32, "kind": "lists"}
_BLOCKS: dict[str, Any] = {**_LISTED, "listed": 16, "list_block": 64}
# Every row of the table of blocks at every width: plain, heavy and scattered, 16 bits and float32.
_GATE = (
    _compiled("full fp8", 64, 128, 256, **_EIGHT),
    _compiled("causal fp8", 64, 128, 256, mask=_CAUSAL, **_EIGHT),
    _compiled("full", 64, 128, 256),
    _compiled("causal", 64, 80, 128, 256, 512, mask=_CAUSAL, quick=(64, 128)),
    _compiled("causal fp16", 64, 128, mask=_CAUSAL, dtype=torch.float16),
    _compiled("causal fp32", 64, 128, 256, 512, mask=_CAUSAL, **_SINGLE),
    _compiled("alibi softcap causal fp32", 64, 128, **_CAP, **_SINGLE),
    _compiled("window", 128, mask=("window_1k",)),
    _compiled("document", 64, 128, 256, mask=_EACH),
    _compiled("table", 128, mask=(*_EACH, "tiles")),
    _compiled("alibi softcap causal", 128, 256, 512, **_CAP, quick=(128,)),
    _compiled("bias", 64, 128, score=("bias_heads",)),
    _compiled("raw causal", 128, mask=_CAUSAL, score=("raw",)),
    _compiled("head bias", 64, 128, score=("bias_of_heads",)),
    _compiled("head bias fp32", 64, score=("bias_of_heads",), **_SINGLE),
    _compiled("dropout causal", 128, mask=_CAUSAL, dropout_p=0.1),
    _compiled("varlen causal", 128, mask=_CAUSAL, sequences=((4096, 4096),) * 2),
    _compiled("sinks statistics", 64, 128, mask=_CAUSAL, **_FACTS),
    _compiled("causal", 64, 128, 256, mask=_CAUSAL, score=("learned",), kind="captured"),
    _compiled("few causal", 64, 128, 256, mask=_CAUSAL, score=("few_places",), kind="captured"),
    _compiled("causal", 64, 128, 256, mask=_CAUSAL, quick=(128,), **_ONE),
    _compiled("causal fp32", 128, mask=_CAUSAL, **_SINGLE, **_ONE),
    _compiled("document", 128, mask=_FEW, **_FOUR),
    _compiled("alibi softcap causal", 128, **_CAP, **_FOUR),
    _compiled("sinks statistics", 128, **_FACTS, **_ONE),
    _compiled("causal fp8", 128, mask=_CAUSAL, **_EIGHT, **_ONE),
    _compiled("keys", 64, 128, 256, 512, quick=(128,), **_LISTED),
    _compiled("keys fp32", 128, **_SINGLE, **_LISTED),
    _compiled("keys alibi softcap causal", 128, **_CAP, **_LISTED),
    _compiled("keys learned", 128, score=("learned",), **_LISTED),
    _compiled("blocks of keys", 64, 128, 256, **_BLOCKS),
    _compiled("latent causal", 576, mask=_CAUSAL, layout="latent"),
    _compiled("latent causal fp32", 576, mask=_CAUSAL, layout="latent", **_SINGLE),
    _compiled("latent causal", 576, mask=_CAUSAL, layout="latent", **_ONE),
    _compiled("latent pages of 64", 576, layout="latent", page_size=64, **_ONE),
    _compiled("causal pages of 16", 128, mask=_CAUSAL, page_size=16, **_ONE),
    _compiled("causal pages of 128", 128, mask=_CAUSAL, page_size=128, **_ONE),
    _compiled("causal pages of 16", 128, mask=_CAUSAL, page_size=16, passes="forward"),
    _compiled("causal pages of 128", 128, mask=_CAUSAL, page_size=128, passes="forward"),
    _compiled("causal pages of 16 fp8", 128, mask=_CAUSAL, page_size=16, **_EIGHT),
    _compiled("causal int8 pages of 16", 128, mask=_CAUSAL, page_size=16, **_INT8, **_ONE),
    _compiled("causal fp8 pages of 128", 128, mask=_CAUSAL, page_size=128, **_FP8, **_ONE),
    _compiled("causal int8 pages of 128", 128, page_size=128, **_INT8, **_PREFILL),
    _compiled("causal fp8 pages of 16", 128, page_size=16, **_FP8, **_PREFILL),
)

_DTYPES = ("float32", "bfloat16", "float16")
# Which pairs attend, and what happens to their scores; the record has the names.
_KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": _CAUSAL},
    "window": {"mask": ("window_256",)},
    "bias": {"score": ("bias_of_pairs",)},
    "dropout": {"dropout_p": 0.1},
}
_Sizes: TypeAlias = tuple[int, int, int, int, int, int]  # B, Hq, Hk, M, N, D


def _square(batch: int, heads: int, length: int, width: int, kv_heads: int = 0) -> _Sizes:
    return batch, heads, kv_heads or heads, length, length, width


def _on_cpu(
    name: str,
    sizes: _Sizes,
    goals: Sequence[Goal],
    kind: str = "full",
    *,
    backward: bool = False,
    quick: Sequence[str] = (),
) -> list[Case]:
    """Return a row in every dtype that has a goal."""
    passes: Pass = "backward" if backward else "forward"
    row = Case(name, *sizes, sizes[-1], kind=kind, passes=passes, uses=("goals",), **_KINDS[kind])
    return [
        replace(row, dtype=getattr(torch, dtype), goal=goal, quick=dtype in quick)
        for dtype, goal in zip(_DTYPES, goals, strict=False)
    ]


# The shapes are those of the prototype's study, so that numbers compare. Goals are for a processor
# with AVX-512 and BF16 and without AMX, on one thread.
_HALF = Goal(1.5)  # float16, forward
_FULL_64 = (Goal(1.25, 0.86), Goal(2.4, 0.78), _HALF)
_FULL_128 = (Goal(1.18, 0.86), Goal(2.25, 0.78), _HALF)
_SHORT = (Goal(1.35), Goal(2.5))
_NEVER_SLOWER = (Goal(1.0), Goal(1.0), Goal(1.0))

_GOALS = (
    _on_cpu("forward full 2k D64", _square(1, 16, 2048, 64), _FULL_64, quick=_DTYPES),
    _on_cpu("forward full 4k D64", _square(1, 8, 4096, 64), _FULL_64),
    _on_cpu("forward full 8k D64", _square(1, 8, 8192, 64), _FULL_64),
    _on_cpu("forward full 16k D64", _square(1, 4, 16384, 64), _FULL_64),
    _on_cpu("forward full 2k D128", _square(1, 16, 2048, 128), _FULL_128, quick=_DTYPES[:2]),
    _on_cpu("forward full 4k D128", _square(1, 4, 4096, 128), _FULL_128),
    _on_cpu("forward full 8k D128", _square(1, 4, 8192, 128), _FULL_128),
    _on_cpu("forward full 16k D128", _square(1, 2, 16384, 128), _FULL_128),
    _on_cpu(
        "forward causal 512",
        _square(4, 8, 512, 64),
        (Goal(2.2), Goal(4.0), _HALF),
        "causal",
        quick=_DTYPES,
    ),
    _on_cpu(
        "forward causal 2k",
        _square(1, 16, 2048, 64),
        (Goal(1.5), Goal(2.8), _HALF),
        "causal",
        quick=_DTYPES[:2],
    ),
    _on_cpu(
        "forward causal 16k", _square(1, 4, 16384, 64), (Goal(1.35), Goal(2.5), _HALF), "causal"
    ),
    _on_cpu(
        "backward full 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.4, 0.85), Goal(1.5, 0.60), Goal(8.0)),
        backward=True,
        quick=_DTYPES[:2],
    ),
    _on_cpu(
        "backward causal 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.7, 0.82), Goal(2.0, 0.60), Goal(8.0)),
        "causal",
        backward=True,
        quick=_DTYPES[:2],
    ),
    _on_cpu("window 256 at 2k", _square(1, 8, 2048, 64), (Goal(9.0), Goal(15.0)), "window"),
    _on_cpu("additive mask 2k", _square(1, 8, 2048, 64), (Goal(1.35), Goal(2.2)), "bias"),
    _on_cpu("dropout 0.1 at 2k", _square(1, 8, 2048, 64), (Goal(5.0), Goal(6.0)), "dropout"),
    _on_cpu("grouped 32:4 at 2k", _square(1, 32, 2048, 64, 4), (Goal(1.25), Goal(2.4))),
    _on_cpu("short 129", _square(1, 64, 129, 64), _SHORT, quick=_DTYPES[:2]),
    _on_cpu("short 64", _square(1, 64, 64, 64), _SHORT),
    _on_cpu("short 33", _square(1, 64, 33, 64), _SHORT),
    *(
        _on_cpu(f"decode 8 heads, {keys} keys", (1, 8, 8, 1, keys, 64), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    *(
        _on_cpu(f"decode 32:4, D128, {keys} keys", (1, 32, 4, 1, keys, 128), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    _on_cpu("decode 8 heads, 16k keys", (1, 8, 8, 1, 16384, 64), (Goal(1.0), Goal(7.0))),
    _on_cpu("decode 32:4, D128, 16k keys", (1, 32, 4, 1, 16384, 128), (Goal(6.0), Goal(20.0))),
    _on_cpu("decode 4 rows, 32:4, 4k keys", (1, 32, 4, 4, 4096, 128), _NEVER_SLOWER),
    _on_cpu("decode 16 x 32:8, 1k keys", (16, 32, 8, 1, 1024, 128), _NEVER_SLOWER),
)


def _of_widths(width: int, values: int = 0, name: str = "", **more: Any) -> Case:
    """Return a row for widths of keys and values, which are as wide as keys where they are 0."""
    name = name or (f"D{width} Dv{values}" if values else f"D{width}")
    fields = {"batch": 1, "heads": 2, "mask": _CAUSAL, "passes": "both", **more}
    return _problem(name, head_dim=width, value_dim=values or width, **fields)


# The absorbed form of latent attention, decoding and some queries at once: forward alone.
_LATENT: dict[str, Any] = {"heads": 16, "kv_heads": 1, "keys": -1, "layout": "latent"}
_LATENT |= {"passes": "forward"}
_WIDTHS = _used(
    "head widths",
    *(_of_widths(width) for width in (80, 96, 112)),
    _of_widths(192, 128),
    _of_widths(256),
    _of_widths(320, 256),
    _of_widths(512),
    _of_widths(576, 512, "latent, 1 query", queries=1, **_LATENT),
    _of_widths(576, 512, "latent, 64 queries", queries=64, **_LATENT),
)

_FIFTHS, _UNEVEN = "documents_fifths", ("documents_uneven", "causal", "and")

# Each room says batch, heads, lengths and widths.
_SIZED = (
    _problem("none", uses=("variants",)),
    _problem(
        "full", passes="both", uses=("sweep", "paper", "long", "lengths", "tune large"), quick=True
    ),
    _problem(
        "causal",
        mask=_CAUSAL,
        passes="both",
        uses=("sweep", "variants", "long", "lengths", "tune large"),
    ),
    _problem(
        "alibi",
        mask=_CAUSAL,
        score=("alibi",),
        passes="both",
        uses=("long", "widths", "tune large"),
    ),
    _problem("causal varlen", mask=_CAUSAL, sequences=((4096, 4096),) * 4, uses=("tune large",)),
    _problem("document", mask=_TUNED_DOCUMENTS, uses=("tune large",)),
    _problem("document", mask=_DOCUMENTS, uses=("long",)),
    _problem("window", mask=("window_share",), uses=("long",)),
    _problem("table of tiles", mask=(*_DOCUMENTS, "tiles"), uses=("long",)),
    _problem("dropout and padding", dropout_p=0.1, mask=("padded",), uses=("paper",), quick=True),
    _problem("dropout", dropout_p=0.1, uses=("paper", "long")),
    _problem("padding", mask=("padded",), uses=("paper",)),
    # The GPU check times these. A packed row is one sequence to methods that know no packed ones.
    _problem("document", mask=_UNEVEN, passes="both", uses=("widths",)),
    _problem("window", mask=("window_1k",), passes="both", uses=("widths",)),
    _problem("decode", queries=1, keys=-1, heads=32, kv_heads=8, uses=("one width",)),
    _problem("fp8", uses=("one width",)),
    _problem("varlen", mask=_UNEVEN, layout="bshd", passes="both", uses=("one width",)),
    # Spellings in Python are what the recogniser does not know.
    *_used(
        "variants",
        _problem("window", mask=("window_eighth",)),
        _problem("causal window", mask=("window_eighth_before",)),
        _problem("prefix", mask=("prefix_eighth",)),
        _problem("documents", mask=(_FIFTHS,)),
        _problem("documents, causal", mask=(_FIFTHS, "causal", "and")),
        _problem("checkerboard", mask=("checkerboard",)),
        _problem("window of a head", mask=("window_by_head",)),
        _problem("dilated", mask=("sparse_dilated",)),
        _problem("strided", mask=("sparse_strided",)),
        _problem("fixed", mask=("sparse_fixed",)),
        _problem("butterfly", mask=("sparse_butterfly",)),
        _problem("Longformer", mask=("sparse_longformer",)),
        _problem("BigBird", mask=("sparse_bigbird",)),
        _problem("ALiBi, causal", mask=_CAUSAL, score=("alibi",)),
        _problem("softcap", score=("softcap",)),
        _problem("bias", score=("bias_wide",)),
        _problem("relative table", score=("relative",), uses=("long",)),
        _problem("Gaussian", score=("gaussian",)),
        _problem("ALiBi in Python", score=("alibi_in_python",)),
        _problem("softcap in Python", score=("softcap_in_python",)),
        _problem("window as a score", score=("window_as_score",)),  # no tile is skipped
        _problem("statistics", statistics="rows"),
        _problem("statistics and top key", statistics="top1"),
    ),
)

ROWS = (*_TESTS, *_ACCURACY, *_TUNED, *chain(*_GATE, *_GOALS), *_WIDTHS, *_SIZED)
