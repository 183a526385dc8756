"""flash-attn's rotary position embedding: channel pairs turned by the angles of tables.

For pair i of a row at position p, with c = cos[p, i] and s = sin[p, i]::

    out1[i] = x1[i] * c - x2[i] * s
    out2[i] = x1[i] * s + x2[i] * c

where x1, x2 are the first and the second half of the first R = 2 * cos.shape[-1] channels, or,
interleaved, those with even and with odd numbers. Channels from R on are copied. The rotation is
computed in float32 (float64 for float64) and differentiable in x, cos and sin.

``RotaryEmbedding`` has tables that grow. Its attributes have the names that subclasses elsewhere
read (``_cos_cached``, ``inv_freq``, ...).

Source: Su et al., RoFormer (2021), equation 15; the signatures are those of flash-attn 2.8.3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.checks import FLOATING, INDICES, check_tensor, named
from tilewise.compat.flash_attn.arguments import check_rank
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.head_rows import turned_pairs
from tilewise.validation import check_cu_seqlens
from tilewise.variants.lower import statistics_dtype

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


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
        cu_seqlens: integer [B + 1] of a packed x, or None. Rows behind the last stay as they are.
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
    places, used = _places(x, seqlen_offsets, cu_seqlens), None
    if cu_seqlens is not None and not (cu_seqlens.is_cpu and int(cu_seqlens[-1]) == x.shape[0]):
        used = torch.arange(x.shape[0], device=x.device) < cu_seqlens[-1]
        places = places.where(used, 0)
    if places.is_cpu and places.numel():
        least, most = int(places.min()), int(places.max())
        if least < 0 or most >= cos.shape[0]:
            required = f"a row for each position, {least} to {most}"
            raise InvalidArgument("cos", f"{cos.shape[0]} rows", required)
    out = rotate_at(x, cos, -sin if conjugate else sin, places, interleaved)
    if used is not None:
        out = out.where(used[:, None, None], x)
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


class RotaryEmbedding(nn.Module):
    """Rotates the queries and keys of packed tensors [B, S, 3, H, D], in place.

    The angle of pair i at position p is p * base ** (-2 i / dim). With ``scale_base`` (XPos)
    queries are multiplied by, and keys divided by, for tables of S positions::

        ((2 i + 0.4 dim) / (1.4 dim)) ** ((p - S // 2) / scale_base)

    Tables are computed in float32 and kept in the dtype of what is rotated. The buffers are float32
    [dim / 2]: ``inv_freq``, and ``scale``, which is None without ``scale_base``.

    Args:
        dim: the channels that are rotated, even.
        base: of the wavelengths.
        interleaved: as in ``apply_rotary_emb``.
        scale_base: of XPos; None for none.
        device: of the buffers.

    Raises:
        InvalidArgument: an odd dim.

    Source: Su et al., RoFormer (2021), equation 15; Sun et al., A Length-Extrapolatable
    Transformer (2022), algorithm 1.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim % 2 or dim < 2:
            raise InvalidArgument("dim", str(dim), "an even number, 2 or more")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        pairs = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (pairs + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: [B, S, 3, H, D], or [B, S, Hq + 2 Hk, D] with num_heads_q; with kv: q [B, S, H, D].
            kv: [B, S, 2, H, D] or None.
            seqlen_offset: the position of the first row: one number, or integer [B], which needs
                max_seqlen unless the tables are long enough.
            max_seqlen: positions that the tables should have.
            num_heads_q: Hq.

        Returns:
            qkv; with kv the pair of q and kv.

        Raises:
            InvalidArgument, InvalidType: naming the argument that is wrong.
        """
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._tables()
        if kv is None:
            pairs = (cos, sin, cos_k, sin_k)
            return apply_rotary_emb_qkv_(qkv, *pairs, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, False, seqlen_offset)
        kv = apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
        return qkv.copy_(q), kv  # last: a mistake in kv leaves the queries as they were

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise InvalidArgument("max_seqlen", "None", "a number, with a tensor of seqlen_offset")
        if self._cos_k_cached is None or self._sin_k_cached is None:
            return cos, sin, cos, sin
        return cos, sin, self._cos_k_cached, self._sin_k_cached

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        pairs = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (pairs / self.dim)

    def _update_cos_sin_cache(
        self,
        seqlen: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make tables for so many positions, unless there are some that do."""
        held = self._cos_cached
        if (
            held is not None
            and seqlen <= self._seq_len_cached
            and (held.device, held.dtype) == (device, dtype)
            and not (self.training and held.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        # A module that was cast to a half type has frequencies that are too coarse.
        wide = self.inv_freq.dtype == torch.float32
        angles = torch.outer(positions, self.inv_freq if wide else self._compute_inv_freq(device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (positions - seqlen // 2) / self.scale_base
        scale = self.scale.to(angles) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of a packed tensor in place.

    Args:
        qkv: [B, S, 3, H, D], or [B, S, Hq + 2 Hk, D] with num_heads_q.
        cos: [positions, R/2], of the queries.
        sin: as cos.
        cos_k: of the keys, shaped as cos; cos if None.
        sin_k: of the keys, shaped as sin; sin if None.
        interleaved: as in ``apply_rotary_emb``.
        seqlen_offsets: as there.
        num_heads_q: Hq.

    Returns:
        qkv.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    if check_tensor("qkv", qkv, "a tensor [B, S, 3, H, D]").dim() == 5:
        if qkv.shape[2] != 3:
            raise InvalidArgument("qkv", f"shape {tuple(qkv.shape)}", "[B, S, 3, H, D]")
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        check_rank("qkv", qkv, "[B, S, Hq + 2 Hk, D]")
        heads = qkv.shape[2]
        if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            required = f"Hq, with {heads} = Hq + 2 Hk heads in qkv"
            raise InvalidArgument("num_heads_q", str(num_heads_q), required)
        kv_heads = (heads - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + kv_heads]
    pair = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    # Both before either is written: a mistake in the second leaves the first as it was.
    turned = [
        apply_rotary_emb(x, *tables, interleaved, False, seqlen_offsets)
        for x, tables in ((q, (cos, sin)), (k, pair))
    ]
    for x, rows in zip((q, k), turned, strict=True):
        x.copy_(rows)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the keys of kv, [B, S, 2, H, D], in place; the arguments of ``apply_rotary_emb``.

    Returns:
        kv.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    check_rank("kv", kv, "[B, S, 2, H, D]")
    if kv.shape[2] != 2:
        raise InvalidArgument("kv", f"shape {tuple(kv.shape)}", "[B, S, 2, H, D]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
