"""Keys and values that ``Attention`` keeps from call to call, in the caches of tilewise.serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.nn.implementations import Ask, Implementation, implementation_of
from tilewise.serving.contiguous import KVCache
from tilewise.serving.paged import PagedKVCache
from tilewise.variants.masks import causal

_TOP_LEFT = causal("top_left").program


Cache: TypeAlias = KVCache | PagedKVCache


class Past:
    """What a cache has of the sequences of a call, before that call.

    Args:
        cache: of the layer.
        sequences: the B numbers of a ``PagedKVCache``; None for a ``KVCache``.
        x: what the layer is called with, [B, M, width].
    """

    def __init__(self, cache: Cache, sequences: Sequence[int] | None, x: Tensor) -> None:
        self._cache = cache
        self._sequences = sequences
        if isinstance(cache, PagedKVCache):
            if sequences is None or len(sequences) != x.shape[0]:
                came = "None" if sequences is None else f"{len(sequences)} of them"
                required = f"the numbers of the {x.shape[0]} sequences in x, for a cache of pages"
                raise InvalidArgument("sequences", came, required)
        elif not isinstance(cache, KVCache):
            required = "a KVCache or PagedKVCache of tilewise.serving"
            raise InvalidType("cache", f"a {type(cache).__name__}", required)
        elif sequences is not None:
            raise InvalidArgument("sequences", "numbers", "None: this cache has no pages")

    def positions(self, x: Tensor) -> Tensor:
        """Return the positions of the rows of ``x``, after the cached ones: [M] or [B, M]."""
        rows = torch.arange(x.shape[1], device=x.device)
        if isinstance(self._cache, KVCache):
            return rows + len(self._cache)
        lengths = [self._cache.length(sequence) for sequence in self._sequences or ()]
        return rows + torch.tensor(lengths, device=x.device)[:, None]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ask: Ask, implementation: Implementation
    ) -> Tensor:
        """Append keys and values, and attend to all that there are then.

        Raises:
            InvalidArgument: gradients or dropout are wanted, or a mask that counts from the left.
            Unsupported: pages with another implementation than "tilewise".
        """
        if q.requires_grad or k.requires_grad or v.requires_grad:
            fix = "Call it in torch.no_grad() or torch.inference_mode()."
            required = "one without: what is kept is detached"
            raise InvalidArgument("cache", "a call that wants gradients", required, fix)
        if ask.dropout_p:
            raise InvalidArgument("cache", "a call with dropout", "eval mode: module.eval()")
        if ask.mask is not None and ask.mask.program == _TOP_LEFT:
            required = "masks.causal(): with a cache the rows of a call are the last ones"
            raise InvalidArgument("mask", 'causal("top_left")', required)
        if isinstance(self._cache, KVCache):
            self._cache.append(k, v)
            return implementation_of(implementation)(q, self._cache.keys, self._cache.values, ask)
        if implementation != "tilewise":
            fix = "use implementation='tilewise', or a KVCache"
            raise Unsupported(f"implementation {implementation!r} with a cache of pages", fix=fix)
        sequences = self._sequences or ()
        self._cache.append(sequences, k, v)
        mask, score, scale, sinks, _ = ask
        out: Tensor = self._cache.attend(
            sequences, q, mask=mask, score=score, scale=scale, sinks=sinks
        )
        return out
