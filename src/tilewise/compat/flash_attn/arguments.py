"""The flags of flash-attn's calls, read as a mask and a score of tilewise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor, named
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.problem import DTYPES
from tilewise.validation import check_probability, check_real
from tilewise.variants import masks, scores
from tilewise.variants.lower import check_cap, largest_factor

WindowSize: TypeAlias = Sequence[Any] | Tensor  # two integers, or two tensors of one integer


class Options(NamedTuple):
    """Arguments of a call of flash-attn other than its tensors."""

    mask: masks.Mask | None  # which pairs attend; None for all of them
    cap: float  # of the scores; 0 for none
    slopes: Tensor | None  # of ALiBi, [H] or [B, H], or None
    scale: float | None  # of q.k; None for 1/sqrt(D)
    dropout_p: float  # the probability of dropping a pair

    def score(self) -> list[scores.Score] | None:
        """Return the score: the cap first and then ALiBi."""
        steps = [scores.softcap(self.cap)] if self.cap > 0 else []
        if self.slopes is not None:
            steps.append(scores.alibi(self.slopes))
        return steps or None

    def keywords(self, seed: Tensor | None = None) -> dict[str, Any]:
        """Return the keywords of ``tilewise.attention``."""
        words = {"mask": self.mask, "score": self.score(), "scale": self.scale}
        return words if seed is None else {**words, "dropout_p": self.dropout_p, "seed": seed}


def read(
    sequences: int,
    heads: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Options:
    """Return the flags of a call with so many sequences and query heads."""
    if softmax_scale is not None:
        check_finite("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(D)")
    check_probability("dropout_p", dropout_p)
    check_finite("softcap", softcap, "a finite number; 0 or less for none")
    if alibi_slopes is not None:
        required = f"a floating tensor [{heads}] or [{sequences}, {heads}]"
        check_tensor("alibi_slopes", alibi_slopes, required, FLOATING)
        if tuple(alibi_slopes.shape) not in ((heads,), (sequences, heads)):
            raise InvalidArgument("alibi_slopes", f"shape {tuple(alibi_slopes.shape)}", required)
    mask = _mask(causal, *bounds(window_size))
    return Options(mask, float(softcap), alibi_slopes, softmax_scale, dropout_p)


def bounds(window_size: WindowSize) -> tuple[int, int]:
    """Read (left, right) as two Python integers; a tensor on a device is copied from there.

    ``window_size`` are two integers of Python, of numpy or in tensors; or an integer tensor [2].
    """
    required = "two integers (left, right), each -1 for no bound"
    if isinstance(window_size, Tensor):
        if window_size.dim() != 1 or not _is_integer(window_size):
            came = f"a tensor of {window_size.dtype}, shape {tuple(window_size.shape)}"
            raise InvalidArgument("window_size", came, f"{required}, or an integer tensor [2]")
        window_size = window_size.tolist()
    if not isinstance(window_size, Sequence) or isinstance(window_size, str):
        raise InvalidType("window_size", named(window_size), required)
    if len(window_size) != 2:
        raise InvalidArgument("window_size", f"{len(window_size)} entries", required)
    left, right = (_bound("window_size", each, required, " in it") for each in window_size)
    return left, right


def two_bounds(left: object, right: object) -> tuple[int, int]:
    """Read ``window_size_left`` and ``window_size_right`` as ``bounds`` reads both in one."""
    required, fix = "an integer, -1 for no bound", ""
    if isinstance(left, Sequence):
        fix = "Flash-attn before 2.7 takes both in one tuple, window_size. Pass each by itself."
    return (
        _bound("window_size_left", left, required, fix=fix),
        _bound("window_size_right", right, required),
    )


def is_local(causal: bool, window_size: tuple[int, int]) -> bool:
    """Return whether rows see different keys: flash-attn then rotates each at its place."""
    return causal or window_size[0] >= 0 or window_size[1] >= 0


def check_rank(name: str, tensor: object, shape: str) -> None:
    """It is a tensor with as many dimensions as ``shape`` ("[B, S, H, D]") names."""
    if check_tensor(name, tensor, f"a tensor {shape}").is_nested:
        raise InvalidArgument(name, "a nested tensor", shape, "Pack it for flash_attn_varlen_func.")
    check_tensor(name, tensor, shape, dims=shape.count(",") + 1)


def check_finite(name: str, value: Any, required: str) -> None:
    """It is a number, and neither infinite nor NaN."""
    check_real(name, value, required)
    # A comparison, and not math.isfinite: torch.compile traces it for a symbolic number.
    if not -math.inf < value < math.inf:
        raise InvalidArgument(name, str(value), required)


def check_computed_in(dtype: torch.dtype, options: Options) -> None:
    """``tilewise.attention`` takes the dtype, and the scale and the cap are finite numbers in it.

    For calls that write before they attend.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("q", f"{dtype}", f"one of {', '.join(map(str, DTYPES))}")
    largest, scale = largest_factor(dtype), options.scale
    if scale is not None and abs(scale) > largest:
        required = f"at most {largest:.2g} for {dtype}"
        raise InvalidArgument("softmax_scale", str(scale), required)
    if options.cap > 0:
        check_cap("softcap", options.cap, dtype, ", or 0 for none")


def as_flash_attn(lse: Tensor | None) -> Tensor:
    """Lse as flash-attn 2 returns it: +inf for a row without keys."""
    assert lse is not None
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _bound(name: str, value: object, required: str, place: str = "", fix: str = "") -> int:
    if isinstance(value, Tensor) and value.numel() == 1 and _is_integer(value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        came = named(value)
        if isinstance(value, Tensor):
            came = f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
        raise InvalidType(name, came + place, required, fix)
    return value if isinstance(value, int) else int(value)


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype is torch.bool or dtype.is_floating_point or dtype.is_complex)


def _mask(causal: bool, left: int, right: int) -> masks.Mask | None:
    behind = None if left < 0 else left
    ahead = 0 if causal else None if right < 0 else right
    if behind is None:
        return None if ahead is None else masks.causal() if causal else masks.window(None, ahead)
    return masks.window(behind, ahead)
