"""Check the keys and values that are given to the caches."""

from itertools import pairwise

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.validation import check_cu_seqlens


def counts_of(cu_seqlens: Tensor, sequences: int, total: int) -> list[int]:
    """Return how many of ``total`` packed rows each sequence is given.

    Raises:
        InvalidArgument, InvalidType: cu_seqlens does not say it.
    """
    required = f"an int32 or int64 tensor [{sequences + 1}]"
    if not isinstance(cu_seqlens, Tensor):
        raise InvalidType("cu_seqlens", f"a {type(cu_seqlens).__name__}", required)
    fits = cu_seqlens.shape == (sequences + 1,)
    if not fits or cu_seqlens.dtype not in (torch.int32, torch.int64):
        came = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise InvalidArgument("cu_seqlens", came, required)
    starts = check_cu_seqlens("cu_seqlens", cu_seqlens, total)
    return [end - start for start, end in pairwise(starts)]


def check_rows(
    k: Tensor, v: Tensor, k_room: Tensor, v_room: Tensor, fixed: tuple[int, ...], rows: int
) -> int:
    """Return how many rows of keys and values there are.

    Args:
        k: [..., D].
        v: [..., Dv].
        k_room: where k goes: D, dtype and device are its.
        v_room: where v goes.
        fixed: the sizes of the dimensions other than the rows' and the last.
        rows: which dimension counts rows.

    Raises:
        InvalidArgument, InvalidType: naming the one that is wrong.
    """
    for name, tensor, room in (("k", k, k_room), ("v", v, v_room)):
        if not isinstance(tensor, Tensor):
            raise InvalidType(name, f"a {type(tensor).__name__}", "a tensor")
        sizes = list(tensor.shape)
        shape = [*fixed[:rows], -1, *fixed[rows:], room.shape[-1]]
        matches = len(sizes) == len(shape) and all(
            want in (-1, size) for size, want in zip(sizes, shape, strict=True)
        )
        if not matches:
            words = ", ".join("any" if size < 0 else str(size) for size in shape)
            raise InvalidArgument(name, f"shape {tuple(sizes)}", f"[{words}]")
        if (tensor.dtype, tensor.device) != (room.dtype, room.device):
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"the cache's {room.dtype} on {room.device}")
    if k.shape[rows] != v.shape[rows]:
        raise InvalidArgument("v", f"{v.shape[rows]} rows", f"as many as k has, {k.shape[rows]}")
    return k.shape[rows]
