"""flash-attn's padding: rows of padded batches packed one after the other, and back.

All of it is differentiable in the rows. Indices count rows of the flattened [B * S].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.checks import INDICES, check_tensor
from tilewise.errors import InvalidArgument

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows ``input[indices]``: input [rows, ...], indices integer [n] -> [n, ...].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_rows("input", input)
    _check_indices(indices)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ...] with ``values`` [n, ...] in the rows ``indices`` [n], 0 elsewhere.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_rows("values", values)
    _check_indices(indices)
    whole = values.new_zeros(first_axis_dim, *values.shape[1:])
    return whole.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``index_first_axis``, [n, ...], and the input [rows, ...] itself; both gradients add up."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the rows of a padded batch that masks keep, packed.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: bool or integer [B, S]: 1 for a row that counts.
        unused_mask: bool or integer [B, S]: 1 for a row that is kept and not counted; or None.

    Returns:
        the rows [T, ...] that one of the masks has; their indices, int64 [T]; cu_seqlens, int32
        [B + 1]; the largest number of rows of a batch item; how many rows of each item
        attention_mask has, int32 [B].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """``unpad_input`` of rows that hold several sequences each.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: integer [B, S]: the lengths of the sequences of each batch item,
            which lie one after the other from its first row on, and zeros.

    Returns:
        the rows [T, ...]; their indices, int64 [T]; cu_seqlens of the sequences, int32; the length
        of the longest.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    filled = attention_mask_in_length.sum(dim=-1, keepdim=True)
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    flat = attention_mask_in_length.flatten()
    return _packed(hidden_states, places < filled, flat[flat != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows back in a padded batch, 0 in what is padding.

    Args:
        hidden_states: [T, ...].
        indices: integer [T], as ``unpad_input`` gives them.
        batch: B, batch items.
        seqlen: S, places of a row of the batch.

    Returns:
        [B, S, ...].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    whole = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return whole.view(batch, seqlen, *whole.shape[1:])


def _packed(rows: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(rows.flatten(0, 1), indices), indices, cu_seqlens, longest


def _check_rows(name: str, tensor: Tensor) -> None:
    if check_tensor(name, tensor, "a tensor [rows, ...]").dim() < 2:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", "[rows, ...], rank 2 or more")


def _check_indices(indices: object) -> None:
    check_tensor("indices", indices, "an int32 or int64 tensor [rows]", INDICES, dims=1)


def _check_mask(name: str, mask: Tensor, rows: Tensor) -> None:
    mask = check_tensor(name, mask, "a tensor [B, S]")
    if tuple(mask.shape) != tuple(rows.shape[:2]):
        required = f"hidden_states' first two sizes, {tuple(rows.shape[:2])}"
        raise InvalidArgument(name, f"shape {tuple(mask.shape)}", required)
    if mask.dtype.is_floating_point:
        raise InvalidArgument(name, f"a tensor of {mask.dtype}", "bool or integers")
