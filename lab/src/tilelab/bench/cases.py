"""The measured cases: one frozen row per case and dtype, with its goals.

The shapes are those of the prototype's study, so that numbers compare. Goals are for a processor
with AVX-512 and BF16 and without AMX, on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tilelab.peers.work import Work, causal_pairs, flops, window_pairs
from tilewise import masks, scores

__all__ = ["CASES", "DTYPES", "SCALING_GOAL", "Case", "Goal", "Shape", "find"]

DTYPES = ("float32", "bfloat16", "float16")
WINDOW = 256
DROPOUT_P = 0.1
# Two threads against one, as a share of how well the bare multiply-add loop scales.
SCALING_GOAL = 0.9

Variant = Literal["full", "causal", "window", "bias", "dropout"]


class Goal(NamedTuple):
    """The goals of a case.

    Args:
        ratio: torch's time over ours, at least.
        peak: fraction of the measured peak, at least; None where only the ratio counts.
    """

    ratio: float
    peak: float | None = None


class Shape(NamedTuple):
    """q [batch, heads, queries, head_dim], k and v [batch, kv_heads, keys, head_dim]."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    """One row of the bench.

    Args:
        name: the same for every dtype, e.g. ``"forward causal 2k"``.
        dtype: of q, k and v, e.g. ``"bfloat16"``.
        shape: of the operands.
        variant: which pairs attend, and what happens to their scores.
        backward: the gradients of q, k and v are measured, and not the forward pass.
        goal: None for a case that is only informative.
        quick: part of ``--quick``.
    """

    name: str
    dtype: str
    shape: Shape
    variant: Variant = "full"
    backward: bool = False
    goal: Goal | None = None
    quick: bool = False

    @property
    def key(self) -> str:
        """Names this row alone."""
        return f"{self.name} {self.dtype}"

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; causal counts as half, as the field does."""
        queries, keys = self.shape.queries, self.shape.keys
        if self.variant == "causal":
            return causal_pairs([queries])
        if self.variant == "window":
            return window_pairs(queries, WINDOW)
        return float(queries * keys)

    @property
    def flops(self) -> float:
        """Operations: 4 D per visible pair forward (two products), 2.5 times that backward."""
        pairs, shape = self.shape.batch * self.pairs, self.shape
        return flops(pairs, shape.heads, shape.head_dim, backward=self.backward)

    def work(self) -> Work:
        """Return what is measured."""
        shape = self.shape
        return Work(
            "speed",
            self.name,
            shape.keys,
            self.dtype,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.batch,
            "backward" if self.backward else "forward",
            queries=shape.queries,
            **_variant(self),
        )


def _variant(case: Case) -> dict[str, Any]:
    """Return the variant of a case as fields of a Work."""
    if case.variant == "causal":
        return {"mask": masks.causal()}
    if case.variant == "window":
        return {"mask": masks.window(WINDOW - 1, 0)}
    if case.variant == "dropout":
        return {"dropout_p": DROPOUT_P}
    if case.variant == "bias":
        size = (case.shape.queries, case.shape.keys)
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(1))
        return {"score": scores.bias(drawn.to(getattr(torch, case.dtype)))}
    return {}


def _square(batch: int, heads: int, length: int, head_dim: int, kv_heads: int = 0) -> Shape:
    return Shape(batch, heads, kv_heads or heads, length, length, head_dim)


class _Row(NamedTuple):
    """A case in every dtype that has a goal; goals None: informative, float32 and bfloat16."""

    name: str
    shape: Shape
    goals: tuple[Goal, ...] | None
    variant: Variant = "full"
    backward: bool = False
    quick: tuple[str, ...] = ()


_HALF = Goal(1.5)  # float16, forward
_FULL_64 = (Goal(1.25, 0.86), Goal(2.4, 0.78), _HALF)
_FULL_128 = (Goal(1.18, 0.86), Goal(2.25, 0.78), _HALF)
_SHORT = (Goal(1.35), Goal(2.5))
_NEVER_SLOWER = (Goal(1.0), Goal(1.0), Goal(1.0))

_ROWS = (
    _Row("forward full 2k D64", _square(1, 16, 2048, 64), _FULL_64, quick=DTYPES),
    _Row("forward full 4k D64", _square(1, 8, 4096, 64), _FULL_64),
    _Row("forward full 8k D64", _square(1, 8, 8192, 64), _FULL_64),
    _Row("forward full 16k D64", _square(1, 4, 16384, 64), _FULL_64),
    _Row("forward full 2k D128", _square(1, 16, 2048, 128), _FULL_128, quick=DTYPES[:2]),
    _Row("forward full 4k D128", _square(1, 4, 4096, 128), _FULL_128),
    _Row("forward full 8k D128", _square(1, 4, 8192, 128), _FULL_128),
    _Row("forward full 16k D128", _square(1, 2, 16384, 128), _FULL_128),
    _Row(
        "forward causal 512",
        _square(4, 8, 512, 64),
        (Goal(2.2), Goal(4.0), _HALF),
        "causal",
        quick=DTYPES,
    ),
    _Row(
        "forward causal 2k",
        _square(1, 16, 2048, 64),
        (Goal(1.5), Goal(2.8), _HALF),
        "causal",
        quick=DTYPES[:2],
    ),
    _Row("forward causal 16k", _square(1, 4, 16384, 64), (Goal(1.35), Goal(2.5), _HALF), "causal"),
    _Row(
        "backward full 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.4, 0.85), Goal(1.5, 0.60), Goal(8.0)),
        backward=True,
        quick=DTYPES[:2],
    ),
    _Row(
        "backward causal 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.7, 0.82), Goal(2.0, 0.60), Goal(8.0)),
        "causal",
        backward=True,
        quick=DTYPES[:2],
    ),
    _Row("window 256 at 2k", _square(1, 8, 2048, 64), (Goal(9.0), Goal(15.0)), "window"),
    _Row("additive mask 2k", _square(1, 8, 2048, 64), (Goal(1.35), Goal(2.2)), "bias"),
    _Row("dropout 0.1 at 2k", _square(1, 8, 2048, 64), (Goal(5.0), Goal(6.0)), "dropout"),
    _Row("grouped 32:4 at 2k", _square(1, 32, 2048, 64, 4), (Goal(1.25), Goal(2.4))),
    _Row("short 129", _square(1, 64, 129, 64), _SHORT, quick=DTYPES[:2]),
    _Row("short 64", _square(1, 64, 64, 64), _SHORT),
    _Row("short 33", _square(1, 64, 33, 64), _SHORT),
    *(
        _Row(f"decode 8 heads, {keys} keys", Shape(1, 8, 8, 1, keys, 64), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    *(
        _Row(f"decode 32:4, D128, {keys} keys", Shape(1, 32, 4, 1, keys, 128), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    _Row("decode 8 heads, 16k keys", Shape(1, 8, 8, 1, 16384, 64), (Goal(1.0), Goal(7.0))),
    _Row("decode 32:4, D128, 16k keys", Shape(1, 32, 4, 1, 16384, 128), (Goal(6.0), Goal(20.0))),
    _Row("decode 4 rows, 32:4, 4k keys", Shape(1, 32, 4, 4, 4096, 128), _NEVER_SLOWER),
    _Row("decode 16 x 32:8, 1k keys", Shape(16, 32, 8, 1, 1024, 128), _NEVER_SLOWER),
)


def _cases(row: _Row) -> list[Case]:
    goals: tuple[Goal | None, ...] = row.goals or (None, None)
    return [
        Case(row.name, dtype, row.shape, row.variant, row.backward, goal, dtype in row.quick)
        for dtype, goal in zip(DTYPES, goals, strict=False)
    ]


# By dtype, then in the order of the table of goals.
CASES = tuple(
    sorted((case for row in _ROWS for case in _cases(row)), key=lambda c: DTYPES.index(c.dtype))
)


def find(key: str) -> Case:
    """Return the case of that key."""
    return next(case for case in CASES if case.key == key)
