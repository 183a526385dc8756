"""Nested tensors [B, j, E] as rows packed one sequence after the other, and back.

``torch.nn.TransformerEncoder`` makes them of padded batches in eval mode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument

_FORM = "a nested tensor [B, j, E] without holes"


class Rows(NamedTuple):
    """The rows of a nested tensor.

    Args:
        values: [T, E].
        cu_seqlens: [B + 1], where each sequence starts, and T.
        lengths: of the sequences; where the layout is jagged torch's symbol for them, which equals
            that of tensors of the same origin.
    """

    values: Tensor
    cu_seqlens: Tensor
    lengths: Any


def rows_of(name: str, nested: Any) -> Rows:
    """Return the rows of a nested tensor; of a jagged one they are its own memory."""
    if not nested.is_nested:
        raise InvalidArgument(name, "a tensor that is not nested", f"{_FORM}, as the others are")
    if nested.dim() != 3:
        raise InvalidArgument(name, f"a nested tensor of {nested.dim()} dimensions", _FORM)
    if nested.layout is torch.jagged:
        if nested.lengths() is not None or nested._ragged_idx != 1:
            raise InvalidArgument(name, "one with holes, or ragged elsewhere", _FORM)
        return Rows(nested.values(), nested.offsets(), nested.shape[1])
    parts = nested.unbind()
    lengths = tuple([part.shape[0] for part in parts])
    ends = torch.tensor([0, *lengths], device=nested.device).cumsum(0)
    return Rows(torch.cat(parts), ends, lengths)


def check_same(name: str, rows: Rows, others: Rows, other: str) -> None:
    """Check that two have sequences of the same lengths.

    Jagged ones on a device, and while torch.compile traces, have to be of the same origin.
    """
    same = rows.lengths == others.lengths
    if not same and rows.cu_seqlens.is_cpu and not torch.compiler.is_compiling():
        same = torch.equal(rows.cu_seqlens, others.cu_seqlens)
    if not same:
        fix = "Make jagged ones from the same offsets: torch.nested.nested_tensor_from_jagged."
        raise InvalidArgument(name, "sequences of other lengths", f"those of {other}", fix)


def nested_as(values: Tensor, rows: Rows) -> Tensor:
    """Rows [T, E] as a nested tensor of the layout and lengths that others had."""
    if not isinstance(rows.lengths, tuple):
        return torch.nested.nested_tensor_from_jagged(values, rows.cu_seqlens)
    return torch.nested.as_nested_tensor(list(torch.split(values, list(rows.lengths))))
