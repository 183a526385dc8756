"""The choice of pools of keys, as by GLM-5.3's indexer, without queries x keys.

A pool is a few neighbouring tokens with one key. A query may choose it once it sees its last token.
The model's code asks a boolean tensor [B, M, N] which tokens a query sees, and makes another one of
what it chose. Here objects answer, and the choice goes to the attention as a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.integrations.transformers.latent import NAME
from tilewise.integrations.transformers.masks import Pairs
from tilewise.integrations.transformers.unwritten import Later


def visible_tokens(
    _: Any, valid_keys: Tensor, q_length: int, current_length: int | Tensor
) -> _Visible:
    """Stand in for ``get_visible_tokens``: the last queries see valid keys up to their own."""
    rows = torch.arange(q_length, device=valid_keys.device)
    return _Visible(valid_keys, current_length - q_length + rows)


def mask_of_choice(
    layer: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int
) -> Pairs | Tensor:
    """Stand in for ``build_attention_mask_from_topk``: hand over the list itself."""
    if layer.config._attn_implementation != NAME:
        given = {"query_states": query_states, "kv_length": kv_length}
        written: Tensor = type(layer).build_attention_mask_from_topk(layer, topk_indices, **given)
        return written
    batch, queries, _ = topk_indices.shape
    shape = batch, 1, queries, kv_length
    return Pairs(None, shape, kv_length, topk_indices.device, topk_indices)


class _Visible:
    """Which tokens queries see: valid ones up to their position.

    Args:
        valid: bool [B, N].
        positions: [M].
    """

    def __init__(self, valid: Tensor, positions: Tensor) -> None:
        self.valid, self.positions = valid, positions
        self.shape, self.device = (len(valid), len(positions), valid.shape[1]), valid.device

    def long(self) -> _Visible:
        return self

    def sum(self, dim: int) -> Tensor:
        """Return how many a query sees, [B, M]."""
        assert dim == -1
        return self.valid.cumsum(-1)[:, self.positions]

    def gather(self, dim: int, index: Tensor) -> _Asked:
        """Return an object that says it of the tokens [B, M, W]."""
        assert dim == -1
        return _Asked(self, index)


class _Asked:
    """Whether queries see tokens [B, M, W].

    For pools these are the same tokens for all queries, too many to be written.
    """

    def __init__(self, visible: _Visible, index: Tensor) -> None:
        self.visible, self.index = visible, index

    def __and__(self, complete: Tensor) -> _Candidates:
        """Return which pools are candidates, of those [B, 1, P] that are complete."""
        never = self.visible.shape[-1]
        ends = torch.where(complete[:, 0], self.index[:, 0], never)
        return _Candidates(Later(ends, self.visible.positions[None] + 1))

    def __rand__(self, which: Tensor) -> Tensor:
        """Write out which of few tokens a query sees."""
        tokens = self.index
        seen = self.visible.valid[:, None].expand(*tokens.shape[:2], -1).gather(-1, tokens)
        return which & seen & (tokens <= self.visible.positions[:, None])


class _Candidates:
    """Pools that queries may choose: those that are not later."""

    def __init__(self, later: Later) -> None:
        self.later = later

    def __invert__(self) -> Later:
        return self.later

    def gather(self, dim: int, selected: Tensor) -> Tensor:
        """Return whether what was selected is a candidate, [B, M, K]: -1 stands for none."""
        assert dim == -1
        return selected >= 0
