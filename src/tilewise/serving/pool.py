"""The memory of pages: rows as they come, checked, or in 8 bits with a scale for each."""

from itertools import pairwise

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor
from tilewise.errors import InvalidArgument
from tilewise.validation import check_cu_seqlens
from tilewise.variants.float8 import FLOAT8


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return an empty tensor that may be written in every mode.

    One that is made under ``torch.inference_mode`` could be written there alone.
    """
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


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


_LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}


def quantised(x: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits: ``scale = max|row| / largest``, ``row / scale`` to the nearest number.

    The largest number is 127 for int8 and 448 for float8_e4m3fn. With int8 the error of an element
    is at most scale / 2, a 254th of the row's largest. With float8 it is at most a 16th of the
    element, or scale / 1024 where the element is smaller than scale / 64. A row with a NaN or
    infinity reads as NaN.

    Args:
        x: [..., D], floating.
        storage: torch.int8 or torch.float8_e4m3fn.

    Returns:
        [..., D] of that dtype, and the scales [...], float32.
    """
    wide = x.to(torch.float32)
    largest = _LARGEST[storage]
    scales = wide.abs().amax(-1) / largest
    units = wide / torch.where(scales > 0, scales, 1.0)[..., None]
    units = units.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-largest, largest)
    if storage is torch.int8:
        units = units.round()
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return units.to(storage), scales


class Pool:
    """Rows of keys, or of values, in pages.

    Args:
        pages: how many there are.
        heads: Hk.
        page_size: rows of a page.
        width: of a row.
        dtype: of rows that go in and that are read.
        storage: None for dtype itself; or an 8-bit dtype of ``quantised``.
        device: where it is.

    Attributes:
        values: [pages, Hk, page_size, width] in the dtype of storage.
        scales: float32 [pages, Hk, page_size], or None.
        like: an empty tensor of the width, dtype and device of rows that go in.
    """

    def __init__(
        self,
        pages: int,
        heads: int,
        page_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        storage: torch.dtype | None,
        device: torch.device | str,
    ) -> None:
        shape = (pages, heads, page_size)
        self.scales: Tensor | None = None
        if storage is not None:
            if storage not in _LARGEST:
                required = "None, torch.int8 or torch.float8_e4m3fn"
                raise InvalidArgument("storage", str(storage), required)
            if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                required = "a floating dtype of 16 bits or more, that of queries"
                raise InvalidArgument("dtype", f"{dtype} with storage={storage}", required)
            self.scales = room(shape, torch.float32, device)
        self.values = room((*shape, width), storage or dtype, device)
        self.like = torch.empty(0, width, dtype=dtype, device=device)

    def _bytes(self) -> Tensor:
        """Return the values in a dtype that torch indexes: it does not index float8 everywhere."""
        return self.values if self.scales is None else self.values.view(torch.uint8)

    def clear(self, first: int) -> None:
        """Zeros in all pages from one on."""
        self._bytes()[first:] = 0
        if self.scales is not None:
            self.scales[first:] = 0

    def copy(self, old: int, fresh: int) -> None:
        """Make a page the copy of another."""
        self._bytes()[fresh] = self._bytes()[old]
        if self.scales is not None:
            self.scales[fresh] = self.scales[old]

    def write(self, pages: Tensor, places: Tensor, rows: Tensor) -> None:
        """Put rows [T, Hk, width] at places of pages, int64 [T] each."""
        if self.scales is None:
            self.values[pages, :, places] = rows
            return
        values, scales = quantised(rows, self.values.dtype)
        self._bytes()[pages, :, places] = values.view(torch.uint8)
        self.scales[pages, :, places] = scales
