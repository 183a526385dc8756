"""float8 for attention: q, k and v with their scales, and incoherent processing of q and k.

Rounding to float8 (e4m3) errs by up to a 16th of a number. A few large numbers of a row then decide
the error of its scores. Incoherent processing multiplies the rows of q and k by one random
orthogonal matrix R first::

    (q R) . (k R) = q R R^T k^T = q . k,    R = diag(s) H / sqrt(B)

with random signs ``s`` and the Hadamard matrix H of B rows. Each number of ``q R`` is a sum of all
numbers of q, so outliers are spread over the width, and their errors average. Scores do not change,
and nothing has to be undone. ``docs/gpu.md`` has the measured errors.

Source: Shah et al., "FlashAttention-3", 2024, section 3.3; Chee et al., "QuIP", 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor
from tilewise.errors import InvalidArgument
from tilewise.variants.float8 import FLOAT8

__all__ = ["Quantised", "incoherent", "quantised"]

_LARGEST = 448.0  # of e4m3
_LEAST_BLOCK = 8  # numbers that an outlier is spread over, at least


class Quantised(NamedTuple):
    """Operands of float8: ``attention(**found._asdict())`` takes them.

    Args:
        q, k, v: shaped as what was rounded; a number stands for itself times its head's scale.
        q_scale: float32 [B, Hq], of packed rows [Hq].
        k_scale, v_scale: float32 [B, Hk], of packed rows [Hk].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor


def quantised(
    q: Tensor, k: Tensor, v: Tensor, *, incoherent_qk: bool = False, seed: int = 0
) -> Quantised:
    """Round q, k and v to float8 (e4m3), with a scale for each head of each batch item.

    ``scale = max|x| / 448`` over the head's rows, and ``x / scale`` goes to the nearest number. A
    head without a number other than 0 has the scale 1. One with a NaN or infinity becomes NaN.

    Args:
        q: floating [B, Hq, M, D], or packed rows [Tq, Hq, D].
        k: [B, Hk, N, D], or [Tk, Hk, D].
        v: [B, Hk, N, Dv], or [Tk, Hk, Dv].
        incoherent_qk: whether q and k are ``incoherent`` first. Scores that read q.k alone, as
            every mask and score does, do not notice it.
        seed: of ``incoherent``.

    Raises:
        InvalidArgument, InvalidType: a tensor of another kind; or a width of q or k that
            ``incoherent`` refuses.
    """
    if incoherent_qk:
        q, k = (_spread(_checked(name, x), name, seed) for name, x in (("q", q), ("k", k)))
    pairs = [_rounded(_checked(name, x)) for name, x in (("q", q), ("k", k), ("v", v))]
    (q, k, v), scales = (x for x, _ in pairs), [scale for _, scale in pairs]
    return Quantised(q, k, v, *scales)


def incoherent(x: Tensor, *, seed: int = 0) -> Tensor:
    """Multiply the rows of queries or keys by a random orthogonal matrix: ``x R``, as above.

    Give q and k of a call the same seed: their scores are those of before, but for rounding. Keys
    in a cache go in so, and each step's queries are multiplied as well. R depends on the seed and
    the width alone. It has gradients: that of x is the incoming one times ``R^T``.

    Args:
        x: [..., D] floating. D is a multiple of 8. The largest power of two that divides D is B:
            R has a Hadamard matrix for each B columns.
        seed: an integer in [0, 2**32).

    Returns:
        [..., D] in x's dtype; sums are float32, or float64 of a float64 x.

    Raises:
        InvalidArgument, InvalidType: x is no floating tensor, or its width no multiple of 8.
    """
    check_tensor("x", x, "a floating tensor [..., D]", FLOATING)
    return _spread(x, "x", seed).to(x.dtype)


def _checked(name: str, x: Tensor) -> Tensor:
    required = "a floating tensor [B, H, rows, width], or packed rows [T, H, width]"
    return check_tensor(name, x, required, FLOATING, dims=(3, 4))


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as float8 and the scales of its heads."""
    wide = x.to(torch.float32)
    rows, heads = (-2, x.shape[:2]) if x.dim() == 4 else (0, x.shape[1:2])
    if not x.numel():
        return wide.to(FLOAT8), wide.new_ones(heads)
    largest = wide.detach().abs().amax((rows, -1), keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / _LARGEST)
    return (wide / scale).to(FLOAT8), scale.reshape(heads)


def _spread(x: Tensor, name: str, seed: int) -> Tensor:
    """Return x R in float32, or float64, in the memory order of x."""
    if x.dim() > 2 and x.stride(-3) < x.stride(-2):  # [B, S, H, D] in memory, as models have it
        return _spread(x.transpose(-3, -2), name, seed).transpose(-3, -2)
    width = x.shape[-1]
    block = width & -width
    if width % _LEAST_BLOCK or not width:
        raise InvalidArgument(
            name,
            f"shape {tuple(x.shape)}, width {width}",
            f"a width that is a multiple of {_LEAST_BLOCK}, to spread numbers over",
            "Pad q and k with columns of 0 to such a width, or leave incoherent processing out.",
        )
    dtype = x.dtype if x.dtype is torch.float64 else torch.float32
    signs, matrix = _matrix(width, block, seed, x.device)
    with torch.autocast(x.device.type, enabled=False):  # it would multiply in 16 bits
        parts = (x.to(dtype) * signs).reshape(*x.shape[:-1], width // block, block)
        spread: Tensor = parts @ (matrix.to(dtype) * block**-0.5)
        return spread.flatten(-2)


def _matrix(width: int, block: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return signs [width] and H [block, block], int64 numbers of 1 and -1.

    They are made on the device in a few launches: a CUDA graph may hold them. H has
    ``(-1)^popcount(i & j)``. The signs are hashes of column and seed: "lowbias32" of C. Wellons.
    """
    column = torch.arange(width, device=device)
    mixed = column ^ (seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * factor & 0xFFFFFFFF
    bits = column[:block, None] & column[:block]
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return 1 - 2 * (mixed >> 31), 1 - 2 * (bits & 1)
