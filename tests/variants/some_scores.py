"""Scores as people write them: each makes a function ``(s, b, h, m, n) -> s``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.plain import PairFunction
from tests.variants import some_masks as masks
from tests.variants.calls import Drawn, Maker, Variant

VARIANTS: list[Variant] = []


def _scored(mask: Maker | None = None, sinks: bool = False) -> Callable[[Maker], Maker]:
    """Enter a score under its name, with a mask beside it."""

    def enter(score: Maker) -> Maker:
        VARIANTS.append(Variant(score.__name__.replace("_", "-"), mask, score, sinks))
        return score

    return enter


def _slopes(drawn: Drawn) -> Tensor:
    return drawn.learned("slopes", drawn.sizes.heads, low=0.01, high=0.5)


@_scored(masks.causal)
def alibi(drawn: Drawn) -> PairFunction:
    slopes = _slopes(drawn)
    return lambda s, b, h, m, n: s - slopes[h] * abs(m - n)


@_scored()
def softcap(_: Drawn) -> PairFunction:
    return lambda s, b, h, m, n: 2.0 * torch.tanh(s / 2.0)


@_scored()
def learned_softcap(drawn: Drawn) -> PairFunction:
    caps = drawn.learned("caps", drawn.sizes.heads, low=0.5, high=3.0)
    return lambda s, b, h, m, n: caps[h] * torch.tanh(s / caps[h])


@_scored()
def t5(drawn: Drawn) -> PairFunction:
    """Buckets of distance: exact ones up to 8, then logarithmic; one set per direction."""
    table = drawn.learned("table", 32, drawn.sizes.heads)

    def biased(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        distance = abs(m - n)
        # Half way between two distances, so that no rounding decides the bucket.
        far = torch.log((distance.double() + 0.5) / 8.0) * (8.0 / math.log(16.0))
        bucket = torch.where(distance < 8, distance, torch.clamp(8 + far.long(), max=15))
        return s + table[torch.where(n > m, 16, 0) + bucket, h]

    return biased


@_scored()
def relative(drawn: Drawn) -> PairFunction:
    last = drawn.sizes.keys - 1
    table = drawn.learned("table", drawn.sizes.heads, drawn.sizes.queries + last)
    return lambda s, b, h, m, n: s + table[h, m - n + last]


@_scored(masks.causal)
def relative_clipped(drawn: Drawn) -> PairFunction:
    table = drawn.learned("table", 17)
    return lambda s, b, h, m, n: s + table[torch.clamp(m - n, -8, 8) + 8]


@_scored(masks.checkerboard)
def swin(drawn: Drawn) -> PairFunction:
    """A table by the difference of places in a window of a picture, looked up in two steps."""
    width = 8
    place = torch.arange(max(drawn.sizes.queries, drawn.sizes.keys)) % (width * width)
    y, x = place // width, place % width
    index = (y[:, None] - y + width - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    table = drawn.learned("table", (2 * width - 1) ** 2, drawn.sizes.heads)
    return lambda s, b, h, m, n: s + table[index[m, n], h]


@_scored()
def swin_2d(drawn: Drawn) -> PairFunction:
    table = drawn.learned("table", drawn.sizes.heads, 15, 15)
    return lambda s, b, h, m, n: (
        s + table[h, (m // 8 % 8) - (n // 8 % 8) + 7, (m % 8) - (n % 8) + 7]
    )


@_scored()
def tanh_gate(drawn: Drawn) -> PairFunction:
    gate = drawn.learned("gate", drawn.sizes.heads)
    table = drawn.learned("table", 2 * max(drawn.sizes[2:]))

    def gated(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        share = torch.tanh(gate[h])
        return (1.0 - share) * s + share * table[abs(m - n)]

    return gated


@_scored(masks.causal)
def temperature(drawn: Drawn) -> PairFunction:
    logarithms = drawn.learned("logarithms", drawn.sizes.heads)
    return lambda s, b, h, m, n: s * torch.exp(logarithms[h])


@_scored()
def temperature_of_rows(drawn: Drawn) -> PairFunction:
    inverse = drawn.learned("inverse", drawn.sizes.batch, drawn.sizes.queries, low=0.5, high=2.0)
    return lambda s, b, h, m, n: s / inverse[b, m]


@_scored()
def one_temperature(drawn: Drawn) -> PairFunction:
    scale = drawn.learned("scale", low=0.5, high=2.0)
    return lambda s, b, h, m, n: scale * s


@_scored()
def gaussian(drawn: Drawn) -> PairFunction:
    widths = drawn.learned("widths", drawn.sizes.heads, low=4.0, high=9.0)
    return lambda s, b, h, m, n: s - (m - n).double() ** 2 / (2.0 * widths[h] ** 2)


@_scored()
def kerple(drawn: Drawn) -> PairFunction:
    r1 = drawn.learned("r1", drawn.sizes.heads, low=0.1, high=2.0)
    r2 = drawn.learned("r2", drawn.sizes.heads, low=0.1, high=2.0)
    return lambda s, b, h, m, n: s - r1[h] * torch.log(1.0 + r2[h] * abs(m - n))


@_scored()
def power(drawn: Drawn) -> PairFunction:
    """A power of the distance, which is 0 on the diagonal."""
    rate = drawn.learned("rate", drawn.sizes.heads, low=0.01, high=0.3)
    power = drawn.learned("power", drawn.sizes.heads, low=0.5, high=1.5)
    return lambda s, b, h, m, n: s - rate[h] * abs(m - n).double() ** power[h]


@_scored(masks.causal)
def fire(drawn: Drawn) -> PairFunction:
    c = drawn.learned("c", drawn.sizes.heads, low=0.1, high=2.0)
    weight = drawn.learned("weight", drawn.sizes.heads)
    length = drawn.learned("length", low=9.5, high=12.5)

    def biased(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        whole = torch.maximum(m.double(), length)
        near = torch.log(1.0 + c[h] * abs(m - n)) / torch.log(1.0 + c[h] * whole)
        return s + weight[h] * near

    return biased


@_scored(masks.causal)
def retention(drawn: Drawn) -> PairFunction:
    gate = drawn.learned("gate", drawn.sizes.heads, low=1.0, high=4.0)
    return lambda s, b, h, m, n: s + (m - n) * torch.log(torch.sigmoid(gate[h]))


@_scored(masks.causal)
def forgetting(drawn: Drawn) -> PairFunction:
    longest = max(drawn.sizes.queries, drawn.sizes.keys)
    total = drawn.learned("total", drawn.sizes.batch, drawn.sizes.heads, longest)
    return lambda s, b, h, m, n: s + total[b, h, m] - total[b, h, n]


@_scored()
def sigmoid(drawn: Drawn) -> PairFunction:
    weight = drawn.learned("weight", drawn.sizes.heads)
    offset = drawn.learned("offset", drawn.sizes.heads)
    return lambda s, b, h, m, n: s + torch.sigmoid(weight[h] * (m - n) + offset[h])


@_scored()
def waves(drawn: Drawn) -> PairFunction:
    frequency = drawn.learned("frequency", drawn.sizes.heads, 2)
    height = drawn.learned("height", 2, drawn.sizes.heads)
    return lambda s, b, h, m, n: (
        s
        + height[0, h] * torch.cos((m - n) * frequency[h, 0])
        + height[1, h] * torch.sin((m + n) * frequency[h, 1])
    )


@_scored()
def sawtooth(drawn: Drawn) -> PairFunction:
    period = drawn.learned("period", drawn.sizes.heads, low=3.1, high=7.9)
    return lambda s, b, h, m, n: s + (m - n).double() % period[h] - (m - n) // 4


@_scored()
def near_and_far(drawn: Drawn) -> PairFunction:
    near = drawn.learned("near", drawn.sizes.heads)
    far = drawn.learned("far", drawn.sizes.batch)
    return lambda s, b, h, m, n: torch.where(abs(m - n) < 8, s * near[h], s + far[b])


@_scored()
def limits(drawn: Drawn) -> PairFunction:
    low = drawn.learned("low", drawn.sizes.heads, low=-0.6, high=-0.3)
    high = drawn.learned("high", drawn.sizes.heads, low=0.3, high=0.6)
    return lambda s, b, h, m, n: torch.minimum(torch.maximum(s, low[h]), high[h])


@_scored()
def ties(drawn: Drawn) -> PairFunction:
    """Equal entries of a table meet in a maximum, and an absolute value at its kink."""
    table = drawn.learned("table", 4)
    return lambda s, b, h, m, n: (
        s + torch.maximum(table[m % 4], table[n % 4]) + abs(table[m % 4] - table[n % 4])
    )


@_scored()
def polynomial(drawn: Drawn) -> PairFunction:
    c = drawn.learned("c", 3, drawn.sizes.heads)
    return lambda s, b, h, m, n: c[0, h] + c[1, h] * s + c[2, h] * s * s


@_scored()
def squashed(drawn: Drawn) -> PairFunction:
    rate = drawn.learned("rate", drawn.sizes.heads, low=0.1, high=1.0)
    return lambda s, b, h, m, n: s * torch.rsqrt(1.0 + rate[h] * s * s) * torch.exp2(-rate[h])


@_scored()
def pruned(drawn: Drawn) -> PairFunction:
    weight = drawn.learned("weight", drawn.sizes.batch, drawn.sizes.keys, low=0.1, high=1.0)
    return lambda s, b, h, m, n: s + torch.log(weight[b, n])


@_scored(masks.causal)
def undefined_above(drawn: Drawn) -> PairFunction:
    """NaN where the causal mask hides: neither values nor gradients may see it."""
    rate = drawn.learned("rate", drawn.sizes.heads)

    def undefined(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        distance = (m - n).double()
        if isinstance(s, Tensor):  # plain torch, whose autograd lets that NaN through
            distance = distance.clamp(min=0.0)
        return s * (1.0 + rate[h] * torch.sqrt(distance + 0.25))

    return undefined


@_scored(masks.causal)
def outside_above(drawn: Drawn) -> PairFunction:
    """An index that leaves its tensor where the causal mask hides."""
    table = drawn.learned("table", drawn.sizes.heads, max(drawn.sizes[2:]))
    return lambda s, b, h, m, n: s + table[h, m - n]


@_scored(masks.causal)
def chosen(drawn: Drawn) -> PairFunction:
    """A gate that decides, and has no derivative: its gradient is 0."""
    gate = drawn.learned("gate", drawn.sizes.heads)
    return lambda s, b, h, m, n: torch.where(gate[h] > 0, s, 2.0 * s)


@_scored()
def stepped(drawn: Drawn) -> PairFunction:
    table = drawn.learned("table", drawn.sizes.heads, low=-3.0, high=3.0)
    return lambda s, b, h, m, n: s + table[h].round()


@_scored()
def times_zero(drawn: Drawn) -> PairFunction:
    table = drawn.learned("table", drawn.sizes.heads, drawn.sizes.keys)
    return lambda s, b, h, m, n: s + 0.0 * table[h, n]


@_scored(masks.both(masks.causal, masks.MASKS["random-each"], masks.documents), sinks=True)
def everything(drawn: Drawn) -> PairFunction:
    parts = [make(drawn) for make in (temperature, alibi, relative_clipped, softcap)]

    def chained(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        for part in parts:
            s = part(s, b, h, m, n)
        return s

    return chained


VARIANTS.append(Variant("sinks", masks.both(masks.causal, masks.documents), alibi, sinks=True))
