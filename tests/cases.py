"""The case table that the tests share, and a strategy that draws more cases.

The type of a case, the table and the tensors are the lab's (``tilelab.cases``), which checks,
compiles, tunes and measures the same. ``build`` makes the tensors of a case and ``oracle.py`` runs
it; ``drawn`` makes tensors without a case.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilelab.cases.case import Case
from tilelab.cases.inputs import Inputs, build
from tilelab.cases.table import rows
from tilelab.cases.variants import MASKS, SCORES

__all__ = [
    "FLOATS",
    "LAYOUTS",
    "LENGTHS",
    "TABLE",
    "WIDTHS",
    "Case",
    "Inputs",
    "build",
    "cases",
    "drawn",
    "mask_words",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "bshd", "strided", "expanded", "sliced")

TABLE = rows("tests")
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 512)
LENGTHS = (0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 129, 191, 200, 257)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, the same ones for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
