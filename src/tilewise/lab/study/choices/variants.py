"""Variants of attention: who attends to whom, and how scores are changed.

All but ``full`` are causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field

from tilewise import masks, scores
from tilewise.lab.study.choices.registry import Positive, find, register

if TYPE_CHECKING:  # config imports this module, through the registry
    from tilewise.lab.study.config import Variant

__all__ = ["Heads", "Variation", "alibi", "build", "causal", "full", "softcap", "window"]


class Heads(NamedTuple):
    """The attention that a variant is made for.

    Args:
        number: query heads.
        device: of its tensors.
    """

    number: int
    device: torch.device


class Variation(NamedTuple):
    """What ``tilewise.nn.Attention`` takes as ``mask`` and ``score``."""

    mask: masks.Mask
    score: scores.Score | None


def build(variant: Variant, heads: int, device: torch.device) -> Variation:
    """The mask and the score of a variant.

    Args:
        variant: which, with its options.
        heads: query heads.
        device: of the model.
    """
    made = find("variant", variant.name).function(Heads(heads, device), **variant.options)
    assert isinstance(made, Variation)
    return made


@register("variant")
def causal(heads: Heads) -> Variation:
    """Every token sees itself and all before it."""
    return Variation(masks.causal(), None)


@register("variant")
def full(heads: Heads) -> Variation:
    """Every token sees every token of its sequence, as in an encoder."""
    return Variation(masks.window(None, None), None)


@register("variant")
def window(heads: Heads, *, size: Annotated[int, Field(ge=1)] = 256) -> Variation:
    """Every token sees itself and the ``size - 1`` tokens before it."""
    return Variation(masks.window(size - 1, 0), None)


@register("variant")
def alibi(heads: Heads) -> Variation:
    """Causal, with a penalty on distance: slopes 2^(-8 i / H) for heads i = 1 .. H.

    For H that is no power of two, the slopes of the power below come first, then every other one
    of the power above.

    Source: Press et al., Train Short, Test Long (2022), section 3 and its code.
    """
    slopes = torch.tensor(alibi_slopes(heads.number), dtype=torch.float32, device=heads.device)
    return Variation(masks.causal(), scores.alibi(slopes))


@register("variant")
def softcap(heads: Heads, *, cap: Positive = 50.0) -> Variation:
    """Causal, with scores kept inside (-cap, cap) by cap * tanh(s / cap).

    Source: Gemma 2 technical report (2024), section 2.
    """
    return Variation(masks.causal(), scores.softcap(cap))


def alibi_slopes(heads: int) -> list[float]:
    """The slope of every head: see ``alibi``."""
    below = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-8.0 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    return (first + between)[:heads]
