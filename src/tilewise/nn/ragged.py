"""Nested tensors [B, j, E] as rows packed one sequence after the other, and back.

``torch.nn.TransformerEncoder`` makes them of padded batches in eval mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument

__all__ = ["Rows", "check_same", "nested_as", "rows_of"]

_FORM = "a nested tensor [B, j, E] without holes"


class Rows(NamedTuple):
    """The rows of a nested tensor.

    Args:
        values: [T, E].
        cu_seqlens: [B + 1], where each sequence starts, and T.
        lengths: of the sequences where the layout is ``torch.strided``; None where it is jagged.
    """

    values: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...] | None


def rows_of(name: str, nested: Any) -> Rows:
    """The rows of a nested tensor; of a jagged one they are its own memory.

    Raises:
        InvalidArgument: it is not nested, or not of the form.
    """
    if not nested.is_nested:
        raise InvalidArgument(name, "a tensor that is not nested", f"{_FORM}, as the others are")
    if nested.dim() != 3:
        raise InvalidArgument(name, f"a nested tensor of {nested.dim()} dimensions", _FORM)
    if nested.layout is torch.jagged:
        if nested.lengths() is not None or nested._ragged_idx != 1:
            raise InvalidArgument(name, "one with holes, or ragged elsewhere", _FORM)
        return Rows(nested.values(), nested.offsets(), None)
    parts = nested.unbind()
    lengths = tuple([part.shape[0] for part in parts])
    ends = torch.tensor([0, *lengths], device=nested.device).cumsum(0)
    return Rows(torch.cat(parts), ends, lengths)


def check_same(name: str, rows: Rows, others: Rows, other: str) -> None:
    """Check that two have sequences of the same lengths; on a device only where that is cheap.

    Raises:
        InvalidArgument: they have not.
    """
    if rows.lengths is not None and others.lengths is not None:
        same = rows.lengths == others.lengths
    elif rows.cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        same = rows.values.shape[0] == others.values.shape[0]
    else:
        same = torch.equal(rows.cu_seqlens, others.cu_seqlens)
    if not same:
        raise InvalidArgument(name, "sequences of other lengths", f"those of {other}")


def nested_as(values: Tensor, rows: Rows) -> Tensor:
    """Rows [T, E] as a nested tensor of the layout and lengths that others had."""
    if rows.lengths is None:
        return torch.nested.nested_tensor_from_jagged(values, rows.cu_seqlens)
    return torch.nested.as_nested_tensor(list(torch.split(values, list(rows.lengths))))
