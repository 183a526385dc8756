"""Rotary position embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.nn.scaling import RotaryScaling


class Rotary(NamedTuple):
    """How ``Attention`` rotates queries and keys: see ``rotary`` for the formula.

    Args:
        base: the base of the geometric series of wavelengths.
        dim: how many leading channels of a head are rotated, even; None for all of them.
        scaling: how angles are stretched to longer contexts: ``LinearScaling``, ``NtkScaling``,
            ``DynamicNtkScaling``, ``YarnScaling`` or ``Llama3Scaling``; None for not at all.
    """

    base: float = 10000.0
    dim: int | None = None
    scaling: RotaryScaling | None = None


def rotary(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    dim: int | None = None,
    scaling: RotaryScaling | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """Rotary position embedding: turn channel pairs by an angle proportional to the position.

    For i < dim/2, with angle = position * base ** (-2 i / dim)::

        out[i]         = x[i] * cos(angle) - x[i + dim/2] * sin(angle)
        out[i + dim/2] = x[i + dim/2] * cos(angle) + x[i] * sin(angle)

    Channels from ``dim`` on are copied. This pairing of halves is that of GPT-NeoX and Llama.
    Angles are computed in float32 (float64 for float64), as is the rotation of half types.

    Args:
        x: queries or keys, [B, H, S, D].
        positions: integer or floating, [S] or [B, S].
        base: the base of the geometric series, above 0.
        dim: rotated channels, even, in [2, D]; None for D.
        scaling: changes the angle per position, and may lengthen what is rotated.
        length: of the sequences, [1] or [B, 1], for a scaling that depends on it; None for the
            largest position and 1.

    Returns:
        [B, H, S, D], the dtype of ``x``.

    Raises:
        InvalidArgument: an odd or too large ``dim``, a ``base`` not above 0, or positions that do
            not fit ``x``.

    Source: Su et al., RoFormer (2021), equation 15.
    """
    width = x.shape[-1]
    dim = width if dim is None else dim
    if dim % 2 or not 2 <= dim <= width:
        raise InvalidArgument("dim", str(dim), f"an even number from 2 to the head width {width}")
    if not (math.isfinite(base) and base > 0):
        raise InvalidArgument("base", str(base), "a finite number above 0")
    if positions.shape not in ((x.shape[2],), (x.shape[0], x.shape[2])):
        came, required = f"shape {list(positions.shape)}", f"[S] or [B, S] of x {list(x.shape)}"
        raise InvalidArgument("positions", came, required)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, dim, 2, device=x.device, dtype=work) / dim
    frequencies: Tensor = base**-exponents
    if scaling is not None:
        if length is None and scaling.dynamic:
            length = longest(positions)
        frequencies = scaling.frequencies(base, exponents, length)
    angles = positions.to(work)[..., None] * frequencies.unsqueeze(-2)  # [S, dim/2], [B, S, dim/2]
    if positions.dim() == 2:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return turned(x, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first channel pairs of rows, [..., D], by angles, [..., dim/2]; copy the others.

    Pairs are the halves of these channels; interleaved, those with even and with odd numbers.
    """
    dim = 2 * cos.shape[-1]
    wide = x[..., :dim].to(cos.dtype)
    if interleaved:
        one, two = wide[..., 0::2], wide[..., 1::2]
    else:
        one, two = wide[..., : dim // 2], wide[..., dim // 2 :]
    pair = (one * cos - two * sin, two * cos + one * sin)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([both.to(x.dtype), x[..., dim:]], dim=-1)


def longest(*positions: Tensor) -> Tensor | None:
    """Return the largest of some positions and 1, [1] or [B, 1]; None where there are none."""
    found = None
    for each in positions:
        if each.shape[-1]:
            own = each.amax(dim=-1, keepdim=True) + 1
            found = own if found is None else torch.maximum(found, own)
    return found
