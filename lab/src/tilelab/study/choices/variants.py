"""Variants of attention: who attends to whom, and how scores are changed.

In a language model all but ``full`` are causal. An encoder looks both ways. ``ENCODER`` names its
variants: ``full`` and the same patterns without the causal mask, a window as wide on either side.

The sparse patterns are those of ``tilewise.patterns``, made causal. Every implementation computes
all of them to the same numbers, with one exception: ``scaled_dot_product_attention`` has no
softcap. Only ``tilewise`` gains by them, because it skips the tiles in which nobody is seen.
``plain`` and ``sdpa`` compute every pair, write the whole matrix and hide what the pattern leaves
out. Tiles are 64 queries x 128 keys, so windows and blocks which are much smaller save little.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilelab.study.ask.values import Count, CountOrZero, Positive, find, register
from tilewise import masks, patterns, scores
from tilewise.variants.values import mask_of

if TYPE_CHECKING:  # config imports this module, through values
    from tilelab.study.ask.config import Variant

ENCODER = ("full", "window", "window-global", "dilated", "blocks", "bigbird", "butterfly")


class Heads(NamedTuple):
    """The attention that a variant is made for."""

    number: int  # query heads
    device: torch.device
    context: int  # the most positions
    causal: bool = True  # False for an encoder's


class Variation(NamedTuple):
    """A variant as ``mask`` and ``score`` of ``tilewise.nn.Attention``."""

    mask: masks.Mask
    score: scores.Score | None
    pattern: Callable[[int], masks.Mask] | None = None  # positions -> a further mask


def build(variant: Variant, heads: Heads, off_by_one: bool = False) -> Variation:
    """Return the mask and the score of a variant; ``off_by_one`` breaks the mask on purpose."""
    made = find("variant", variant.name).function(heads, **variant.options)
    assert isinstance(made, Variation)
    if not off_by_one:
        return made
    without_itself = mask_of(lambda b, h, m, n: (n < m) | (m == 0))
    without_the_first = mask_of(lambda b, h, m, n: (n > 0) | (m == 0))
    wrong = without_itself if heads.causal else without_the_first
    return made._replace(mask=made.mask & wrong)


@register("variant")
def causal(heads: Heads) -> Variation:
    """Every token sees itself and all before it."""
    return Variation(masks.causal(), None)


@register("variant")
def full(heads: Heads) -> Variation:
    """Every token sees every token of its sequence, as in an encoder."""
    return Variation(masks.window(None, None), None)


@register("variant")
def window(heads: Heads, *, size: Count = 256) -> Variation:
    """Every token sees itself and the ``size - 1`` tokens before it."""
    return Variation(masks.window(size - 1, 0 if heads.causal else size - 1), None)


@register("variant")
def window_global(heads: Heads, *, size: Count = 256, tokens: CountOrZero = 16) -> Variation:
    """A window, and the first ``tokens``, which everybody sees.

    Source: Beltagy et al., Longformer (2020), section 3.1.
    """
    return _looking(heads, patterns.local_global(size - 1, tokens))


@register("variant")
def dilated(heads: Heads, *, size: Count = 128, dilation: Count = 2) -> Variation:
    """A window with gaps: every ``dilation``-th token back, ``size`` of them, itself included.

    Source: Beltagy et al., Longformer (2020), section 3.1.
    """
    return _looking(heads, patterns.dilated(size - 1, dilation))


@register("variant")
def blocks(heads: Heads, *, size: Count = 128) -> Variation:
    """Every token sees those before it in its own block of ``size``, and none of other blocks.

    Source: Child et al., Sparse Transformers (2019), section 4.2 (fixed attention without summary).
    """
    own = patterns.fixed(size, 0) if heads.causal else patterns.butterfly(size, reach=1)
    return _looking(heads, own)


@register("variant")
def strided(heads: Heads, *, stride: Count = 128) -> Variation:
    """The last ``stride`` tokens, and every ``stride``-th before them.

    Source: Child et al., Sparse Transformers (2019), section 4.2.
    """
    return _looking(heads, patterns.strided(stride))


@register("variant", check=patterns.fixed)
def fixed(heads: Heads, *, stride: Count = 128, summary: CountOrZero = 8) -> Variation:
    """The own block of ``stride``, and the last ``summary`` tokens of every block before.

    Source: Child et al., Sparse Transformers (2019), section 4.2.
    """
    return _looking(heads, patterns.fixed(stride, summary))


@register("variant", check=partial(patterns.bigbird, 0))
def bigbird(
    heads: Heads,
    *,
    block: Count = 64,
    window: Count = 3,
    globals: CountOrZero = 1,
    random: CountOrZero = 2,
) -> Variation:
    """In blocks: a window, the first blocks, and random ones, other ones in every head.

    In a language model what lies behind a token is left out, so that of ``window`` and ``random``
    about half remain.
    The draws are the same in every run.

    Source: Zaheer et al., Big Bird (2020), section 2 and appendix D.
    """
    seen = patterns.bigbird(
        heads.context,
        block=block,
        window=window,
        globals=globals,
        random=random,
        heads=heads.number,
    )
    (tiles,) = seen.captured
    tiles = tiles[0].to(heads.device)

    def pattern(length: int) -> masks.Mask:
        rows = -(-length // block)
        return patterns.layout(tiles[:, :rows, :rows], (block, block))

    return Variation(masks.causal() if heads.causal else masks.window(None, None), None, pattern)


@register("variant")
def butterfly(heads: Heads, *, block: Count = 128) -> Variation:
    """Blocks whose number differs from the own one's in one bit: log2(blocks) + 1 of them.

    Source: Dao et al., FlashAttention (2022), section 3.3.
    """
    return _looking(heads, patterns.butterfly(block))


def _looking(heads: Heads, pattern: masks.Mask) -> Variation:
    """Return the pattern, of language models without what is to come."""
    return Variation(pattern & masks.causal() if heads.causal else pattern, None)


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
    """Scores kept inside (-cap, cap) by cap * tanh(s / cap).

    Source: Gemma 2 technical report (2024), section 2.
    """
    mask = masks.causal() if heads.causal else masks.window(None, None)
    return Variation(mask, scores.softcap(cap))


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of every head: see ``alibi``."""
    below = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-8.0 * i / (2 * below)) for i in range(1, 2 * below + 1, 2)]
    return (first + between)[:heads]
