"""Rotary position embedding, with the norm of heads before it where a model has one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor
from tilewise.errors import InvalidArgument
from tilewise.head_rows import HeadNorm, normed_and_turned, turned_pairs
from tilewise.nn.scaling import RotaryScaling


class Rotary(NamedTuple):
    """How ``Attention`` rotates queries and keys: see ``rotary`` for the formula.

    Args:
        base: the base of the geometric series of wavelengths.
        dim: how many leading channels of a head are rotated, even; None for all of them.
        scaling: how angles are stretched to longer contexts: ``LinearScaling``, ``NtkScaling``,
            ``DynamicNtkScaling``, ``YarnScaling`` or ``Llama3Scaling``; None for not at all.
        interleaved: pairs are channels 0 and 1, 2 and 3, ...; else 0 and dim/2, ...
        axes: of positions on several axes (M-RoPE): which one each of the dim/2 pairs takes.
    """

    base: float = 10000.0
    dim: int | None = None
    scaling: RotaryScaling | None = None
    interleaved: bool = False
    axes: tuple[int, ...] | None = None


def rotary(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    dim: int | None = None,
    scaling: RotaryScaling | None = None,
    length: Tensor | None = None,
    interleaved: bool = False,
    axes: Sequence[int] | None = None,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Rotary position embedding: turn channel pairs by an angle proportional to the position.

    For i < dim/2, with angle = position * base ** (-2 i / dim)::

        out[i]         = x[i] * cos(angle) - x[i + dim/2] * sin(angle)
        out[i + dim/2] = x[i + dim/2] * cos(angle) + x[i] * sin(angle)

    Channels from ``dim`` on are copied. This pairing of halves is that of GPT-NeoX and Llama;
    ``interleaved`` pairs channels 2 i and 2 i + 1, as GPT-J does. Angles are computed in float32
    (float64 for float64), as are norm and rotation of half types.

    With positions on several axes (M-RoPE: time, height and width of a patch), pair i takes the
    position on axis ``axes[i]``. Qwen2-VL's sections (16, 24, 24) are
    ``axes=[0] * 16 + [1] * 24 + [2] * 24``.

    With a norm, calls on a CPU go over the rows once, in the compiled core, under ``torch.compile``
    too. Other calls take operations of torch, and may round otherwise. Differentiable any number of
    times, in ``x``, the norm's tensors and floating positions.

    Args:
        x: queries or keys, [B, H, S, D].
        positions: integer or floating, [S] or [B, S]; with ``axes`` [A, S] or [A, B, S].
        base: the base of the geometric series, above 0.
        dim: rotated channels, even, in [2, D]; None for D.
        scaling: changes the angle per position, and may lengthen what is rotated.
        length: of the sequences, [1] or [B, 1], for a scaling that depends on it; None for the
            largest position and 1.
        interleaved: which channels are pairs.
        axes: dim/2 numbers below A; None for positions on one axis.
        norm: of each row before the rotation; None for none.

    Returns:
        [B, H, S, D], the dtype of ``x``.

    Raises:
        InvalidArgument: an odd or too large ``dim``, a ``base`` not above 0, positions, axes or a
            norm that do not fit ``x``, or axes beside a scaling that depends on the length; also
            another ``x`` than a floating one of four dimensions.
        InvalidType: what is no tensor.

    Sources: Su et al., RoFormer (2021), equation 15; M-RoPE: Wang et al., Qwen2-VL (2024).
    """
    check_tensor("x", x, "a floating tensor [B, H, S, D]", FLOATING, dims=4)
    due = "[S] or [B, S]" if axes is None else "[A, S] or [A, B, S] with axes"
    check_tensor("positions", positions, f"an integer or floating tensor {due}")
    if positions.is_complex() or positions.dtype is torch.bool:
        raise InvalidArgument("positions", f"a tensor of {positions.dtype}", "integers or floats")
    width = x.shape[-1]
    dim = width if dim is None else dim
    if dim % 2 or not 2 <= dim <= width:
        raise InvalidArgument("dim", str(dim), f"an even number from 2 to the head width {width}")
    if not (math.isfinite(base) and base > 0):
        raise InvalidArgument("base", str(base), "a finite number above 0")
    if norm is not None:
        norm.check(x)
    shapes = ((x.shape[2],), (x.shape[0], x.shape[2]))
    fits = positions.shape in shapes if axes is None else positions.shape[1:] in shapes
    if not fits:
        came = f"shape {list(positions.shape)}"
        raise InvalidArgument("positions", came, f"{due} of x {list(x.shape)}")
    if axes is not None:
        _check_axes(axes, dim // 2, positions.shape[0], scaling)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, dim, 2, device=x.device, dtype=work) / dim
    frequencies: Tensor = base**-exponents
    if scaling is not None:
        if length is None and scaling.dynamic:
            length = longest(positions)
        frequencies = scaling.frequencies(base, exponents, length)
    at = positions.to(work)[..., None]
    if axes is not None:
        at = at[..., 0][torch.tensor(axes, device=x.device)].movedim(0, -1)
    angles = at * frequencies.unsqueeze(-2)  # [S, dim/2], [B, S, dim/2]
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    if norm is not None:
        return normed_and_turned(x, norm, cos, sin, interleaved)
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return turned_pairs(x, cos, sin, interleaved)


def _check_axes(axes: Sequence[int], pairs: int, most: int, scaling: RotaryScaling | None) -> None:
    if len(axes) != pairs or not all(0 <= each < most for each in axes):
        required = f"{pairs} numbers from 0 to {most - 1}, one for each pair of channels"
        raise InvalidArgument("axes", str(list(axes)), required)
    if scaling is not None and scaling.dynamic:
        came = f"{type(scaling).__name__} beside axes"
        raise InvalidArgument("scaling", came, "a scaling that does not depend on the length")


def longest(*positions: Tensor) -> Tensor | None:
    """Return the largest of some positions and 1, [1] or [B, 1]; None where there are none."""
    found = None
    for each in positions:
        if each.shape[-1]:
            own = each.amax(dim=-1, keepdim=True) + 1
            found = own if found is None else torch.maximum(found, own)
    return found
