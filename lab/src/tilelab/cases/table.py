"""The rows of cases: small ones for the tests, and larger ones for the check on a GPU."""

from __future__ import annotations

from typing import Any

from tilelab.cases.case import Case

_WIDE: dict[str, Any] = {"queries": 200, "keys": 200}
_GROUPED: dict[str, Any] = {"heads": 6, "kv_heads": 2}

# The cases of the tests, in float32 (``of`` gives the other dtypes).
TABLE = (
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


def problem(name: str, **changes: Any) -> Case:
    """Return a case of the size that the GPU check and the tuner take where they say no other.

    No tile divides its lengths. There are as many keys as queries, key heads as heads, and values
    are as wide as keys, where ``changes`` says nothing else.

    Args:
        name: of the case.
        changes: its other fields. Queries and widths of -1 are the setting's long ones, keys of
            -1 one more than the setting decodes with.
    """
    fields: dict[str, Any] = {"heads": 4, "queries": 321, "head_dim": 64} | changes
    usual = {
        "kv_heads": fields["heads"],
        "keys": fields["queries"],
        "value_dim": fields["head_dim"],
    }
    return Case(name, **{**usual, **fields})


_CAUSAL = ("causal",)
_DOCUMENTS = ("documents_of_40", "causal", "and")
_GROUPED_8: dict[str, Any] = {"heads": 8, "kv_heads": 2}
_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0), (200, 200))

# Every feature once.
PROBLEMS = (
    problem("full D64", every_dtype=True),
    problem("causal D64", mask=_CAUSAL, every_dtype=True),
    problem("full D128", head_dim=128),
    problem("causal D128", head_dim=128, mask=_CAUSAL, every_dtype=True),
    problem("full D256", head_dim=256, heads=2),
    problem("causal D256", head_dim=256, heads=2, mask=_CAUSAL),
    problem("grouped 8:2", **_GROUPED_8, mask=_CAUSAL, head_dim=128),
    problem("multi-query", heads=5, kv_heads=1, keys=200),
    problem("window", mask=("window_share",), every_dtype=True),
    problem("document", mask=_DOCUMENTS, every_dtype=True),
    problem("alibi", mask=_CAUSAL, score=("alibi",), every_dtype=True),
    problem("table of tiles", mask=(*_DOCUMENTS, "tiles")),
    problem("varlen", sequences=_SEQUENCES, mask=_CAUSAL, every_dtype=True, **_GROUPED_8),
    problem("dropout", dropout_p=0.2, every_dtype=True),
    problem("sinks", sinks=True, mask=_CAUSAL),
    problem("softcap", score=("softcap_tight",)),
    problem("bias", score=("bias_wide",), every_dtype=True),
    problem("odd widths", head_dim=80, value_dim=40, mask=_CAUSAL),
    problem("narrow", head_dim=3, value_dim=111),
    problem("D192 Dv128", head_dim=192, value_dim=128, mask=_CAUSAL),
    problem("one row", queries=1, keys=1000, **_GROUPED_8, head_dim=128),
    problem(
        "one row, long keys",
        queries=1,
        keys=-1,
        **_GROUPED_8,
        head_dim=128,
        mask=_CAUSAL,
        every_dtype=True,
    ),
    problem(
        "few rows, long keys",
        queries=7,
        keys=-1,
        heads=6,
        kv_heads=1,
        mask=("lengths",),
        score=("alibi",),
        sinks=True,
    ),
    problem("few rows, dropout", queries=16, keys=-1, mask=_CAUSAL, dropout_p=0.2),
    problem("few rows, window", queries=5, keys=-1, mask=("window_share",), head_dim=256),
    problem("one key", queries=33, keys=1),
    problem("no rows", queries=0, keys=65),
    problem("dead rows", keys=100, mask=_CAUSAL, sinks=True),
    problem("long keys", queries=65, keys=700, mask=_CAUSAL),
    problem("prefix", mask=("prefix",)),
    problem("lengths", batch=4, mask=("lengths",)),
    problem("boolean tensor", mask=("bool",)),
    problem("layout of tiles", mask=("layout",)),
    problem("dilated", mask=("dilated",)),
    problem("windows of heads", mask=("windows_of_heads",)),
    problem("bias of keys", score=("bias_keys",), mask=_CAUSAL),
    problem("relative table", score=("relative",), every_dtype=True),
    problem("buckets", score=("buckets",)),
    problem("temperature", score=("temperature",), mask=_CAUSAL),
    problem("rows and keys", score=("rows_keys",)),
    problem(
        "everything",
        score=("temperature", "softcap", "relative", "alibi"),
        mask=_DOCUMENTS,
        sinks=True,
        **_GROUPED_8,
    ),
    problem("dropout, grouped", dropout_p=0.5, mask=_CAUSAL, sinks=True, **_GROUPED_8),
    problem(
        "varlen, variants",
        sequences=_SEQUENCES,
        mask=("window_share",),
        score=("alibi",),
        sinks=True,
    ),
    problem("varlen, dropout", sequences=_SEQUENCES, dropout_p=0.3),
    problem("heads last", layout="bshd", mask=_CAUSAL, **_GROUPED_8),
    problem("strided", layout="strided", queries=129),
    problem("scale below 0", scale=-0.3, mask=_CAUSAL),
    problem("D512", head_dim=512, batch=1, heads=2, queries=129),
)

# One head: the whole matrix in float64 is 2 GB, and the reference has a dozen of them.
LONG = tuple(
    problem(name, batch=1, heads=1, queries=-1, head_dim=-1, **variant)
    for name, variant in (
        ("full", {}),
        ("causal", {"mask": _CAUSAL}),
        ("alibi", {"mask": _CAUSAL, "score": ("alibi",)}),
        ("document", {"mask": _DOCUMENTS}),
        ("window", {"mask": ("window_share",)}),
        ("table of tiles", {"mask": (*_DOCUMENTS, "tiles")}),
        ("dropout", {"dropout_p": 0.1}),
        ("relative table", {"score": ("relative",)}),
    )
)


def find(name: str) -> Case:
    """Return the problem of that name."""
    return next(case for case in PROBLEMS if case.name == name)
