"""flash-attn's names for rotary position embedding.

``RotaryEmbedding`` has tables that grow. Its attributes have the names that subclasses elsewhere
read (``_cos_cached``, ``inv_freq``, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.checks import check_tensor
from tilewise.compat.flash_attn.arguments import check_rank
from tilewise.compat.flash_attn.layers.tables import (
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_torch,
)
from tilewise.errors import InvalidArgument

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


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
