"""One attention problem in a few words: what every room takes, and what a row of the table is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from tilelab.cases.variants import Maker
from tilewise.problem import Statistics

Pass = Literal["forward", "backward", "both"]
# The rooms that select rows. Those from "sweep" on say the sizes themselves.
Use = Literal[
    "tests",  # of the repository
    "accuracy",  # of the GPU check; lengths are divided by the setting's ``shrink``
    "gate",  # compiled for chips that are not here
    "goals",  # of ``tilewise bench cpu``
    "tune small",  # whose results in other blocks are compared
    "sweep",  # of ``bench speed``: along the length
    "paper",  # of ``bench paper``: along the length
    "variants",  # of ``bench variants``: at one length
    "head widths",  # of ``bench widths``: at one length, with heads and widths of their own
    "long",  # whole long problems of the GPU check
    "one width",  # timed by the GPU check
    "widths",  # timed by it at two widths
    "lengths",  # timed by it at every width and length
    "tune large",  # that are timed in other blocks
]


@dataclass(frozen=True)
class Goal:
    """The goals of a case on a processor."""

    ratio: float  # torch's time over ours, at least
    # Fraction of the measured peak, at least; None where only the ratio counts.
    peak: float | None = None


@dataclass(frozen=True)
class Case:
    """One attention problem. The tensors follow from ``repr``: ``inputs.build`` makes them."""

    name: str  # of the case, unique among the rows of a use
    batch: int = 2  # these seven: its shape
    heads: int = 2
    kv_heads: int = 2
    queries: int = 65
    keys: int = 65
    head_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32  # of q, k and v
    # Postfix over the names of ``variants``, ``and``, ``or``, ``not``, and ``tiles``, which makes a
    # table of tiles of the mask before it. A function may stand for a name.
    mask: tuple[str | Maker, ...] = ()
    score: tuple[str | Maker, ...] = ()  # steps by name, or as functions
    sinks: bool = False  # whether there are
    dropout_p: float = 0.0  # the probability of dropping a pair
    scale: float | None = None  # None for 1 / sqrt(D)
    # "contiguous", "bshd" (a transposed view), "strided" (gaps that hold NaN), "expanded" (one head
    # of one item for all), "sliced" (cut out of a larger tensor) or "latent" (values are the first
    # numbers of the keys, in place).
    layout: str = "contiguous"
    # (queries, keys) of each sequence of a variable-length call; batch, queries and keys follow
    # from it then. None for a dense call.
    sequences: tuple[tuple[int, int], ...] | None = None
    gain: float = 1.0  # multiplies q and k
    statistics: Statistics = field(default="", repr=False)  # of the rows, that a call gives too
    # Of the pages that keys and values lie in; 0: they do not.
    page_size: int = field(default=0, repr=False)
    # Keys, or blocks of keys, that a list names; 0: each row reads all keys.
    listed: int = field(default=0, repr=False)
    # Keys of a block that a list names; 1 for single keys.
    list_block: int = field(default=1, repr=False)
    list_rows: int = field(default=1, repr=False)  # query rows that share a list
    # Dtype of these pages, whose rows have scales then; None for ``dtype``.
    stored: torch.dtype | None = field(default=None, repr=False)
    # Whether the GPU check runs it in float32 and float16 too.
    every_dtype: bool = field(default=False, repr=False)
    # What is measured: the output, the gradients of q, k and v, or both.
    passes: Pass = field(default="forward", repr=False)
    # What records of measurements call its mask and score.
    kind: str = field(default="full", repr=False)
    uses: tuple[Use, ...] = field(default=(), repr=False)  # the rooms that select it; of a row
    goal: Goal | None = field(default=None, repr=False)  # on a processor; None where there is none
    quick: bool = field(default=False, repr=False)  # part of ``--quick`` of bench and gate

    def of(self, dtype: torch.dtype) -> Case:
        """Return the same case in another dtype."""
        return replace(self, dtype=dtype)

    @property
    def type_name(self) -> str:
        """The dtype of q, k and v without "torch.", as records have it."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.name}-{self.type_name}"
