"""The measured cases: one frozen row per case and dtype, with its goals.

A new case is a ``_row`` in ``_ROWS``; its mask or score is a name of ``VARIANTS``.
The shapes are those of the prototype's study, so that numbers compare. Goals are for a processor
with AVX-512 and BF16 and without AMX, on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from tilelab.cases import case as cases
from tilelab.peers.work import Work, causal_pairs, flops, window_pairs

DTYPES = ("float32", "bfloat16", "float16")
# Two threads against one, as a share of how well the bare multiply-add loop scales.
SCALING_GOAL = 0.9
_WINDOW = 256


class Variant(NamedTuple):
    """Which pairs attend, and what happens to their scores."""

    pairs: Callable[[int, int], float]  # how many attend in one head, of M queries and N keys
    fields: dict[str, Any]  # of the case


def _every(queries: int, keys: int) -> float:
    return float(queries * keys)


# By the name that the record has.
VARIANTS: dict[str, Variant] = {
    "full": Variant(_every, {}),
    "causal": Variant(lambda queries, keys: causal_pairs([queries]), {"mask": ("causal",)}),
    "window": Variant(
        lambda queries, keys: window_pairs(queries, _WINDOW), {"mask": (f"window_{_WINDOW}",)}
    ),
    "bias": Variant(_every, {"score": ("bias_of_pairs",)}),
    "dropout": Variant(_every, {"dropout_p": 0.1}),
}


_Sizes: TypeAlias = tuple[int, int, int, int, int, int]  # B, Hq, Hk, M, N, D


@dataclass(frozen=True)
class Goal:
    """The goals of a case.

    Args:
        ratio: torch's time over ours, at least.
        peak: fraction of the measured peak, at least; None where only the ratio counts.
    """

    ratio: float
    peak: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of the bench.

    Args:
        attention: what is measured; its name is the same for every dtype.
        variant: names its mask and score in ``VARIANTS``, e.g. ``"causal"``.
        backward: the gradients of q, k and v are measured, and not the forward pass.
        goal: None for a case that is only informative.
        quick: part of ``--quick``.
    """

    attention: cases.Case
    variant: str = "full"
    backward: bool = False
    goal: Goal | None = None
    quick: bool = False

    @property
    def name(self) -> str:
        """The same for every dtype, e.g. ``"forward causal 2k"``."""
        return self.attention.name

    @property
    def dtype(self) -> str:
        """The dtype of q, k and v, e.g. ``"bfloat16"``."""
        return str(self.attention.dtype).removeprefix("torch.")

    @property
    def key(self) -> str:
        """Names this row alone."""
        return f"{self.name} {self.dtype}"

    @property
    def shape(self) -> dict[str, int]:
        """For the record."""
        names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")
        return {name: getattr(self.attention, name) for name in names}

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head; causal counts as half, as the field does."""
        return VARIANTS[self.variant].pairs(self.attention.queries, self.attention.keys)

    @property
    def flops(self) -> float:
        """Operations: 4 D per visible pair forward (two products), 2.5 times that backward."""
        case = self.attention
        return flops(case.batch * self.pairs, case.heads, case.head_dim, backward=self.backward)

    def work(self) -> Work:
        """Return what is measured."""
        return Work.of(self.attention, "speed", "backward" if self.backward else "forward")


def _square(batch: int, heads: int, length: int, width: int, kv_heads: int = 0) -> _Sizes:
    return batch, heads, kv_heads or heads, length, length, width


def _row(
    name: str,
    sizes: _Sizes,
    goals: Sequence[Goal],
    variant: str = "full",
    *,
    backward: bool = False,
    quick: Sequence[str] = (),
) -> list[Case]:
    """Return a case in every dtype that has a goal."""
    attention = cases.Case(name, *sizes, sizes[-1], **VARIANTS[variant].fields)
    return [
        Case(attention.of(getattr(torch, dtype)), variant, backward, goal, dtype in quick)
        for dtype, goal in zip(DTYPES, goals, strict=False)
    ]


_HALF = Goal(1.5)  # float16, forward
_FULL_64 = (Goal(1.25, 0.86), Goal(2.4, 0.78), _HALF)
_FULL_128 = (Goal(1.18, 0.86), Goal(2.25, 0.78), _HALF)
_SHORT = (Goal(1.35), Goal(2.5))
_NEVER_SLOWER = (Goal(1.0), Goal(1.0), Goal(1.0))

_ROWS = (
    _row("forward full 2k D64", _square(1, 16, 2048, 64), _FULL_64, quick=DTYPES),
    _row("forward full 4k D64", _square(1, 8, 4096, 64), _FULL_64),
    _row("forward full 8k D64", _square(1, 8, 8192, 64), _FULL_64),
    _row("forward full 16k D64", _square(1, 4, 16384, 64), _FULL_64),
    _row("forward full 2k D128", _square(1, 16, 2048, 128), _FULL_128, quick=DTYPES[:2]),
    _row("forward full 4k D128", _square(1, 4, 4096, 128), _FULL_128),
    _row("forward full 8k D128", _square(1, 4, 8192, 128), _FULL_128),
    _row("forward full 16k D128", _square(1, 2, 16384, 128), _FULL_128),
    _row(
        "forward causal 512",
        _square(4, 8, 512, 64),
        (Goal(2.2), Goal(4.0), _HALF),
        "causal",
        quick=DTYPES,
    ),
    _row(
        "forward causal 2k",
        _square(1, 16, 2048, 64),
        (Goal(1.5), Goal(2.8), _HALF),
        "causal",
        quick=DTYPES[:2],
    ),
    _row("forward causal 16k", _square(1, 4, 16384, 64), (Goal(1.35), Goal(2.5), _HALF), "causal"),
    _row(
        "backward full 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.4, 0.85), Goal(1.5, 0.60), Goal(8.0)),
        backward=True,
        quick=DTYPES[:2],
    ),
    _row(
        "backward causal 2k",
        _square(1, 8, 2048, 64),
        (Goal(1.7, 0.82), Goal(2.0, 0.60), Goal(8.0)),
        "causal",
        backward=True,
        quick=DTYPES[:2],
    ),
    _row("window 256 at 2k", _square(1, 8, 2048, 64), (Goal(9.0), Goal(15.0)), "window"),
    _row("additive mask 2k", _square(1, 8, 2048, 64), (Goal(1.35), Goal(2.2)), "bias"),
    _row("dropout 0.1 at 2k", _square(1, 8, 2048, 64), (Goal(5.0), Goal(6.0)), "dropout"),
    _row("grouped 32:4 at 2k", _square(1, 32, 2048, 64, 4), (Goal(1.25), Goal(2.4))),
    _row("short 129", _square(1, 64, 129, 64), _SHORT, quick=DTYPES[:2]),
    _row("short 64", _square(1, 64, 64, 64), _SHORT),
    _row("short 33", _square(1, 64, 33, 64), _SHORT),
    *(
        _row(f"decode 8 heads, {keys} keys", (1, 8, 8, 1, keys, 64), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    *(
        _row(f"decode 32:4, D128, {keys} keys", (1, 32, 4, 1, keys, 128), _NEVER_SLOWER[:2])
        for keys in (64, 256, 512)
    ),
    _row("decode 8 heads, 16k keys", (1, 8, 8, 1, 16384, 64), (Goal(1.0), Goal(7.0))),
    _row("decode 32:4, D128, 16k keys", (1, 32, 4, 1, 16384, 128), (Goal(6.0), Goal(20.0))),
    _row("decode 4 rows, 32:4, 4k keys", (1, 32, 4, 4, 4096, 128), _NEVER_SLOWER),
    _row("decode 16 x 32:8, 1k keys", (16, 32, 8, 1, 1024, 128), _NEVER_SLOWER),
)


# By dtype, then in the order of the table of goals.
CASES = tuple(
    sorted((case for row in _ROWS for case in row), key=lambda case: DTYPES.index(case.dtype))
)


def find(key: str) -> Case:
    """Return the case of that key."""
    return next(case for case in CASES if case.key == key)
