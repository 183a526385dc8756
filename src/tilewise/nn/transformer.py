"""Torch's transformer layers with attention by ``tilewise.attention``."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tilewise.nn.multihead import MultiheadAttention

# The constructors are torch's own, whatever its version: ``wraps`` gives them its signature. The
# modules of attention that they make become ours by their class, and keep their state.


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """A drop-in for ``torch.nn.TransformerEncoderLayer``, in O(S) memory.

    It is a ``torch.nn.TransformerEncoderLayer`` whose ``self_attn`` is a
    ``tilewise.nn.MultiheadAttention``: the constructor, the parameters, their initial values for
    the same seed and the state dict are torch's own. It goes into ``torch.nn.TransformerEncoder``,
    with nested tensors (``enable_nested_tensor``) or without. Input and output are [S, B, E], with
    ``batch_first`` [B, S, E].

    It differs from torch's in these points:

    * Torch's fast path is not taken. In eval mode without gradients, that path computes the whole
      layer at once and writes the S x S matrix.
    * Hooks run in every mode.
    * Bool masks stay bool.
    * ``is_causal=True`` needs no mask.
    * Queries that see no key behave as in ``MultiheadAttention``.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html
    """

    @wraps(torch.nn.TransformerEncoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.__class__ = MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention over the sequence and a feed-forward network, both added to their input.

        Args:
            src: [S, B, E], with ``batch_first`` [B, S, E], unbatched [S, E], or nested [B, j, E].
            src_mask: ``attn_mask`` of ``MultiheadAttention``.
            src_key_padding_mask: its ``key_padding_mask``.
            is_causal: position m sees 0 to m, and ``src_mask``, if there is one, says just that.

        Returns:
            A tensor shaped as ``src``.

        Raises:
            InvalidArgument: as ``MultiheadAttention``.
        """
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            x = src + self._sa_block(self.norm1(src), *masks)
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + self._sa_block(src, *masks))
        out: Tensor = self.norm2(x + self._ff_block(x))
        return out


class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer):
    """A drop-in for ``torch.nn.TransformerDecoderLayer``, in O(S) memory.

    It is torch's layer, whose ``self_attn`` and ``multihead_attn`` are modules of
    ``tilewise.nn.MultiheadAttention``; ``tgt_is_causal=True`` needs no mask. ``forward`` is
    torch's: tgt and the output are [T, B, E] and memory is [S, B, E], with ``batch_first``
    [B, T, E] and [B, S, E].

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerDecoderLayer.html
    """

    @wraps(torch.nn.TransformerDecoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.__class__ = MultiheadAttention
        self.multihead_attn.__class__ = MultiheadAttention
