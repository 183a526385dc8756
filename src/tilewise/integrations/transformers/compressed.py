"""Compressed keys of DeepSeek-V4, beside those of a window, without queries x keys.

A layer appends compressed keys to those of its window, and a mask of them to the mask of the
window. Here its compressor makes no mask. It notes a list of what its indexer chose, or the mask as
an expression, and the attention function takes the note: it attends to both kinds of keys, each
with a mask of its own, and merges the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.errors import Unsupported
from tilewise.integrations.transformers.unwritten import UNDO, Later, choose_keys, refuse_compiled
from tilewise.variants.values import Mask

CHOSEN, COMPRESSED = "tilewise_chosen", "tilewise_compressed"  # notes, attributes of modules


class Compressed(NamedTuple):
    """What queries see of the compressed keys, which lie behind the others."""

    size: int  # T, how many keys these are
    mask: Mask | None  # over queries and these keys; None for every pair
    # [B, M, K], the keys that an indexer chose, from 0 on, -1 for none; None for all.
    chosen: Tensor | None


def choose_entries(indexer: Any, *given: Any, **named: Any) -> Tensor:
    """Stand in for the forward of the indexer, and note its choice for the compressor."""
    chosen: Tensor = choose_keys(indexer, *given, **named)
    setattr(indexer, CHOSEN, chosen)
    return chosen


def compress_sparsely(compressor: Any, *given: Any) -> tuple[Tensor, _Unneeded]:
    """Stand in for the forward of the compressor with an indexer (CSA)."""
    refuse_compiled()
    with _WithoutMask(compressor.indexer):
        keys: Tensor = type(compressor).forward(compressor, *given)[0]
    chosen = vars(compressor.indexer).pop(CHOSEN)
    setattr(compressor, COMPRESSED, Compressed(keys.shape[2], None, chosen))
    return keys, _Unneeded()


def compress_heavily(
    compressor: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, *given: Any
) -> tuple[Tensor, _Unneeded]:
    """Stand in for the forward of the compressor without one (HCA)."""
    refuse_compiled()
    # It reads positions for the mask alone, and makes none for a single one.
    some = hidden_states, q_residual, position_ids[:, :1]
    keys: Tensor = type(compressor).forward(compressor, *some, *given)[0]
    mask, count = None, keys.shape[2]
    if position_ids.shape[1] > 1:
        places = torch.arange(count, device=keys.device)[None]
        mask = Later(places, (position_ids + 1) // compressor.compress_rate).others(len(keys))
    setattr(compressor, COMPRESSED, Compressed(count, mask, None))
    return keys, _Unneeded()


def compressed_of(layer: Any) -> Compressed | None:
    """Take the note of a layer's compressor; None where there is none."""
    compressor = getattr(layer, "compressor", None)
    return None if compressor is None else vars(compressor).pop(COMPRESSED, None)


class _WithoutMask(TorchFunctionMode):
    """Gives an object in the place of the tensor that a compressor fills once its indexer chose."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.indexer = indexer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.new_full and CHOSEN in vars(self.indexer):
            return _Unneeded()
        return func(*args, **(kwargs or {}))


class _Unneeded:
    """The mask of compressed keys that nobody has written."""

    def scatter_(self, *_: Any) -> _Unneeded:
        return self

    def __getitem__(self, _: Any) -> _Unneeded:
        return self

    def to(self, _: Any) -> Tensor:
        """Refuse to be appended to a mask that is a tensor."""
        raise Unsupported("compressed keys by tiles, and a mask that is a tensor", fix=UNDO)
