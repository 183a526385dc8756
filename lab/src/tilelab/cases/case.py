"""One attention problem in a few words: a row that tests, gate, GPU check and tuner can take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tilelab.cases.variants import MaskMaker, ScoreMaker
from tilewise.problem import Statistics


@dataclass(frozen=True)
class Case:
    """One attention problem. The tensors follow from ``repr``: ``inputs.build`` makes them.

    Args:
        name: of the case.
        batch, heads, kv_heads, queries, keys, head_dim, value_dim: its shape.
        dtype: of q, k and v.
        mask: postfix over the names of ``variants``, ``and``, ``or``, ``not``, and ``tiles``,
            which makes a table of tiles of the mask before it. A function may stand for a name.
        score: steps by name, or as functions.
        sinks: whether there are.
        dropout_p: the probability of dropping a pair.
        scale: None for 1 / sqrt(D).
        layout: "contiguous", "bshd" (a transposed view), "strided" (gaps that hold NaN),
            "expanded" (one head of one item for all) or "sliced" (cut out of a larger tensor).
        sequences: (queries, keys) of each sequence of a variable-length call; batch, queries and
            keys follow from it then. None for a dense call.
        gain: multiplies q and k.
        statistics: of the rows, that a call gives too.
        page_size: of the pages that keys and values lie in; 0: they do not.
        every_dtype: whether the GPU check runs it in float32 and float16 too.
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
    mask: tuple[str | MaskMaker, ...] = ()
    score: tuple[str | ScoreMaker, ...] = ()
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "contiguous"
    sequences: tuple[tuple[int, int], ...] | None = None
    gain: float = 1.0
    statistics: Statistics = field(default="", repr=False)
    page_size: int = field(default=0, repr=False)
    every_dtype: bool = field(default=False, repr=False)

    def of(self, dtype: torch.dtype) -> Case:
        """Return the same case in another dtype."""
        return replace(self, dtype=dtype)

    def __str__(self) -> str:
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"
