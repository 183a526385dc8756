"""Check the keys and values that are given to the caches."""

from itertools import pairwise

from torch import Tensor

from tilewise.checks import INDICES, check_tensor
from tilewise.errors import InvalidArgument
from tilewise.validation import check_cu_seqlens


def counts_of(cu_seqlens: Tensor, sequences: int, total: int) -> list[int]:
    """Return how many of ``total`` packed rows each sequence is given."""
    required = f"an int32 or int64 tensor [{sequences + 1}]"
    check_tensor("cu_seqlens", cu_seqlens, required, INDICES, shape=(sequences + 1,))
    starts = check_cu_seqlens("cu_seqlens", cu_seqlens, total)
    return [end - start for start, end in pairwise(starts)]


def check_rows(
    k: Tensor,
    v: Tensor | None,
    k_room: Tensor,
    v_room: Tensor | None,
    fixed: tuple[int, ...],
    rows: int,
) -> int:
    """Return how many rows of keys and values there are.

    Args:
        k: [..., D].
        v: [..., Dv]; None where values are a part of the keys.
        k_room: where k goes: D, dtype and device are its.
        v_room: where v goes; None as v.
        fixed: the sizes of the dimensions other than the rows' and the last.
        rows: which dimension counts rows.
    """
    for name, tensor, room in (("k", k, k_room), ("v", v, v_room)):
        if room is None:
            if tensor is not None:
                raise InvalidArgument(name, "a tensor", "None: the values are a part of the keys")
            continue
        shape = (*fixed[:rows], None, *fixed[rows:], room.shape[-1])
        words = ", ".join("any" if size is None else str(size) for size in shape)
        check_tensor(name, tensor, f"a tensor [{words}]", shape=shape)
        assert tensor is not None
        if (tensor.dtype, tensor.device) != (room.dtype, room.device):
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"the cache's {room.dtype} on {room.device}")
    if v is not None and k.shape[rows] != v.shape[rows]:
        raise InvalidArgument("v", f"{v.shape[rows]} rows", f"as many as k has, {k.shape[rows]}")
    return k.shape[rows]
