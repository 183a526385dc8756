"""The tables of masks (operations ``blocks`` and ``tiles``) checked against a call."""

from typing import NoReturn

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.variants.extent import Extent, statistics_dtype
from tilewise.variants.program import Instr


def lower_table(
    instr: Instr, position: int, tensor: Tensor, extent: Extent, dtype: torch.dtype
) -> Tensor:
    """A table, or the lengths of the sequences that it is for, as it is, if it is for this call."""
    if position == 0:
        _check_shape(instr, tensor, extent)
        if instr.op == "tiles":
            _check_sizes(instr, extent, dtype)
        return tensor
    counts = (extent.query_counts, extent.key_counts)[position - 1]
    if counts and tensor.tolist() != list(counts):
        which = ("queries", "keys")[position - 1]
        _wrong(f"one for sequences of {tensor.tolist()} {which}", str(list(counts)))
    return tensor


def _check_shape(instr: Instr, tensor: Tensor, extent: Extent) -> None:
    wanted = torch.bool if instr.op == "blocks" else torch.uint8
    if tensor.dim() != 4 or tensor.dtype is not wanted:
        _wrong(f"a table {list(tensor.shape)} of {tensor.dtype}", f"4 dimensions of {wanted}")
    block_queries, block_keys = (int(size) for size in instr.params[:2])
    rows, columns = -(-extent.queries // block_queries), -(-extent.keys // block_keys)
    fits = all(
        size == least or (extent.ragged and size > least)
        for size, least in zip(tensor.shape[2:], (rows, columns), strict=True)
    )
    batch, heads = tensor.shape[:2]
    if not fits or batch not in (1, extent.batch) or heads not in (1, extent.heads):
        _wrong(
            f"a table {list(tensor.shape)}",
            f"[1 or {extent.batch}, 1 or {extent.heads}, {rows}, {columns}]"
            + (" or more rows and columns" if extent.ragged else ""),
        )


def _check_sizes(instr: Instr, extent: Extent, dtype: torch.dtype) -> None:
    if (len(instr.slots) == 3) != extent.ragged:
        kinds = ("one for sequences of one length", "one for a variable-length call")
        _wrong(kinds[len(instr.slots) == 3], kinds[extent.ragged])
    _, _, batch, heads, queries, keys, width = instr.params
    if not extent.ragged and (queries, keys) != (extent.queries, extent.keys):
        _wrong(f"one for M = {queries}, N = {keys}", f"M = {extent.queries}, N = {extent.keys}")
    for name, made, now in (("B", batch, extent.batch), ("Hq", heads, extent.heads)):
        if made not in (0, now):
            _wrong(f"one for {name} = {made}", f"{name} = {now}")
    floats = statistics_dtype(dtype)
    if width not in (0, 1 + (floats is torch.float64)):
        _wrong("one of a mask that computes in other floats", f"dtype={dtype}")


def _wrong(came: str, required: str) -> NoReturn:
    raise InvalidArgument(
        "mask (BlockMask)", came, required, "Make it with BlockMask.of for this call's sizes."
    )
