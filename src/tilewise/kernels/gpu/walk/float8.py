"""Handle float8 e4m3 in the forward kernel: operands, scales, probabilities, transposed values.

How a chip multiplies it is its family's (``config.Fp8Products``), and ``FP8`` of the forms here:

* "" is another dtype;
* "halves": the chip has no matrix instructions for it, or Triton no such type. Operands come as
  their codes, uint8, and become float16, which holds every e4m3 number exactly; so do the
  probabilities;
* "short": its matrix units add with few bits, and an accumulator of many blocks would drift. Each
  block's product begins at 0 and is added in float32;
* "whole": they add in float32;
* "casts": decode calls, or keys in pages, on any of these chips. Such a call is bound by bytes, and
  its values are not transposed. Operands are float8 and cast to float16.

Pages in 8 bits beside wider queries (``Problem.stored``) are another matter: there a number stands
for itself times its row's scale, and products are those of the queries' dtype. ``STORED`` of the
forms says what the numbers are: "" there are none, "numbers" that the chip's compiler widens by
itself, "codes" of float8 as above.

Probabilities of 8 bits are raised by 2^8 on the way. The largest is then 256 of 448, and those down
to 2^-14 of it keep all their digits.

The product P V sums over keys. For 16-bit types, matrix units and their loads can transpose a tile
of values on the way. For 8 bits most of them cannot, and a walk over the keys would transpose byte
by byte for every tile of queries. So the values are laid out key by key once, before the walk. This
takes as much memory as they do, and a fraction of a percent of the walk's time with thousands of
queries.

A sequence of a packed call begins at a multiple of 16. Behind the last key there is room for a
block, so blocks can be read whole. Do not use the contents of that room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.config import FAMILIES, Blocks, padded
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    head_strides,
    launch_of,
    line_place,
    load_tile,
    programs_of,
    slots_of,
    store_tile,
)
from tilewise.problem import Operands, Problem
from tilewise.variants.float8 import FLOAT8

_LEAST = tl.constexpr(1e-30)  # a scale below it makes no difference between any two e4m3 products
_MOST = tl.constexpr(3.4e38)
_ROWS = 64  # keys that a program transposes
_ALIGNED = tl.constexpr(16)
RAISED: tl.constexpr = tl.constexpr(8)  # the power of two of probabilities of 8 bits
LOWERED: tl.constexpr = tl.constexpr(0.00390625)  # 2 to the negative of it


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
        values = values * LOWERED
    return values


def wants_transposed(fp8: str, family: str) -> bool:
    """Return whether to transpose values: for float8, but not on Blackwell, which takes both."""
    return fp8 in ("short", "whole") and FAMILIES[family].unit != "tcgen05"


@triton.jit
def begin_transposed(begin, b):
    """Where the transposed values of sequence ``b`` begin, whose keys do so at ``begin``."""
    return (begin // _ALIGNED + b) * _ALIGNED


@triton.jit(do_not_specialize=["batch", "heads", "keys", "slots"])
def transpose_kernel(
    v,
    transposed,
    cu_k,
    v_strides,
    transposed_strides,
    batch,
    heads,
    keys,
    slots,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_THREADS: tl.constexpr,
):
    """A tile of values of one head, from its rows to where the keys are next to one another.

    BY_THREADS: of each 16 keys, those come together that a product leaves a thread: 2 i, 2 i + 1,
    2 i + 8 and 2 i + 9.
    """
    program = tl.program_id(0)
    slot, line = program % slots, program // slots
    b, h, begin, _, _, N, n0 = line_place(
        slot, line, (cu_k, cu_k, None), batch, heads, keys, keys, BLOCK, True
    )
    begin_there = begin
    if cu_k is not None:
        begin_there = begin_transposed(begin, b)
    if n0 >= N:
        return
    here = head_of(v, v_strides, b, h, begin)
    there = head_of(transposed, transposed_strides, b, h, begin_there)
    tile = load_tile(here, n0, v_strides, 0, N, BLOCK, DV, DV_PADDED, True, False)
    if BY_THREADS:
        tile = tile.reshape(BLOCK // 16, 2, 4, 2, DV_PADDED).permute(0, 2, 1, 3, 4)
        tile = tile.reshape(BLOCK, DV_PADDED)
    end = (N + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    store_tile(there, n0, transposed_strides, end, tile, BLOCK, DV, DV_PADDED)


def transpose_values(
    problem: Problem, operands: Operands, blocks: Blocks, *, by_threads: bool = False
) -> tuple[Operands, list[Launch]]:
    """Return the operands with their values transposed, and what transposes them.

    Args:
        problem: what to compute, of a type of 8 bits.
        operands: with what.
        blocks: of the walk that will read them.
        by_threads: the order of keys, see ``transpose_kernel``.
    """
    v = operands.v
    aligned = -(-problem.keys // _ALIGNED.value) * _ALIGNED.value
    if problem.layout == "dense":
        length = -(-aligned // blocks.keys) * blocks.keys
        transposed = scratch(v, (*v.shape[:2], v.shape[3], length)).transpose(2, 3)
    else:
        length = aligned + _ALIGNED.value * problem.batch + blocks.keys
        transposed = scratch(v, (*v.shape[1:], length)).permute(2, 0, 1)
    slots = slots_of(problem, problem.keys, _ROWS)
    arguments = {
        "v": v.view(torch.uint8),
        "transposed": transposed.view(torch.uint8),
        "cu_k": operands.cu_seqlens_k,
        "v_strides": head_strides(v, problem),
        "transposed_strides": head_strides(transposed, problem),
        "batch": problem.batch,
        "heads": problem.kv_heads,
        "keys": problem.keys,
        "slots": slots,
    }
    constants = {
        "DV": problem.value_dim,
        "DV_PADDED": padded(problem.value_dim),
        "BLOCK": _ROWS,
        "BY_THREADS": by_threads,
    }
    grid = (programs_of(problem, problem.kv_heads, slots),)
    launch = launch_of(transpose_kernel, grid, arguments, constants, Blocks(_ROWS, _ROWS, 4, 1))
    return operands._replace(v=transposed), [launch]


def keys_as_columns(transposed: Tensor, problem: Problem) -> Tensor:
    """Return dense values of ``transpose_values`` as [B, Hk, D, N], N raised to a multiple of 16.

    What is behind the last key is 0, and for the copy engine also what is behind these columns.
    """
    return transposed.mT[..., : -(-problem.keys // _ALIGNED.value) * _ALIGNED.value]
