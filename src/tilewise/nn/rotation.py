"""Rotary position embedding, with the norm of heads before it where a model has one.

A ``RotaryScaling`` stretches it to contexts longer than those that a model was trained on. Letters
there: f_i = base ** (-2 i / dim) is the unscaled angle per position of channel pair i, in radians;
s is ``factor``; L0 is ``original_length``, the longest context of the training.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.head_rows import HeadNorm, normed_and_turned, turned_pairs
from tilewise.variants.lower import statistics_dtype


@dataclass(frozen=True)
class RotaryScaling(ABC):
    """Common base of all scalings.

    Args:
        factor: s, how many times the context is longer; 1 or more.
    """

    factor: float

    # Whether the angles depend on the length of the call's own sequences.
    dynamic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or isinstance(value, bool):
                continue
            if not isinstance(value, int | float):
                raise InvalidType(field.name, f"a {type(value).__name__}", "a number")
            if not (math.isfinite(value) and value > 0):
                raise InvalidArgument(field.name, str(value), "a finite number above 0")
        if self.factor < 1:
            raise InvalidArgument("factor", str(self.factor), "1 or more")

    @abstractmethod
    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """Return the angle per position of every channel pair, in radians.

        Args:
            base: of the geometric series.
            exponents: 2 i / dim, [dim / 2], in the dtype of the result.
            length: of the sequences, [1] or [B, 1], for one that is ``dynamic``; None for L0 or
                less.

        Returns:
            [dim / 2] or [B, dim / 2].
        """

    @property
    def magnitude(self) -> float:
        """Return what cosines and sines are multiplied by; scores by its square."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: f_i / s, as if positions were s times closer.

    Source: Chen et al., Extending Context Window of Large Language Models via Positional
    Interpolation (2023), equation 4.
    """

    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """See ``RotaryScaling``: [dim / 2], from exponents [dim / 2]."""
        return base**-exponents / self.factor


@dataclass(frozen=True)
class NtkScaling(RotaryScaling):
    """NTK-aware: another base, base' = base * s ** (dim / (dim - 2)).

    The slowest pair is stretched s times, the fastest not at all.

    Source: bloc97, NTK-Aware Scaled RoPE (2023), as equation 16 of Peng et al., YaRN (2023).
    """

    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """See ``RotaryScaling``: [dim / 2], from exponents [dim / 2]."""
        dim = _at_least_four(exponents)
        changed: Tensor = (base * self.factor ** (dim / (dim - 2))) ** -exponents
        return changed


@dataclass(frozen=True)
class DynamicNtkScaling(RotaryScaling):
    """NTK-aware by the length L of each sequence: s' = s max(L, L0) / L0 - (s - 1) in place of s.

    Up to L0 nothing changes. Every item of a batch has its own L (transformers takes the longest
    one's for all). Keys in a cache would have been rotated by angles of another length: with a
    cache this one is refused.

    Args:
        factor: s, how many times longer the context becomes.
        original_length: L0.

    Source: emozilla, Dynamically Scaled RoPE (2023); Peng et al., YaRN (2023), appendix B.
    """

    original_length: float

    dynamic: ClassVar[bool] = True

    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """See ``RotaryScaling``: [dim / 2], or for lengths [B, 1] a row of each, [B, dim / 2]."""
        dim = _at_least_four(exponents)
        if length is None:
            unchanged: Tensor = base**-exponents
            return unchanged
        times = length.to(exponents.dtype).clamp_min(self.original_length) / self.original_length
        stretched = self.factor * times - (self.factor - 1)
        return (base * stretched ** (dim / (dim - 2))) ** -exponents


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN: pairs that turn often keep their angle, those that hardly turn once have f_i / s.

    A pair that turns r times within L0 has the index c(r) = dim ln(L0 / (2 pi r)) / (2 ln base).
    With low = c(beta_fast) and high = c(beta_slow), within [0, dim - 1], and
    t_i = (i - low) / (high - low) within [0, 1]::

        f'_i = (1 - t_i) f_i + t_i f_i / s

    and cosines and sines are multiplied by ``attention_factor``. (t_i is linear in i as in the
    authors' code and in models that were trained with it; the paper's is linear in r.)

    Args:
        factor: s, how many times longer the context becomes.
        original_length: L0.
        beta_fast: turns within L0 from which on a pair keeps its angle.
        beta_slow: turns up to which it is divided by s; below ``beta_fast``.
        attention_factor: None for 0.1 ln(s) + 1.
        truncate: round low down and high up to whole indices.

    Source: Peng et al., YaRN (2023), section 3.2 and equation 22, and their code.
    """

    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_slow >= self.beta_fast:
            required = f"below beta_fast={self.beta_fast}"
            raise InvalidArgument("beta_slow", str(self.beta_slow), required)

    @property
    def magnitude(self) -> float:
        """See ``RotaryScaling``."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """See ``RotaryScaling``: [dim / 2], from exponents [dim / 2]."""
        pairs = exponents.shape[0]
        low, high = (
            self._index(turns, base, 2 * pairs) for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001  # a step, as the authors have it
        index = torch.arange(pairs, device=exponents.device, dtype=exponents.dtype)
        ramp = ((index - low) / (high - low)).clamp(0, 1)
        unscaled = base**-exponents
        return unscaled * (1 - ramp) + unscaled / self.factor * ramp

    def _index(self, turns: float, base: float, dim: int) -> float:
        """Return the index, not whole, of the pair that turns so often within L0."""
        return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1: by the turns r_i = L0 f_i / (2 pi) of a pair within L0.

    Pairs that turn more than ``high_freq_factor`` times keep f_i. Those that turn less than
    ``low_freq_factor`` times have f_i / s. In between, with t_i = (r_i - low_freq_factor) /
    (high_freq_factor - low_freq_factor)::

        f'_i = (1 - t_i) f_i / s + t_i f_i

    Args:
        factor: s, how many times longer the context becomes.
        original_length: L0.
        low_freq_factor: a number of turns, below ``high_freq_factor``.
        high_freq_factor: another.

    Source: Llama 3.1's code (``apply_scaling``, 2024).
    """

    original_length: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            required = f"below high_freq_factor={self.high_freq_factor}"
            raise InvalidArgument("low_freq_factor", str(self.low_freq_factor), required)

    def frequencies(self, base: float, exponents: Tensor, length: Tensor | None) -> Tensor:
        """See ``RotaryScaling``: [dim / 2], from exponents [dim / 2]."""
        unscaled = base**-exponents
        turns = unscaled * (self.original_length / (2 * math.pi))
        width = self.high_freq_factor - self.low_freq_factor
        kept = ((turns - self.low_freq_factor) / width).clamp(0, 1)
        return unscaled / self.factor * (1 - kept) + unscaled * kept


def _at_least_four(exponents: Tensor) -> int:
    dim = 2 * exponents.shape[0]
    if dim < 4:
        raise InvalidArgument("dim", str(dim), "at least 4, for a base that depends on it")
    return dim


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
    work = statistics_dtype(x.dtype)
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
