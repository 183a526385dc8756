"""Handle float8 e4m3 in the forward kernel: operands, scales, and probabilities of 8 bits.

How a chip multiplies it is its family's (``config.Fp8Products``), and ``FP8`` of the forms here:

* "" is another dtype;
* "halves": the chip has no matrix instructions for it, or Triton no such type. Operands come as
  their codes, uint8, and become float16, which holds every e4m3 number exactly; so do the
  probabilities;
* "short": its matrix units add with few bits, and an accumulator of many blocks would drift. Each
  block's product begins at 0 and is added in float32;
* "whole": they add in float32;
* "casts": decode calls, or keys in pages, on any of these chips. Such a call is bound by bytes, and
  its values are not transposed (``transpose.py``). Operands are float8 and cast to float16.

Pages in 8 bits beside wider queries (``Problem.stored``) are another matter: there a number stands
for itself times its row's scale, and products are those of the queries' dtype. ``STORED`` of the
forms says what the numbers are: "" there are none, "numbers" that the chip's compiler widens by
itself, "codes" of float8 as above.

Probabilities of 8 bits are raised by 2^8 on the way. The largest is then 256 of 448, and those down
to 2^-14 of it keep all their digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewise.kernels.gpu.config import FAMILIES
from tilewise.problem import Operands, Problem
from tilewise.variants.float8 import FLOAT8

_LEAST = tl.constexpr(1e-30)  # a scale below it makes no difference between any two e4m3 products
_MOST = tl.constexpr(3.4e38)


def fp8_products(problem: Problem, family: str, *, whole_walk: bool = True) -> str:
    """Return ``FP8`` of a problem on a family of chips.

    Args:
        problem: what to compute.
        family: a name of ``config.FAMILIES``.
        whole_walk: whether a program walks over all keys of its queries, and these are many.
    """
    if problem.dtype is not FLOAT8:
        return ""
    fp8 = FAMILIES[family].fp8
    if fp8 == "halves" or (whole_walk and not problem.page_size):
        return fp8
    return "casts"


def stored_form(problem: Problem, family: str) -> str:
    """Return ``STORED`` of a problem on a family of chips."""
    if problem.stored is None:
        return ""
    return "codes" if problem.stored is FLOAT8 and FAMILIES[family].fp8 == "halves" else "numbers"


def with_codes(operands: Operands, fp8: str, stored: str = "") -> Operands:
    """The operands as a kernel takes them: codes in the place of numbers that it decodes itself."""
    if stored == "codes":
        k, v = operands.k.view(torch.uint8), operands.v.view(torch.uint8)
        return operands._replace(k=k, v=v)
    if fp8 != "halves":
        return operands
    q, k, v = (tensor.view(torch.uint8) for tensor in operands[:3])
    return operands._replace(q=q, k=k, v=v)


@triton.jit
def _from_codes(tile):
    """Return codes of float8 as float16.

    Exponent and fraction of a code, moved to where float16 has them, are a number 2^8 too small.
    """
    wide = tile.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    halves = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), halves)


@triton.jit
def decoded(tile, FORM: tl.constexpr):
    """Return a tile of codes, or of float8, as float16 where the form says so; any other as it is.

    Pages in 8 bits beside wider queries are ``widened``.
    """
    if FORM.FP8 == "halves":
        tile = _from_codes(tile)
    elif FORM.FP8 == "casts":
        tile = tile.to(tl.float16)
    return tile


@triton.jit
def widened(tile, dtype, FORM: tl.constexpr):
    """Return a tile of keys or values in the dtype of products; their rows' scales are left out.

    Every number of 8 bits is exact in 16 bits.
    """
    if FORM.STORED == "codes":
        tile = _from_codes(tile)
    if FORM.STORED != "":
        tile = tile.to(dtype)
    return decoded(tile, FORM)


@triton.jit
def scaled_for(scale, q_scale, k_scale, b, h, heads, group):
    """The scale of the scores of one head, with the scales of its q and k if there are any."""
    if q_scale is not None:
        scale = scale * tl.load(q_scale + b * heads + h)
    if k_scale is not None:
        scale = scale * tl.load(k_scale + b * (heads // group) + h // group)
    return scale


@triton.jit
def folded(q, scale):
    """(q, scale) with a positive scale, for scores in units of the bare product q.k.

    Its sign goes to q, which costs no bit. A scale of 0 makes q 0, one that is no number makes it
    NaN, and the scale 1.
    """
    size = tl.abs(scale)
    usual = (size >= _LEAST) & (size <= _MOST)
    factor = tl.where(usual, tl.where(scale < 0, -1.0, 1.0), (scale - scale) * 0.0)
    q = (q.to(tl.float32) * factor).to(q.dtype)
    return q, tl.where(usual, size, 1.0)


@triton.jit
def lowered(values, FORM: tl.constexpr):
    """Undo in sums the power of two that probabilities were raised by; exact."""
    if (FORM.FP8 == "short") | (FORM.FP8 == "whole"):
        values = values * 0.00390625
    return values
