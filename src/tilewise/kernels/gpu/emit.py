"""Masks and scores as ``triton.jit`` functions, made from the text of their expressions.

Every program takes the same road: it becomes one expression (``variants/recognise.py``), and that
becomes straight-line code, one name per value. The functions are kept by their text, which
linecache holds, so that Triton hashes it, caches what it compiles, and shows it in errors.

The functions take positions as kernels have them: ``b`` and ``h`` numbers, ``m`` and ``n`` int32
blocks that broadcast against one another (``[BM, 1]`` and ``[1, BN]``, or transposed), ``M`` and
``N`` numbers. ``tensors`` and ``shapes`` are what ``captures`` makes of captured tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.problem import Problem
from tilewise.variants.expr import Expr

__all__ = ["Captures", "Table", "Variant", "captures", "shape_numbers", "variant_of"]


class Captures(NamedTuple):
    """Captured tensors as kernels take them.

    Args:
        tensors: by slot. An empty one is a zero, which is what reading from it gives.
        shapes: of slot 0 the sizes and then the strides, of slot 1 likewise, and so on.
    """

    tensors: tuple[Tensor, ...]
    shapes: tuple[int, ...]


class Table(NamedTuple):
    """A table of the mask's rectangles (the operation ``tiles``) that holds for all of the mask.

    Args:
        slot: of the uint8 tensor [B|1, Hq|1, rows, columns]; 0 says that the mask hides every pair
            of the rectangle.
        queries, keys: the sizes of a rectangle.
        whole: whether 2 says that it hides none of them.
    """

    slot: int
    queries: int
    keys: int
    whole: bool


class Variant(NamedTuple):
    """The functions of a mask and a score. All of them are ``triton.jit`` functions.

    Args:
        seen: ``(b, h, m, n, M, N, tensors, shapes) -> int1 [BM, BN]``: which pairs the mask
            shows, with the captures of the mask. None without a mask.
        score: ``(s, b, h, m, n, M, N, tensors, shapes) -> float32 [BM, BN]``: the score, from
            ``s = scale * q.k`` in natural units, with the captures of the score. None without one.
        gain: as ``score``, the derivative of the score with respect to ``s``; None if that is 1.
        loads: as ``score``, the derivative of the score with respect to each load of a float.
        load_slots: the slots of those loads; a slot may be there several times.
        load_indices: as ``score``, an int64 [BM, BN] for each of them: the element that the pair
            loads, counted in a contiguous tensor of its sizes.
        load_forms: an expression for each of them, whose outputs are its indices before clamping,
            one per dimension.
        keys_of: ``(b, m0, m1, M, N, tensors, shapes) -> low, full_low, full_high, high``, numbers
            in [0, N]: of the queries m0..m1-1 (0 <= m0 < m1 <= M) the mask hides every key before
            ``low`` and from ``high`` on, and none in [full_low, full_high), which is empty or lies
            within [low, high]. None without a mask.
        queries_of: ``(b, n0, n1, M, N, tensors, shapes)``, the same with keys and queries
            exchanged.
        tables: what is known of the whole mask.
    """

    seen: Any = None
    score: Any = None
    gain: Any = None
    loads: tuple[Any, ...] = ()
    load_slots: tuple[int, ...] = ()
    load_indices: tuple[Any, ...] = ()
    load_forms: tuple[Expr, ...] = ()
    keys_of: Any = None
    queries_of: Any = None
    tables: tuple[Table, ...] = ()


def captures(tensors: Sequence[Tensor]) -> Captures:
    """Lowered tensors (``variants/lower.py``) as kernels take them."""
    filled = tuple([_filled(tensor) for tensor in tensors])
    return Captures(filled, shape_numbers(filled))


def _filled(tensor: Tensor) -> Tensor:
    return tensor if tensor.numel() else tensor.new_zeros([1] * tensor.dim())


def shape_numbers(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Sizes and strides of every tensor in turn."""
    return tuple([number for each in tensors for number in (*each.shape, *each.stride())])


def variant_of(
    problem: Problem, mask_ranks: tuple[int, ...], score_ranks: tuple[int, ...]
) -> Variant:
    """The functions of a problem's mask and score; the same ones for the same text.

    Args:
        problem: its programs and sizes.
        mask_ranks, score_ranks: dimensions of the lowered tensors, by slot.
    """
    raise NotImplementedError
