"""Keys and values of a batch whose sequences have one length, in one piece."""

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.functional import attention
from tilewise.serving.pool import check_rows, room
from tilewise.serving.sequences import size_of
from tilewise.variants.masks import causal


class KVCache:
    """Room for ``capacity`` keys and values of each of B sequences that grow together.

    The cache copies and detaches appended keys and values: it passes no gradients.

    Args:
        batch: B, batch items.
        kv_heads: Hk.
        head_dim: D, the width of a head.
        capacity: how many keys a sequence may have.
        value_dim: Dv; D if None.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        batch, kv_heads = size_of("batch", batch), size_of("kv_heads", kv_heads)
        head_dim = size_of("head_dim", head_dim)
        width = head_dim if value_dim is None else size_of("value_dim", value_dim)
        self.capacity = size_of("capacity", capacity)
        sizes = (batch, kv_heads, self.capacity)
        self._k = room((*sizes, head_dim), dtype, device)
        self._v = room((*sizes, width), dtype, device)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def keys(self) -> Tensor:
        """[B, Hk, length, D], a view."""
        return self._k[:, :, : self._length]

    @property
    def values(self) -> Tensor:
        """[B, Hk, length, Dv], a view."""
        return self._v[:, :, : self._length]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Put M keys and values behind those that are there.

        Args:
            k: [B, Hk, M, D].
            v: [B, Hk, M, Dv].

        Raises:
            InvalidArgument, InvalidType: they are not of these sizes, or there is no room for them.
        """
        batch, heads, _, _ = self._k.shape
        more = check_rows(k, v, self._k, self._v, (batch, heads), 2)
        end = self._length + more
        if end > self.capacity:
            came = f"{more} keys behind {self._length}"
            raise InvalidArgument("k", came, f"no more than the capacity of {self.capacity} in all")
        with torch.no_grad():
            self._k[:, :, self._length : end] = k
            self._v[:, :, self._length : end] = v
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the keys from ``length`` on.

        Raises:
            InvalidArgument: there are not as many.
        """
        length = size_of("length", length, 0)
        if length > self._length:
            raise InvalidArgument("length", str(length), f"in [0, {self._length}]")
        self._length = length

    def attend(self, q: Tensor, **keywords: Any) -> Any:
        """Compute attention of q [B, Hq, M, D] over all keys; the last query sees the last key.

        Append the keys of these queries first. A prompt may be appended and attended in pieces. The
        result is equal except for rounding, and on the CPU often to the bit. There a row's bits
        follow from three things:

        * its own keys;
        * where these are cut into blocks: at every multiple of 128, but a rest of fewer than 64 at
          the end joins the block before it;
        * whether its sequence has more than 8 queries in the call or wants gradients: up to 8
          without have another kernel.

        So

        * pieces of more than 8 queries that end at multiples of 64 have the bits of one piece;
        * pieces of more than 8 queries that end elsewhere have them in all rows but the last
          (length % 128), where these are < 64;
        * up to 8 queries have the bits of as many calls of one, where the blocks of both are cut
          alike. This holds up to 16k keys; beyond, the kernel's splits grow with the number of
          keys;
        * a sequence has the bits that it has alone, whatever else is in the batch.

        Args:
            q: [B, Hq, M, D].
            keywords: those of ``tilewise.attention``; ``mask`` is ``masks.causal()`` if left out.
        """
        return attention(q, self.keys, self.values, **{"mask": causal(), **keywords})
