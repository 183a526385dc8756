"""The case table that tests and benchmarks share, and a strategy that draws more of them.

A ``Case`` says what is asked in a few words; ``inputs.build`` makes its tensors and ``oracle.py``
runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.captured import MASKS, SCORES

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "bshd", "strided", "expanded", "sliced")


@dataclass(frozen=True)
class Case:
    """One attention problem.

    ``mask`` is postfix over the names in ``MASKS`` and ``and``, ``or``, ``not``; ``score`` names
    entries of ``SCORES`` in order. ``layout`` is one of ``LAYOUTS``. ``sequences`` (lengths of
    queries and keys) makes it a variable-length call; batch, queries and keys then follow from it.
    ``gain`` multiplies q and k, ``scale`` None is the default.
    """

    name: str
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 65
    keys: int = 65
    head_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    mask: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "contiguous"
    sequences: tuple[tuple[int, int], ...] | None = None
    gain: float = 1.0

    def of(self, dtype: torch.dtype) -> Case:
        """The same case in another dtype."""
        return replace(self, dtype=dtype)

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


def _table() -> tuple[Case, ...]:
    """The named cases, in float32 (``of`` gives the other dtypes)."""
    wide: dict[str, Any] = {"queries": 200, "keys": 200}
    gqa: dict[str, Any] = {"heads": 6, "kv_heads": 2}
    return (
        Case("plain", **wide),
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
        Case("causal", **wide, mask=("causal",), head_dim=64, value_dim=64),
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
        Case("lengths-causal", batch=3, **wide, mask=("lengths", "causal", "and")),
        Case("document", queries=200, keys=200, mask=("document",)),
        Case("document-causal", batch=3, **wide, mask=("document_each", "causal", "and")),
        Case("document-or", queries=129, keys=65, mask=("document_each", "window", "or")),
        Case("inverted", queries=200, keys=200, mask=("window", "not", "lengths", "and")),
        Case("nested", **wide, mask=("causal", "document", "not", "or", "bool_keys", "and", "not")),
        Case("bool", queries=65, keys=129, mask=("bool",)),
        Case("bool-pairs", queries=129, keys=65, mask=("bool_pairs",)),
        Case("bool-keys", batch=3, queries=33, keys=257, mask=("bool_keys",)),
        Case("bool-rows", queries=129, keys=33, mask=("bool_rows",)),
        Case("nothing", queries=65, keys=65, mask=("nothing",)),
        Case("nothing-sinks", queries=65, keys=65, mask=("nothing",), sinks=True),
        Case("alibi", **wide, heads=4, kv_heads=4, mask=("causal",), score=("alibi",)),
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
        Case("dropout-causal", queries=65, keys=200, dropout_p=0.1, mask=("causal",), **gqa),
        Case("dropout-all", queries=65, keys=67, dropout_p=0.5, sinks=True, score=("bias",)),
        Case("grouped", queries=129, keys=129, **gqa, mask=("causal",)),
        Case("multi-query", queries=65, keys=200, heads=5, kv_heads=1),
        Case(
            "grouped-all", **wide, **gqa, mask=("bool",), score=("alibi", "bias_heads"), sinks=True
        ),
        Case("bshd", **wide, **gqa, layout="bshd", mask=("causal",)),
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
            "varlen-cross", sequences=((33, 64), (0, 5), (7, 0), (64, 33)), mask=("causal",), **gqa
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


TABLE = _table()
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 512)
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 191, 200, 257)


@st.composite
def mask_words(draw: st.DrawFn, depth: int = 2) -> tuple[str, ...]:
    """A postfix mask of at most ``depth`` nested connectives."""
    kind = draw(st.sampled_from(("leaf", "leaf", "not", "and", "or"))) if depth else "leaf"
    if kind == "leaf":
        return (draw(st.sampled_from(sorted(MASKS))),)
    first: tuple[str, ...] = draw(mask_words(depth - 1))
    if kind == "not":
        return (*first, "not")
    return (*first, *draw(mask_words(depth - 1)), kind)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any problem that is small enough to check: odd sizes, composed masks, scores, layouts."""
    length = st.one_of(st.integers(0, 20), st.sampled_from((31, 64, 65, 100, 129, 150)))
    width = st.one_of(st.integers(1, 20), st.sampled_from((32, 33, 64, 80)))
    kv_heads = draw(st.integers(1, 2))
    sequences = draw(st.none() | st.none() | st.lists(st.tuples(length, length), max_size=3))
    return Case(
        "drawn",
        batch=draw(st.integers(0, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        queries=draw(length),
        keys=draw(length),
        head_dim=draw(width),
        value_dim=draw(width),
        dtype=draw(st.sampled_from(FLOATS)),
        mask=draw(st.just(()) | mask_words()),
        score=tuple(draw(st.lists(st.sampled_from(sorted(SCORES)), max_size=3))),
        sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.1, 0.6))),
        scale=draw(st.sampled_from((None, None, 0.0, -0.5, 1.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
        sequences=None if sequences is None else tuple(sequences),
    )
