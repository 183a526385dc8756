"""Suite ``variants``: masks and scores of the catalogue, against none and against others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from tilelab.bench.steps import Settings, Step, timed
from tilelab.peers.methods import exact
from tilelab.peers.work import Pass, Work
from tilewise import BlockMask, masks, patterns, scores

NONE = "none"
_LENGTHS = {"cpu": 1024, "cuda": 4096}  # the longest
_HEADS = 4
_CAP = 30.0


def steps(settings: Settings) -> list[Step]:
    """Return every variant, forward and backward, at one length."""
    longest = _LENGTHS[settings.device]
    length = max([n for n in settings.lengths if n <= longest], default=min(settings.lengths))
    passes: tuple[Pass, ...] = ("forward", "backward")
    works = [
        replace(each, case=f"{each.case}, {direction}", passes=direction)
        for dtype in (settings.dtypes[:1] if settings.quick else settings.dtypes)
        for direction in passes
        for each in catalogue(length, settings.device, dtype)
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex))


def catalogue(length: int, device: str, dtype: str = "float32") -> list[Work]:
    """Return a work for each variant, none first; functions for FlexAttention mean the same."""
    base = Work("variants", "", length, dtype, _HEADS, _HEADS, device=device)
    rows = [
        _row(NONE),
        *_masks(length, device),
        *_sparse(length, device),
        *_scores(length, device),
        {"case": "statistics", "statistics": True},
        {"case": "statistics and top key", "statistics": "top1"},
    ]
    return [replace(base, **row) for row in rows]


_Row: TypeAlias = dict[str, Any]  # fields of a Work


def _row(
    case: str, mask: Any = None, score: Any = None, flex_mask: Any = None, flex_score: Any = None
) -> _Row:
    masked = {"mask": mask, "flex_mask": flex_mask}
    return {"case": case, **masked, "score": score, "flex_score": flex_score}


def _masks(length: int, device: str) -> list[_Row]:
    wide = max(1, length // 8)
    ids = (torch.arange(length, device=device) // max(1, length // 5))[None]
    documents = masks.document(ids)
    return [
        _row("causal", masks.causal(), None, lambda b, h, m, n: n <= m),
        _row(
            "window",
            masks.window(wide, wide),
            None,
            lambda b, h, m, n: (m - n <= wide) & (n - m <= wide),
        ),
        _row(
            "causal window",
            masks.window(wide, 0),
            None,
            lambda b, h, m, n: (n <= m) & (m - n <= wide),
        ),
        _row(
            "prefix",
            masks.causal() | masks.prefix(wide),
            None,
            lambda b, h, m, n: (n <= m) | (n < wide),
        ),
        _row("documents", documents, None, lambda b, h, m, n: ids[0, m] == ids[0, n]),
        _row(
            "documents, causal",
            documents & masks.causal(),
            None,
            lambda b, h, m, n: (ids[0, m] == ids[0, n]) & (n <= m),
        ),
        _function("checkerboard", lambda b, h, m, n: (m + n) % 2 == 0),
        _function("window of a head", lambda b, h, m, n: (n <= m) & (m - n <= wide * (h + 1))),
    ]


def _function(name: str, function: Callable[..., Any]) -> _Row:
    return _row(name, masks.function(function), None, function)


def _sparse(length: int, device: str) -> list[_Row]:
    stride = max(1, round(length**0.5))
    found = {
        "dilated": patterns.dilated(32, 4),
        "strided": patterns.strided(stride),
        "fixed": patterns.fixed(stride),
        "butterfly": patterns.butterfly(64),
        "Longformer": patterns.local_global(64, 16),
        "BigBird": patterns.bigbird(length),
    }
    return [_row(name, BlockMask.of(mask, length).to(device)) for name, mask in found.items()]


def _scores(length: int, device: str) -> list[_Row]:
    slopes = torch.tensor([2.0 ** -(2 * head + 2) for head in range(_HEADS)], device=device)
    wide = max(1, length // 2)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(_HEADS, 2 * length, generator=generator).to(device)
    bias = torch.randn(_HEADS, length, length, generator=generator).to(device)

    def relative(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + table[h, m - n + length - 1]

    def gaussian(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s - ((m - n) / (length / 4)) ** 2

    # Spellings that the recogniser does not know: what an expression costs.
    def alibi(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + slopes[h] * (n - m)

    def softcap(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return _CAP * torch.tanh(s * (1 / _CAP))

    def window(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return torch.where((m - n < wide) & (n - m < wide), s, -math.inf)

    return [
        _row(
            "ALiBi, causal",
            masks.causal(),
            scores.alibi(slopes),
            lambda b, h, m, n: n <= m,
            lambda s, b, h, m, n: s - slopes[h] * torch.abs(m - n),
        ),
        _row(
            "softcap",
            None,
            scores.softcap(_CAP),
            None,
            lambda s, b, h, m, n: _CAP * torch.tanh(s / _CAP),
        ),
        _row("bias", None, scores.bias(bias), None, lambda s, b, h, m, n: s + bias[h, m, n]),
        _row("relative table", None, relative),
        _row("Gaussian", None, gaussian),
        _row("ALiBi in Python", None, alibi),
        _row("softcap in Python", None, softcap),
        _row("window as a score", None, window),  # no tile is skipped
    ]
