"""The built-in masks, public as ``tilewise.masks``: which keys a query row sees.

``m`` counts query rows and ``n`` keys, both from 0; ``M`` and ``N`` are their numbers. In a
variable-length call all four belong to one sequence. Masks compose with ``&``, ``|`` and ``~``.

Each is a function in the language of ``function``, like a user's own.
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.checks import INTEGERS, check_tensor, check_whole
from tilewise.errors import InvalidArgument
from tilewise.torch_private import constant_while_compiling
from tilewise.variants.program import LARGEST_COUNT, Program, fitted
from tilewise.variants.values import Mask, dense_mask, mask_of

__all__ = [
    "Mask",
    "causal",
    "dense",
    "document",
    "function",
    "lengths",
    "prefix",
    "window",
]

_ALIGNS = ("bottom_right", "top_left")
_LENGTHS_FORM = "an integer tensor [B]"


@constant_while_compiling
def _band(left: int | None, right: int | None, align: str) -> Program:
    """Return the program of a + m - left <= n <= a + m + right."""

    def inside(b: Any, h: Any, m: Any, n: Any) -> Any:
        own = m + (n.length - m.length) if align == "bottom_right" else m
        seen: Any = True
        if left is not None:
            seen = n >= own - left
        if right is not None:
            seen = seen & (n <= own + right)
        return seen

    return mask_of(inside).program


@constant_while_compiling
def _below(length: int) -> Program:
    return mask_of(lambda b, h, m, n: n < length).program


# Built once: a model asks for the same mask in every layer of every step.
_kept_band, _kept_below = lru_cache(_band), lru_cache(_below)
_CAUSAL = {align: Mask(_band(None, 0, align)) for align in _ALIGNS}
_COUNTS, _IDS = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
_OTHER_IDS = torch.zeros(1, 1, dtype=torch.int64)
_LENGTHS = fitted(mask_of(lambda b, h, m, n: n < _COUNTS[b]).program)
_DOCUMENT = fitted(mask_of(lambda b, h, m, n: _IDS[b, m] == _OTHER_IDS[b, n]).program)


def function(f: Callable[..., Any]) -> Mask:
    """Return the mask of ``f(b, h, m, n) -> bool``, as it is now; ``mask=f`` says the same.

    Args:
        f: plain Python and torch over the batch item, query head, query row and key: ``+ - * / //
            % ** < <= == & | ^ ~``, ``abs min max``, ``tilewise.where``, functions of torch, and
            tensors indexed by integers. ``m.length`` and ``n.length`` are M and N. It is called
            once; what it reads is captured.

    Raises:
        InvalidArgument, InvalidType: it does something that is not in the language.
    """
    return mask_of(f)


def causal(align: str = "bottom_right") -> Mask:
    """Let each row see the keys up to its own position: n <= a + m.

    Args:
        align: ``"bottom_right"`` (a = N - M: the last row sees every key, the convention of
            decoding) or ``"top_left"`` (a = 0: row 0 sees key 0 only). They agree for M == N.

    Raises:
        InvalidArgument: another ``align``.
    """
    return _CAUSAL[_align(align)]


def window(left: int | None, right: int | None = 0, align: str = "bottom_right") -> Mask:
    """Let each row see a band of keys: a + m - left <= n <= a + m + right.

    ``window(255)`` is a causal window of 256 keys: the row's own and 255 to the left of it.

    Args:
        left: keys to the left of the row's own position, 0 or more; None for open.
        right: keys to the right of it, 0 or more; None for open. 0 is causal.
        align: as in ``causal``.

    Raises:
        InvalidArgument, InvalidType: a negative or non-integer bound, another ``align``.
    """
    bounds = (_bound("left", left), _bound("right", right), _align(align))
    return Mask(_band(*bounds) if torch.compiler.is_compiling() else _kept_band(*bounds))


def prefix(length: int | Tensor) -> Mask:
    """Prefix-LM: causal (bottom right), and every row also sees the first ``length`` keys.

    Args:
        length: one number, or an integer tensor [B] with one length per batch item, in [0, N].

    Raises:
        InvalidArgument, InvalidType: a negative number, a tensor that is not integer [B].
    """
    if isinstance(length, Tensor):
        check_tensor("length", length, _LENGTHS_FORM, INTEGERS, dims=1)
        return _CAUSAL["bottom_right"] | Mask(_LENGTHS, (length,))
    count = _count("length", length)
    below = _below(count) if torch.compiler.is_compiling() else _kept_below(count)
    return _CAUSAL["bottom_right"] | Mask(below)


def lengths(tensor: Tensor) -> Mask:
    """Key padding: batch item b sees its first ``tensor[b]`` keys. Keys past it may hold NaN.

    Args:
        tensor: integer [B], each in [0, N] (checked at every call for a CPU tensor).

    Raises:
        InvalidArgument, InvalidType: not an integer tensor [B].
    """
    check_tensor("lengths", tensor, _LENGTHS_FORM, INTEGERS, dims=1)
    return Mask(_LENGTHS, (tensor,))


def document(ids: Tensor, query_ids: Tensor | None = None) -> Mask:
    """Rows see the keys of their own document: query_ids[b, m] == ids[b, n].

    Args:
        ids: the document of each key, integer [N] or [B, N].
        query_ids: the document of each query row, integer [M] or [B, M]; ``ids`` when left out,
            which needs M == N.

    Raises:
        InvalidArgument, InvalidType: not integer tensors of one or two dimensions.
    """
    query_ids = ids if query_ids is None else query_ids
    for name, tensor in (("ids", ids), ("query_ids", query_ids)):
        check_tensor(name, tensor, "an integer tensor [S] or [B, S]", INTEGERS, dims=(1, 2))
    return Mask(_DOCUMENT, (query_ids, ids))


def dense(tensor: Tensor) -> Mask:
    """The mask that a boolean tensor spells out (True = attend); ``mask=tensor`` says the same.

    Args:
        tensor: bool, broadcastable to [B, Hq, M, N]. The only mask that is not O(N) memory.

    Raises:
        InvalidArgument, InvalidType: not a boolean tensor of at most four dimensions.
    """
    return dense_mask(check_tensor("tensor", tensor, "a boolean tensor"), "tensor")


def _align(align: str) -> str:
    if not isinstance(align, str) or align not in _ALIGNS:
        raise InvalidArgument("align", repr(align), "'bottom_right' or 'top_left'")
    return align


def _bound(name: str, value: int | None) -> int | None:
    return None if value is None else _count(name, value, " (None for open)")


def _count(name: str, value: object, note: str = "") -> int:
    found = check_whole(name, value, 0, f"an integer, 0 or more{note}")
    # For torch.compile: of a number that varies, the one that it is now.
    return min(operator.index(found), LARGEST_COUNT)
