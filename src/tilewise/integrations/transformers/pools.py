"""The choice of pools of neighbouring tokens, which have one key each, without queries x keys.

**GLM-5.3**: a query may choose a pool once it sees its last token. The model's code asks a boolean
tensor [B, M, N] which tokens a query sees, and makes another one of what it chose. Here objects
answer, and the choice goes to the attention as a list.

**Qwen4**: the tokens that a query sees make blocks of a few neighbours each, without padding, and a
query chooses whole blocks. It reads the tokens of no whole block in any case. The model walks over
queries one by one, and makes the blocks of each anew. But under causal masks and padding a query
sees the first of those tokens that the last one sees, so all queries have the same blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import Unsupported
from tilewise.indexer import top_keys
from tilewise.integrations.transformers.latent import NAME
from tilewise.integrations.transformers.masks import Chosen, Pairs
from tilewise.integrations.transformers.unwritten import UNDO, Later, refuse_compiled
from tilewise.reference.blocks import Block
from tilewise.reference.programs import Cover, cover, visible
from tilewise.variants import masks
from tilewise.variants.lower import Extent, lower_mask

_ROWS, _KEYS = 128, 2048  # of a tile of the mask


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
    """Which tokens queries see: valid ones, bool [B, N], up to their position [M]."""

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


class _Prefixes(NamedTuple):
    """Tokens in an order in which every query sees the first ones."""

    order: Tensor  # int64 [B, N], tokens that some query sees, ascending; then the others
    counts: Tensor  # int64 [B, M], how many each query sees


@torch.no_grad()
def choose_tokens(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Pairs | Tensor,
    past_key_values: Any,
) -> Chosen:
    """Stand in for the forward of an indexer like that of Qwen4.

    The score of a block is the sum over heads of relu(q . k) / sqrt(D). Its key k is the mean of
    its tokens' keys, normalized, and rotated to the place of the first token.

    Returns:
        Tokens [B, M, budget + ratio - 1]: of the chosen blocks, and of no whole block.

    Raises:
        Unsupported: compiled code, a mask that adds numbers, or one under which a query does not
            see the first of the tokens that others see: packed sequences, or a window.
    """
    refuse_compiled()
    pairs = _as_pairs(attention_mask)
    rotate = type(indexer).forward.__globals__["apply_rotary_pos_emb"]
    batch, rows, _ = hidden_states.shape
    heads, width, ratio = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    cos, sin = position_embeddings  # of all tokens, not of these queries alone
    both = indexer.index_qk_proj(hidden_states)
    queries, keys = both.split([heads * width, both.shape[-1] - heads * width], -1)
    queries = indexer.q_layernorm(queries.reshape(batch, rows, heads, width))
    queries = rotate(queries, cos=cos[:, -rows:], sin=sin[:, -rows:], unsqueeze_dim=2)
    if past_key_values is not None:
        keys = past_key_values.update_indexer(keys, indexer.layer_idx)

    order, counts = _prefixes(pairs)
    item = torch.arange(batch, device=order.device)[:, None, None]
    whole = counts // ratio  # blocks that a query may choose from
    blocks = pairs.keys // ratio
    members = order[:, : blocks * ratio].view(batch, blocks, ratio)
    pooled = indexer.k_layernorm(keys[item, members].float().mean(2).to(keys.dtype))
    first = item[..., 0], members[..., 0]
    pooled = rotate(pooled[:, None], cos=cos[first], sin=sin[first])
    chosen = counts.new_empty((batch, rows, 0))
    if blocks:
        found = top_keys(
            queries.float().transpose(1, 2),
            pooled.float(),
            queries.new_ones(()).float().expand(batch, rows, heads),
            min(indexer.block_topk, blocks),
            mask=Later(torch.arange(blocks, device=order.device)[None], whole).others(batch),
        )
        assert isinstance(found, Tensor)
        found = found[:, 0]
        chosen = torch.where(found[..., None] < 0, -1, members[item, found]).flatten(2)
    tail = whole[..., None] * ratio + torch.arange(ratio - 1, device=order.device)
    rest = order.gather(1, tail.clamp(max=order.shape[1] - 1).flatten(1)).view(tail.shape)
    return Chosen(torch.cat((chosen, torch.where(tail < counts[..., None], rest, -1)), -1))


def _as_pairs(mask: Pairs | Tensor) -> Pairs:
    if isinstance(mask, Pairs):
        return mask
    if mask.dtype is not torch.bool:
        raise Unsupported("an indexer by tiles and a floating mask, which is added", fix=UNDO)
    batch, _, queries, keys = mask.shape
    return Pairs(masks.dense(mask), (batch, 1, queries, keys), keys, mask.device)


def _prefixes(pairs: Pairs) -> _Prefixes:
    """Walk over a mask tile by tile, once for all layers."""
    if pairs.prefixes is None:
        pairs.prefixes = _walked(pairs)
    found: _Prefixes = pairs.prefixes
    return found


def _walked(pairs: Pairs) -> _Prefixes:
    batch, _, rows, _ = pairs.shape
    device, total = torch.device(pairs.device), pairs.keys
    program = () if pairs.mask is None else pairs.mask.program
    given = () if pairs.mask is None else pairs.mask.captured
    extent = Extent(batch, 1, rows, total, check_values=device.type == "cpu")
    tensors = lower_mask(program, given, extent, device)
    counts = torch.zeros(batch, rows, dtype=torch.int64, device=device)
    last = torch.zeros_like(counts)  # behind the last token that a query sees
    some = torch.zeros(batch, total, dtype=torch.bool, device=device)
    for row in range(0, rows, _ROWS):
        for key in range(0, total, _KEYS):
            queries = range(row, min(row + _ROWS, rows))
            keys = range(key, min(key + _KEYS, total))
            block = Block(queries, keys, rows, total, range(batch), range(1))
            if cover(program, tensors, block) is Cover.EMPTY:
                continue
            seen = visible(program, tensors, block, device)[:, 0]
            behind = torch.arange(keys.start + 1, keys.stop + 1, device=device) * seen
            across, along = slice(row, queries.stop), slice(key, keys.stop)
            counts[:, across] += seen.sum(-1)
            last[:, across] = torch.maximum(last[:, across], behind.amax(-1))
            some[:, along] |= seen.any(1)
    # A query that sees as many as there are up to its last one sees them all.
    before = torch.nn.functional.pad(some.cumsum(-1), (1, 0))
    if not torch.equal(before.gather(1, last), counts):
        what = "an indexer by tiles where queries see other tokens than the first of some order"
        raise Unsupported(f"{what}, as in packed sequences and windows", fix=UNDO)
    return _Prefixes((~some).to(torch.int8).argsort(dim=-1, stable=True), counts)
