"""The built-in masks, public as ``tilewise.masks``: which keys a query row sees.

``m`` counts query rows and ``n`` keys, both from 0; ``M`` and ``N`` are their numbers. In a
variable-length call all four belong to one sequence. Masks compose with ``&``, ``|`` and ``~``.
"""

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.program import LARGEST_COUNT, Instr
from tilewise.variants.values import Mask, dense_mask

__all__ = ["Mask", "causal", "dense", "document", "lengths", "prefix", "window"]

_ANCHORS = {"bottom_right": 1, "top_left": 0}
# Built once: a model asks for the same causal mask in every layer of every step.
_CAUSAL = {align: Mask((Instr("band", (-1, 0, anchor)),)) for align, anchor in _ANCHORS.items()}


def causal(align: str = "bottom_right") -> Mask:
    """Each row sees the keys up to its own position: n <= a + m.

    Args:
        align: ``"bottom_right"`` (a = N - M: the last row sees every key, the convention of
            decoding) or ``"top_left"`` (a = 0: row 0 sees key 0 only). They agree for M == N.

    Raises:
        InvalidArgument: another ``align``.
    """
    _anchor(align)
    return _CAUSAL[align]


def window(left: int | None, right: int | None, align: str = "bottom_right") -> Mask:
    """Each row sees a band of keys: a + m - left <= n <= a + m + right.

    Args:
        left: keys to the left of the row's own position, 0 or more; None for open.
        right: keys to the right of it, 0 or more; None for open. ``window(255, 0)`` is a causal
            window of 256 keys.
        align: as in ``causal``.

    Raises:
        InvalidArgument, InvalidType: a negative or non-integer bound, another ``align``.
    """
    bounds = (_bound("left", left), _bound("right", right))
    return Mask((Instr("band", (*bounds, _anchor(align))),))


def prefix(length: int | Tensor) -> Mask:
    """Prefix-LM: causal (bottom right), and every row also sees the first ``length`` keys.

    Args:
        length: one number, or an integer tensor [B] with one length per batch item, in [0, N].

    Raises:
        InvalidArgument, InvalidType: a negative number, a tensor that is not integer [B].
    """
    causal_band = Instr("band", (-1, 0, 1))
    if isinstance(length, Tensor):
        _check_lengths("length", length)
        return Mask((causal_band, Instr("below", (), (0,)), Instr("or")), (length,))
    below = Instr("below", (_count("length", length),))
    return Mask((causal_band, below, Instr("or")))


def lengths(tensor: Tensor) -> Mask:
    """Key padding: batch item b sees its first ``tensor[b]`` keys. Keys past it may hold NaN.

    Args:
        tensor: integer [B], each in [0, N] (checked at every call for a CPU tensor).

    Raises:
        InvalidArgument, InvalidType: not an integer tensor [B].
    """
    if not isinstance(tensor, Tensor):
        raise InvalidType("lengths", f"a {type(tensor).__name__}", "an integer tensor [B]")
    _check_lengths("lengths", tensor)
    return Mask((Instr("below", (), (0,)),), (tensor,))


def document(ids: Tensor, query_ids: Tensor | None = None) -> Mask:
    """Rows see the keys of their own document: query_ids[b, m] == ids[b, n].

    Args:
        ids: the document of each key, integer [N] or [B, N].
        query_ids: the document of each query row, integer [M] or [B, M]; ``ids`` when left out,
            which needs M == N.

    Raises:
        InvalidArgument, InvalidType: not integer tensors of one or two dimensions.
    """
    _check_ids("ids", ids)
    if query_ids is None:
        query_ids = ids
    else:
        _check_ids("query_ids", query_ids)
    return Mask((Instr("same_document", (), (0, 1)),), (query_ids, ids))


def dense(tensor: Tensor) -> Mask:
    """The mask that a boolean tensor spells out (True = attend); ``mask=tensor`` says the same.

    Args:
        tensor: bool, broadcastable to [B, Hq, M, N]. The only mask that is not O(N) memory.

    Raises:
        InvalidArgument, InvalidType: not a boolean tensor of at most four dimensions.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidType("tensor", f"a {type(tensor).__name__}", "a boolean tensor")
    return dense_mask(tensor, "tensor")


def _anchor(align: str) -> int:
    anchor = _ANCHORS.get(align) if isinstance(align, str) else None
    if anchor is None:
        raise InvalidArgument("align", repr(align), "'bottom_right' or 'top_left'")
    return anchor


def _bound(name: str, value: int | None) -> int:
    return -1 if value is None else _count(name, value, " (None for open)")


def _count(name: str, value: object, note: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(name, f"a {type(value).__name__}", f"an integer, 0 or more{note}")
    if value < 0:
        raise InvalidArgument(name, str(value), f"an integer, 0 or more{note}")
    return value if value < LARGEST_COUNT else LARGEST_COUNT


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check_lengths(name: str, tensor: Tensor) -> None:
    if not _is_integer(tensor):
        raise InvalidArgument(name, f"a tensor of {tensor.dtype}", "an integer tensor [B]")
    if tensor.dim() != 1:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", "an integer tensor [B]")


def _check_ids(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidType(name, f"a {type(tensor).__name__}", "an integer tensor [S] or [B, S]")
    if not _is_integer(tensor):
        raise InvalidArgument(
            name, f"a tensor of {tensor.dtype}", "an integer tensor [S] or [B, S]"
        )
    if tensor.dim() not in (1, 2):
        raise InvalidArgument(
            name, f"shape {tuple(tensor.shape)}", "an integer tensor [S] or [B, S]"
        )
