"""Problems for the accuracy steps: every feature once, said as a user would.

Lengths are odd on purpose: no tile divides them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import BlockMask, masks, scores

__all__ = ["LONG", "PROBLEMS", "Draw", "ProblemCase", "alibi", "bias", "causal", "find"]

Make = Callable[["Draw"], Any]


@dataclass(frozen=True)
class ProblemCase:
    """One problem.

    Args:
        name: of it.
        batch, heads, kv_heads, queries, keys, head_dim, value_dim: its shape; keys 0: as many as
            queries, -1: one more than the setting decodes with; value_dim 0: as head_dim; queries
            and head_dim -1: the setting's long ones.
        mask, score: made from a Draw; None for none.
        sinks: whether there are.
        dropout_p: of the probabilities.
        scale: None for 1 / sqrt(D).
        lengths: (queries, keys) of each sequence of a variable-length call; () for a dense one.
        layout: "contiguous", "bshd" (a transposed view) or "strided" (gaps that hold NaN).
        every_dtype: whether it runs in float32 and float16 too.
    """

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 321
    keys: int = 0
    head_dim: int = 64
    value_dim: int = 0
    mask: Make | None = None
    score: Make | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    layout: str = "contiguous"
    every_dtype: bool = False


class Draw:
    """The inputs of a mask or a score: the sizes of the call, and random tensors.

    Args:
        batch, heads, queries, keys: of the call (batch counts sequences, lengths are the longest).
        device: of the tensors.
        generator: of the numbers, on that device.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        queries: int,
        keys: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self.batch, self.heads, self.queries, self.keys = batch, heads, queries, keys
        self.device, self.generator = device, generator

    def normal(self, *size: int) -> Tensor:
        """Standard normal numbers that require a gradient, [size], float32."""
        drawn = torch.randn(size, generator=self.generator, device=self.device)
        return drawn.requires_grad_()

    def positive(self, *size: int) -> Tensor:
        """Return numbers in [0.1, 1.1), [size], float32, without gradient."""
        return 0.1 + torch.rand(size, generator=self.generator, device=self.device)

    def whole(self, low: int, high: int, *size: int) -> Tensor:
        """Whole numbers in [low, high), int64 [size]."""
        return torch.randint(low, high, size, generator=self.generator, device=self.device)

    def documents(self) -> Tensor:
        """Ids that rise by one at some keys, [B, N]; at least as many as there are queries."""
        starts = self.whole(0, 40, self.batch, max(self.queries, self.keys)) == 0
        return starts.long().cumsum(1)


def causal(draw: Draw) -> Any:
    """Return the causal mask."""
    return masks.causal()


def _window(draw: Draw) -> Any:
    return masks.window(max(1, draw.keys // 6), max(1, draw.keys // 20))


def _lengths(draw: Draw) -> Any:
    return masks.lengths(draw.whole(0, draw.keys + 1, draw.batch))


def _document(draw: Draw) -> Any:
    ids = draw.documents()
    return masks.document(ids[:, : draw.keys], ids[:, : draw.queries]) & masks.causal()


def _table(draw: Draw) -> Any:
    ids = draw.documents()[0]
    mask = masks.document(ids[: draw.keys]) & masks.causal()
    return BlockMask.of(mask, draw.queries, draw.keys)


def _layout(draw: Draw) -> Any:
    shape = (draw.heads, -(-draw.queries // 64), -(-draw.keys // 64))
    return BlockMask.from_layout(draw.whole(0, 2, *shape) == 0, (64, 64))


def _dilated(draw: Draw) -> Any:
    return lambda b, h, m, n: (m >= n) & ((m - n) % 3 == 0)


def _heads_windows(draw: Draw) -> Any:
    widths = draw.whole(1, max(2, draw.keys // 4), draw.heads)
    return lambda b, h, m, n: (m - n < widths[h]) & (n - m < widths[h])


def _boolean(draw: Draw) -> Any:
    return draw.whole(0, 3, draw.batch, 1, draw.queries, draw.keys) > 0


def alibi(draw: Draw) -> Any:
    """Return ALiBi with random slopes."""
    return scores.alibi(draw.positive(draw.heads))


def bias(draw: Draw) -> Any:
    """Return a learned bias of every pair."""
    return scores.bias(draw.normal(1, draw.heads, draw.queries, draw.keys))


def _bias_keys(draw: Draw) -> Any:
    return scores.bias(draw.normal(draw.batch, 1, 1, draw.keys))


def _relative(draw: Draw) -> Any:
    table, last = draw.normal(draw.heads, draw.queries + draw.keys), draw.keys
    return lambda s, b, h, m, n: s + table[h, m - n + last]


def _buckets(draw: Draw) -> Any:
    table = draw.normal(draw.heads, 17)
    return lambda s, b, h, m, n: s + table[h, tilewise.minimum(abs(m - n) // 8, 16)]


def _temperature(draw: Draw) -> Any:
    heat = draw.normal(draw.heads)
    return lambda s, b, h, m, n: s * (1 + 0.1 * heat[h])


def _rows_keys(draw: Draw) -> Any:
    rows, keys = draw.normal(draw.batch, draw.queries), draw.normal(draw.heads, draw.keys)
    return lambda s, b, h, m, n: tilewise.where(m >= n, s + rows[b, m] * keys[h, n], s * 0.5)


def _everything(draw: Draw) -> Any:
    return [_temperature(draw), scores.softcap(20.0), _relative(draw), alibi(draw)]


_SEQUENCES = ((321, 321), (1, 1), (65, 130), (0, 5), (7, 0), (200, 200))

PROBLEMS: tuple[ProblemCase, ...] = (
    ProblemCase("full D64", every_dtype=True),
    ProblemCase("causal D64", mask=causal, every_dtype=True),
    ProblemCase("full D128", head_dim=128),
    ProblemCase("causal D128", head_dim=128, mask=causal, every_dtype=True),
    ProblemCase("full D256", head_dim=256, heads=2, kv_heads=2),
    ProblemCase("causal D256", head_dim=256, heads=2, kv_heads=2, mask=causal),
    ProblemCase("grouped 8:2", heads=8, kv_heads=2, mask=causal, head_dim=128),
    ProblemCase("multi-query", heads=5, kv_heads=1, keys=200),
    ProblemCase("window", mask=_window, every_dtype=True),
    ProblemCase("document", mask=_document, every_dtype=True),
    ProblemCase("alibi", mask=causal, score=alibi, every_dtype=True),
    ProblemCase("table of tiles", mask=_table),
    ProblemCase("varlen", lengths=_SEQUENCES, mask=causal, every_dtype=True, heads=8, kv_heads=2),
    ProblemCase("dropout", dropout_p=0.2, every_dtype=True),
    ProblemCase("sinks", sinks=True, mask=causal),
    ProblemCase("softcap", score=lambda draw: scores.softcap(5.0)),
    ProblemCase("bias", score=bias, every_dtype=True),
    ProblemCase("odd widths", head_dim=80, value_dim=40, mask=causal),
    ProblemCase("narrow", head_dim=3, value_dim=111),
    ProblemCase("D192 Dv128", head_dim=192, value_dim=128, mask=causal),
    ProblemCase("one row", queries=1, keys=1000, heads=8, kv_heads=2, head_dim=128),
    ProblemCase(
        "one row, long keys",
        queries=1,
        keys=-1,
        heads=8,
        kv_heads=2,
        head_dim=128,
        mask=causal,
        every_dtype=True,
    ),
    ProblemCase(
        "few rows, long keys",
        queries=7,
        keys=-1,
        heads=6,
        kv_heads=1,
        mask=_lengths,
        score=alibi,
        sinks=True,
    ),
    ProblemCase("few rows, dropout", queries=16, keys=-1, mask=causal, dropout_p=0.2),
    ProblemCase("few rows, window", queries=5, keys=-1, mask=_window, head_dim=256),
    ProblemCase("one key", queries=33, keys=1),
    ProblemCase("no rows", queries=0, keys=65),
    ProblemCase("dead rows", queries=321, keys=100, mask=causal, sinks=True),
    ProblemCase("long keys", queries=65, keys=700, mask=causal),
    ProblemCase("prefix", mask=lambda draw: masks.prefix(draw.keys // 3)),
    ProblemCase("lengths", batch=4, mask=_lengths),
    ProblemCase("boolean tensor", mask=_boolean),
    ProblemCase("layout of tiles", mask=_layout),
    ProblemCase("dilated", mask=_dilated),
    ProblemCase("windows of heads", mask=_heads_windows),
    ProblemCase("bias of keys", score=_bias_keys, mask=causal),
    ProblemCase("relative table", score=_relative, every_dtype=True),
    ProblemCase("buckets", score=_buckets),
    ProblemCase("temperature", score=_temperature, mask=causal),
    ProblemCase("rows and keys", score=_rows_keys),
    ProblemCase("everything", score=_everything, mask=_document, sinks=True, heads=8, kv_heads=2),
    ProblemCase("dropout, grouped", dropout_p=0.5, mask=causal, sinks=True, heads=8, kv_heads=2),
    ProblemCase("varlen, variants", lengths=_SEQUENCES, mask=_window, score=alibi, sinks=True),
    ProblemCase("varlen, dropout", lengths=_SEQUENCES, dropout_p=0.3),
    ProblemCase("heads last", layout="bshd", mask=causal, heads=8, kv_heads=2),
    ProblemCase("strided", layout="strided", queries=129),
    ProblemCase("scale below 0", scale=-0.3, mask=causal),
    ProblemCase("D512", head_dim=512, batch=1, heads=2, kv_heads=2, queries=129),
)

# One head: the whole matrix in float64 is 2 GB, and the reference has a dozen of them.
LONG: tuple[ProblemCase, ...] = tuple(
    replace(case, batch=1, heads=1, kv_heads=1, queries=-1, head_dim=-1)
    for case in (
        ProblemCase("full"),
        ProblemCase("causal", mask=causal),
        ProblemCase("alibi", mask=causal, score=alibi),
        ProblemCase("document", mask=_document),
        ProblemCase("window", mask=_window),
        ProblemCase("table of tiles", mask=_table),
        ProblemCase("dropout", dropout_p=0.1),
        ProblemCase("relative table", score=_relative),
    )
)


def find(name: str) -> ProblemCase:
    """Return the problem of that name."""
    return next(case for case in PROBLEMS if case.name == name)
