"""flash-attn's rotary position embedding: channel pairs turned by the angles of tables.

For pair i of a row at position p, with c = cos[p, i] and s = sin[p, i]::

    out1[i] = x1[i] * c - x2[i] * s
    out2[i] = x1[i] * s + x2[i] * c

where x1, x2 are the first and the second half of the first R = 2 * cos.shape[-1] channels, or,
interleaved, those with even and with odd numbers. Channels from R on are copied. The rotation is
computed in float32 (float64 for float64) and differentiable in x, cos and sin.

Source: Su et al., RoFormer (2021), equation 15; the signatures are those of flash-attn 2.8.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.checks import FLOATING, INDICES, check_tensor, named
from tilewise.compat.flash_attn.arguments import check_rank
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.head_rows import turned_pairs
from tilewise.validation import check_cu_seqlens
from tilewise.variants.lower import statistics_dtype


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R channels of each head by its row's position.

    Args:
        x: [B, S, H, D], or packed [T, H, D] with cu_seqlens.
        cos: [positions, R/2], R even and at most D.
        sin: as cos.
        interleaved: pairs are channels 0 and 1, 2 and 3, ...; else 0 and R/2, 1 and R/2 + 1, ...
        inplace: write the result into x.
        seqlen_offsets: the position of each sequence's first row: one number, or integer [B].
        cu_seqlens: integer [B + 1] of a packed x, or None.
        max_seqlen: not looked at.

    Returns:
        The shape and dtype of x; x itself if inplace.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong; positions that the tables
            do not have are found where tensors are on the CPU.
    """
    return apply_rotary(
        x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace, conjugate=False
    )


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """``apply_rotary_emb`` (flash_attn.ops.triton.rotary), with ``conjugate`` the rotation back.

    x is [B, S, H, D], or packed [T, H, D] with cu_seqlens; cos and sin are [positions, R/2].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    shape = "[B, S, H, D]" if cu_seqlens is None else "[T, H, D]"
    check_rank("x", x, shape)
    check_tensor("x", x, f"a floating tensor {shape}", FLOATING)
    if cu_seqlens is not None:
        _check_starts(cu_seqlens, x.shape[0])
    check_tables(("cos", "sin"), (cos, sin), x.shape[-1])
    places = _places(x, seqlen_offsets, cu_seqlens)
    if places.is_cpu and places.numel():
        least, most = int(places.min()), int(places.max())
        if least < 0 or most >= cos.shape[0]:
            required = f"a row for each position, {least} to {most}"
            raise InvalidArgument("cos", f"{cos.shape[0]} rows", required)
    out = rotate_at(x, cos, -sin if conjugate else sin, places, interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """``apply_rotary_emb`` from position 0, or with tables [B, S, R/2] of each row's own.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    check_rank("x", x, "[B, S, H, D]")
    return _rotate(x, cos[..., : x.shape[1], None, :], sin[..., : x.shape[1], None, :], interleaved)


def check_tables(names: tuple[str, str], tables: tuple[Tensor, Tensor], width: int) -> None:
    """Tables are floating [positions, R/2] with R up to the heads' width.

    Raises:
        InvalidArgument, InvalidType: naming the one that is not.
    """
    required = f"a floating tensor [positions, R/2], R at most {width}"
    for name, table in zip(names, tables, strict=True):
        check_tensor(name, table, required, FLOATING, dims=2)
        if 2 * table.shape[-1] > width:
            raise InvalidArgument(name, f"shape {tuple(table.shape)}", required)
    if tables[0].shape != tables[1].shape:
        shape = tuple(tables[0].shape)
        raise InvalidArgument(names[1], f"shape {tuple(tables[1].shape)}", f"{names[0]}'s, {shape}")


def rotate_at(
    x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool = False
) -> Tensor:
    """Rows of x, [..., S, H, D], rotated at the positions places, [..., S]."""
    return _rotate(x, cos[places][..., None, :], sin[places][..., None, :], interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = statistics_dtype(x.dtype)
    return turned_pairs(x, cos.to(wide), sin.to(wide), interleaved)


def _check_starts(cu_seqlens: Tensor, rows: int) -> None:
    """They are integers, and on the CPU from 0 on, never falling; rows behind the last may be."""
    required = "an int32 or int64 tensor [B + 1]"
    check_tensor("cu_seqlens", cu_seqlens, required, INDICES, dims=1)
    if cu_seqlens.shape[0] == 0:
        raise InvalidArgument("cu_seqlens", "no entry", required)
    if cu_seqlens.is_cpu:
        check_cu_seqlens("cu_seqlens", cu_seqlens, min(int(cu_seqlens[-1]), rows))


def _places(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the position of each row: [S], [B, S] or packed [T]."""
    if isinstance(seqlen_offsets, bool) or not isinstance(seqlen_offsets, (int, Tensor)):
        required = "an integer or an integer tensor [B]"
        raise InvalidType("seqlen_offsets", named(seqlen_offsets), required)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, Tensor) and (
        seqlen_offsets.dtype.is_floating_point or tuple(seqlen_offsets.shape) != (batch,)
    ):
        came = f"a tensor of {seqlen_offsets.dtype}, shape {tuple(seqlen_offsets.shape)}"
        raise InvalidArgument("seqlen_offsets", came, f"an integer tensor [{batch}]")
    sequence, number = numbered(x, cu_seqlens)
    if isinstance(seqlen_offsets, Tensor):
        return number + seqlen_offsets.long()[sequence]
    return number + seqlen_offsets


def numbered(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row of x, and the row's number in it.

    Args:
        x: [B, S, ...], or packed [T, ...] with cu_seqlens.
        cu_seqlens: integer [B + 1], or None.

    Returns:
        int64 [B, 1] and [S], or [T] and [T].
    """
    if cu_seqlens is None:
        sequences = torch.arange(x.shape[0], device=x.device)
        return sequences[:, None], torch.arange(x.shape[1], device=x.device)
    starts = cu_seqlens.long()
    rows = torch.arange(x.shape[0], device=x.device)
    last = max(cu_seqlens.shape[0] - 2, 0)
    sequence = torch.searchsorted(starts[1:], rows, right=True).clamp(max=last)
    return sequence, rows - starts[sequence]
