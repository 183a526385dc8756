"""xformers' attention biases: objects that say which keys a row sees, instead of a tensor.

The names, fields and makers are those of ``xformers.ops.fmha.attn_bias``; what a class means is in
``reading``. "Bottom right" counts from the last row and key, else both count from the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor, check_whole
from tilewise.compat.xformers.reading import (
    NAMES,
    Keys,
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
    moved,
    read,
)
from tilewise.errors import InvalidArgument

__all__ = ["VARLEN_BIASES", "AttentionBias", *NAMES]


class AttentionBias:
    """The base of all biases."""

    def __post_init__(self) -> None:
        for name, least in (("window_left", 0), ("window_right", 0), ("_window_size", 1)):
            if hasattr(self, name):
                check_whole(name.removeprefix("_"), getattr(self, name), least)

    def to(self, device: Any) -> Self:
        """Return the same bias with its tensors on a device."""
        if not is_dataclass(self):
            return self
        own = {x.name: moved(getattr(self, x.name), device) for x in fields(self)}
        return type(self)(**own)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """Return the bias as a tensor: 0 where a row sees a key, else -inf. To inspect and to test.

        Args:
            shape: [..., queries, keys].
            dtype: of the result.
            device: of the result.

        Returns:
            [..., queries, keys].

        Raises:
            InvalidArgument: the bias is for other numbers of queries or keys.
        """
        queries, keys = shape[-2:]
        said = read(self)
        seen = torch.zeros(queries, keys, dtype=torch.bool)
        if said.starts_q is None:
            seen = said.band.pairs(queries, keys)
        else:
            last = said.starts_k if said.keys is None else None
            _check_size("queries", queries, int(said.starts_q[-1]))
            if last is not None:
                _check_size("keys", keys, int(last[-1]))
            where = said.keys or _side_by_side(said.starts_k)
            found = torch.split(where.rows().cpu(), where.lengths.tolist())
            for rows, at in zip(self.q_seqinfo.intervals(), found, strict=True):
                if at.numel() and int(at.max()) >= keys:
                    raise InvalidArgument("shape", f"{keys} keys", f"more than {int(at.max())}")
                seen[rows[0] : rows[1], at] = said.band.pairs(rows[1] - rows[0], at.shape[0])
        bias = torch.zeros(queries, keys, dtype=dtype).masked_fill(~seen, -torch.inf).to(device)
        bias = bias.expand(*shape)
        return bias if said.added is None else bias + said.added.to(device)

    q_seqinfo: _SeqLenInfo


def _check_size(what: str, came: int, due: int) -> None:
    if came != due:
        raise InvalidArgument("shape", f"{came} {what}", f"{due}: the bias is for so many")


def _side_by_side(starts: Tensor | None) -> Keys:
    assert starts is not None
    lengths = starts.diff()
    return Keys(starts[:-1], lengths, int(starts[-1]), int(lengths.max()))


class LowerTriangularMask(AttentionBias):
    """Causal, from the first row and key on: row m sees the keys n <= m."""

    def __init__(self, device: Any = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Return the same mask with a floating bias [B, H, M, N] that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """``LowerTriangularMask``, and a floating tensor [B, H, M, N] that is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = check_tensor("bias", bias, "a floating tensor [B, H, M, N]", FLOATING)

    def to(self, device: Any) -> Self:
        """Return the same bias with its tensor on a device."""
        return type(self)(self._bias.to(device))


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window, bottom right: window_left keys before a row's own one to window_right after it."""

    window_left: int
    window_right: int


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal, bottom right: the last row sees all keys."""

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Return the mask of the last ``window_size`` of these keys."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal, bottom right, and of those keys the last ``_window_size``."""

    _window_size: int


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Sequences of different lengths in a batch of one: rows see the keys of their own.

    Args:
        q_seqinfo: the rows of each sequence.
        k_seqinfo: its keys.
        _batch_sizes: how many sequences each tensor of a list had.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        """Return the mask of sequences of these lengths; kv_seqlen is q_seqlen if None.

        Raises:
            InvalidArgument: they are not as many.
        """
        rows = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(rows, rows)
        _check_count(q_seqlen, kv_seqlen)
        return cls(rows, _SeqLenInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """Return the mask of tensors [B_i, M_i, ...], and the tensors in one, [1, rows, ...]."""
        made = cls.from_seqlens(_lengths(tensors), device=tensors[0].device)
        made._batch_sizes = [x.shape[0] for x in tensors]
        return made, _packed(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """Return the mask of lists of queries and keys, and each list in one tensor.

        Args:
            tensors_q: [B_i, M_i, ...].
            tensors_k: [B_i, N_i, ...].
            tensors_v: [B_i, N_i, ...], or None.

        Returns:
            the mask; the queries [1, rows, ...]; the keys and the values [1, keys, ...].

        Raises:
            InvalidArgument: keys or values are of other sequences than the queries.
        """
        sizes = [x.shape[0] for x in tensors_q]
        if sizes != [x.shape[0] for x in tensors_k]:
            raise InvalidArgument("tensors_k", "other batch sizes", f"{sizes}, as of tensors_q")
        lengths = _lengths(tensors_k)
        if tensors_v is not None and _lengths(tensors_v) != lengths:
            raise InvalidArgument("tensors_v", "other lengths", f"{lengths}, as of tensors_k")
        made = cls.from_seqlens(_lengths(tensors_q), lengths, device=tensors_q[0].device)
        made._batch_sizes = sizes
        values = None if tensors_v is None else _packed(tensors_v)
        return made, _packed(tensors_q), _packed(tensors_k), values

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return packed queries, a tensor [1, rows, ...], as the list of [B_i, M_i, ...]."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return packed keys, a tensor [1, keys, ...], as the list of [B_i, N_i, ...]."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Undo ``from_tensor_list``: [1, rows, ...] becomes the list of [B_i, M_i, ...].

        Raises:
            InvalidArgument: queries and keys have different lengths.
        """
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            fix = "Call split_queries or split_kv."
            raise InvalidArgument(
                "tensor", "one of two that differ", "queries as long as keys", fix
            )
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Return the same sequences, causal from their first row and key on."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Return the same sequences, causal from their last row and key on."""
        made = BlockDiagonalCausalFromBottomRightMask
        return made(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Return ``make_causal`` with the last ``window_size`` keys alone."""
        made = BlockDiagonalCausalLocalAttentionMask
        return made(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Return ``make_causal_from_bottomright`` with the last ``window_size`` keys alone."""
        made = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return made(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """``BlockDiagonalMask``, causal from the first row and key of each sequence on."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """``BlockDiagonalMask``, causal from the last row and key of each sequence on."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """``BlockDiagonalCausalMask``, and of those keys the last ``_window_size``."""

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """``BlockDiagonalCausalFromBottomRightMask``, and of those keys the last ``_window_size``."""

    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """``BlockDiagonalMask`` of a cache: each sequence has room for ``kv_padding`` keys.

    Args:
        q_seqinfo: the rows of each sequence, one after the other.
        k_seqinfo: its keys, which may hold anything behind those in use.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> Self:
        """Return the mask of sequences with so many keys in use; causal_diagonal is of no effect.

        Raises:
            InvalidArgument: they are not as many, or one has no room.
        """
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        paged_type: type[PagedBlockDiagonalPaddedKeysMask],
    ) -> PagedBlockDiagonalPaddedKeysMask:
        """Return the mask of the same keys in pages; block_tables is integer [sequences, P]."""
        info, room = self.k_seqinfo, block_tables.shape[1] * page_size
        keys = _PaddedSeqLenInfo(**{**vars(info), "padding": room})
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """Return the same sequences with a window, bottom right."""
        made = BlockDiagonalLocalAttentionPaddedKeysMask
        return made(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """``BlockDiagonalPaddedKeysMask``, causal from the last row and key in use on."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """``BlockDiagonalPaddedKeysMask`` with a window, bottom right."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> Self:
        """Return the mask of sequences with so many keys in use."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """``BlockDiagonalCausalWithOffsetPaddedKeysMask``, and the last ``_window_size`` keys."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        """Return the mask of sequences with so many keys in use."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """``BlockDiagonalPaddedKeysMask`` of keys in pages: [1, pages * page_size, H, K].

    Args:
        q_seqinfo: the rows of each sequence, one after the other.
        k_seqinfo: its keys in use.
        block_tables: integer [sequences, P]: its pages.
        page_size: keys in a page.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """Return the mask of sequences with so many keys in pages block_tables [sequences, P]."""
        device = block_tables.device if device is None else device
        parts = _padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device)
        return cls(*parts, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """``PagedBlockDiagonalPaddedKeysMask``, causal from the last row and key in use on.

    Its ``block_tables`` are integer [sequences, P] too.
    """


@dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    """``BlockDiagonalMask`` whose keys lie anywhere: from a start on, so many.

    Args:
        q_seqinfo: the rows of each sequence, one after the other.
        k_seqinfo: its keys.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Any = None,
    ) -> Self:
        """Return the mask of sequences with these keys; kv_seqstarts ends with the number of all.

        Raises:
            InvalidArgument: they are not as many.
        """
        _check_count(q_seqlen, kv_seqlen)
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), keys)

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedBlockDiagonalGappyKeysMask],
    ) -> PagedBlockDiagonalGappyKeysMask:
        """Return the mask of the same keys in pages, where each sequence had so much room.

        ``block_tables`` is integer [sequences, P].

        Raises:
            InvalidArgument: that is no whole number of pages, or a start is not in its room.
        """
        info, room = self.k_seqinfo, block_tables.shape[1] * page_size
        if notional_padding % page_size:
            required = f"a multiple of page_size, {page_size}"
            raise InvalidArgument("notional_padding", str(notional_padding), required)
        starts = [at - i * notional_padding for i, at in enumerate(info.seqstart_py[:-1])]
        if any(not 0 <= start < room for start in starts) or info.max_seqlen > room:
            required = f"starts within {room} keys of each sequence, and no more keys"
            raise InvalidArgument("block_tables", f"{block_tables.shape[1]} pages", required)
        count = info.seqlen.shape[0] + 1
        first = torch.arange(count, dtype=torch.int32, device=info.seqstart.device)
        placed = info.seqstart - notional_padding * first
        ends = [start + x for start, x in zip(starts, info.seqlen_py, strict=True)]
        keys = _GappySeqInfo(
            placed, info.max_seqlen, info.min_seqlen, [*starts, -1], info.seqlen + placed[:-1], ends
        )
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """``BlockDiagonalGappyKeysMask``, causal from the last row and key of each sequence on."""


@dataclass
class PagedBlockDiagonalGappyKeysMask(AttentionBias):
    """``BlockDiagonalGappyKeysMask`` of keys in pages; starts count within a sequence's pages.

    Args:
        q_seqinfo: the rows of each sequence, one after the other.
        k_seqinfo: its keys.
        block_tables: integer [sequences, P]: its pages.
        page_size: keys in a page.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Any = None,
    ) -> Self:
        """Return the mask of sequences with these keys in pages block_tables [sequences, P].

        Raises:
            InvalidArgument: they are not as many.
        """
        _check_count(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), keys, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """``PagedBlockDiagonalGappyKeysMask``, causal from the last row and key of each on.

    Its ``block_tables`` are integer [sequences, P] too.
    """


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)


def _check_count(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        required = f"{len(q_seqlen)}, as many as q_seqlen"
        raise InvalidArgument("kv_seqlen", f"{len(kv_seqlen)} lengths", required)


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Any
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    _check_count(q_seqlen, kv_seqlen)
    keys = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
    return _SeqLenInfo.from_seqlens(q_seqlen, device=device), keys


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)
