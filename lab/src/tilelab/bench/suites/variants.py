"""Suite ``variants``: masks and scores of the catalogue, against none and against others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from tilelab.bench.suites.steps import Settings, Step
from tilelab.bench.suites.timed import time_all
from tilelab.peers.methods import exact
from tilelab.peers.work import Pass, Work
from tilewise import BlockMask, masks, patterns, scores

__all__ = ["NONE", "catalogue", "steps"]

SUITE = "variants"
NONE = "none"
_LENGTHS = {"cpu": 1024, "cuda": 4096}  # the longest
_HEADS = 4
_CAP = 30.0


@dataclass(frozen=True)
class Variant:
    """One row of the catalogue.

    Args:
        name: of it.
        mask, score: what ``tilewise.attention`` takes.
        flex_mask, flex_score: functions of the same meaning.
        statistics: which ones of its rows a call gives too.
    """

    name: str
    mask: Any = None
    score: Any = None
    flex_mask: Callable[..., Any] | None = None
    flex_score: Callable[..., Any] | None = None
    statistics: bool | Literal["top1"] = False


def steps(settings: Settings) -> list[Step]:
    """Return every variant, forward and backward, at one length."""
    longest = _LENGTHS[settings.device]
    length = max([n for n in settings.lengths if n <= longest], default=min(settings.lengths))
    methods = exact(settings.device, with_flex=settings.flex)
    passes: tuple[Pass, ...] = ("forward", "backward")
    found = []
    for dtype in settings.dtypes[:1] if settings.quick else settings.dtypes:
        base = Work(SUITE, "", length, dtype, _HEADS, _HEADS, device=settings.device)
        for direction in passes:
            for each in catalogue(length, settings.device):
                work = replace(
                    base,
                    case=f"{each.name}, {direction}",
                    passes=direction,
                    mask=each.mask,
                    score=each.score,
                    flex_mask=each.flex_mask,
                    flex_score=each.flex_score,
                    statistics=each.statistics,
                )
                found.append(Step(f"{work.case}, {dtype}", partial(time_all, work, methods)))
    return found


def catalogue(length: int, device: str) -> list[Variant]:
    """Return the variants for a length, no variant first.

    Args:
        length: N.
        device: of captured tensors.
    """
    return [
        Variant(NONE),
        *_masks(length, device),
        *_sparse(length, device),
        *_scores(length, device),
        *_in_python(length, device),
        Variant("statistics", statistics=True),
        Variant("statistics and top key", statistics="top1"),
    ]


def _masks(length: int, device: str) -> list[Variant]:
    wide = max(1, length // 8)
    ids = (torch.arange(length, device=device) // max(1, length // 5))[None]
    documents = masks.document(ids)
    return [
        Variant("causal", masks.causal(), None, lambda b, h, m, n: n <= m),
        Variant(
            "window",
            masks.window(wide, wide),
            None,
            lambda b, h, m, n: (m - n <= wide) & (n - m <= wide),
        ),
        Variant(
            "causal window",
            masks.window(wide, 0),
            None,
            lambda b, h, m, n: (n <= m) & (m - n <= wide),
        ),
        Variant(
            "prefix",
            masks.causal() | masks.prefix(wide),
            None,
            lambda b, h, m, n: (n <= m) | (n < wide),
        ),
        Variant("documents", documents, None, lambda b, h, m, n: ids[0, m] == ids[0, n]),
        Variant(
            "documents, causal",
            documents & masks.causal(),
            None,
            lambda b, h, m, n: (ids[0, m] == ids[0, n]) & (n <= m),
        ),
        _function("checkerboard", lambda b, h, m, n: (m + n) % 2 == 0),
        _function("window of a head", lambda b, h, m, n: (n <= m) & (m - n <= wide * (h + 1))),
    ]


def _function(name: str, function: Callable[..., Any]) -> Variant:
    return Variant(name, masks.function(function), None, function)


def _sparse(length: int, device: str) -> list[Variant]:
    stride = max(1, round(length**0.5))
    found = {
        "dilated": patterns.dilated(32, 4),
        "strided": patterns.strided(stride),
        "fixed": patterns.fixed(stride),
        "butterfly": patterns.butterfly(64),
        "Longformer": patterns.local_global(64, 16),
        "BigBird": patterns.bigbird(length),
    }
    return [Variant(name, BlockMask.of(mask, length).to(device)) for name, mask in found.items()]


def _slopes(device: str) -> torch.Tensor:
    return torch.tensor([2.0 ** -(2 * head + 2) for head in range(_HEADS)], device=device)


def _scores(length: int, device: str) -> list[Variant]:
    slopes = _slopes(device)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(_HEADS, 2 * length, generator=generator).to(device)
    bias = torch.randn(_HEADS, length, length, generator=generator).to(device)

    def relative(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + table[h, m - n + length - 1]

    def gaussian(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s - ((m - n) / (length / 4)) ** 2

    return [
        Variant(
            "ALiBi, causal",
            masks.causal(),
            scores.alibi(slopes),
            lambda b, h, m, n: n <= m,
            lambda s, b, h, m, n: s - slopes[h] * torch.abs(m - n),
        ),
        Variant(
            "softcap",
            None,
            scores.softcap(_CAP),
            None,
            lambda s, b, h, m, n: _CAP * torch.tanh(s / _CAP),
        ),
        Variant("bias", None, scores.bias(bias), None, lambda s, b, h, m, n: s + bias[h, m, n]),
        Variant("relative table", None, relative),
        Variant("Gaussian", None, gaussian),
    ]


def _in_python(length: int, device: str) -> list[Variant]:
    """Return scores in spellings that the recogniser does not know: what an expression costs."""
    slopes, wide = _slopes(device), max(1, length // 2)

    def alibi(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + slopes[h] * (n - m)

    def softcap(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return _CAP * torch.tanh(s * (1 / _CAP))

    def window(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return torch.where((m - n < wide) & (n - m < wide), s, -math.inf)

    return [
        Variant("ALiBi in Python", None, alibi),
        Variant("softcap in Python", None, softcap),
        Variant("window as a score", None, window),  # no tile is skipped
    ]
