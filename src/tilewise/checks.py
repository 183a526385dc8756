"""The checks of arguments that many calls share: tensors of a kind, and whole numbers."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
INDICES = (torch.int32, torch.int64)
FLOATING = "floating"
_DENSE = (torch.strided, torch.jagged)  # callers say what they think of nested tensors


def named(value: object) -> str:
    """Describe a value of a wrong type."""
    return f"a {type(value).__name__}"


def check_tensor(
    name: str,
    value: object,
    required: str,
    dtypes: Collection[torch.dtype] | str | None = None,
    *,
    dims: int | tuple[int, ...] | None = None,
    shape: tuple[int | None, ...] | None = None,
    device: str | None = None,
    fix: str = "",
) -> Tensor:
    """Return a value that is a tensor as required, which ``required`` says in words.

    ``dtypes`` are those allowed, or ``FLOATING``; None in ``shape`` stands for any size there;
    ``device`` is a type of devices, and ``fix`` says how to put it right.
    """
    if not isinstance(value, Tensor):
        raise InvalidType(name, named(value), required, fix)
    if value.layout not in _DENSE:
        dense = "Call its to_dense() first."
        raise InvalidArgument(name, f"layout {value.layout}", required, dense)
    if dtypes is not None:
        fits = value.is_floating_point() if isinstance(dtypes, str) else value.dtype in dtypes
        if not fits:
            raise InvalidArgument(name, f"a tensor of {value.dtype}", required, fix)
    if dims is not None and value.dim() not in ((dims,) if isinstance(dims, int) else dims):
        raise InvalidArgument(name, f"shape {tuple(value.shape)}", required, fix)
    if shape is not None and value.shape != shape and not _fits(value, shape):
        raise InvalidArgument(name, f"shape {tuple(value.shape)}", required, fix)
    if device is not None and value.device.type != device:
        raise InvalidArgument(name, f"device {value.device}", required, fix)
    return value


def _fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    return tensor.dim() == len(shape) and all(
        due is None or size == due for size, due in zip(tensor.shape, shape, strict=True)
    )


def check_whole(name: str, value: Any, least: int = 0, required: str = "") -> int:
    """Return a whole number of at least ``least``; ``required`` says it otherwise in an error."""
    required = required or f"an integer, {least} or more"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(name, named(value), required)
    if value < least:
        raise InvalidArgument(name, str(value), required)
    return value


def check_both(first: str, one: object, second: str, other: object) -> None:
    """Two arguments come together, or neither is there."""
    if (one is None) != (other is None):
        missing = first if one is None else second
        raise InvalidArgument(missing, "None", f"both of {first} and {second}, or neither")


def check_block(block: object) -> tuple[int, int]:
    """Return how many queries and keys a tile has: a pair of whole numbers of at least 1."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise InvalidType("block", repr(block), "a pair: queries and keys of a tile")
    return check_whole("block[0]", block[0], 1), check_whole("block[1]", block[1], 1)
