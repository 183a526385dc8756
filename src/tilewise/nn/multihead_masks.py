"""The masks of ``torch.nn.MultiheadAttention`` as masks and scores of ``tilewise.attention``.

Letters: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.checks import check_tensor
from tilewise.errors import InvalidArgument
from tilewise.variants import masks, scores
from tilewise.variants.values import Mask, Score, as_score

# Torch's bool masks name the pairs that do not attend.
_HIDDEN = (~masks.dense(torch.zeros(1, dtype=torch.bool))).program
_CAUSAL = masks.causal("top_left")
_KIND = "bool (True: does not attend) or a floating tensor, which is added to the scores"


class Sizes(NamedTuple):
    """The sizes of a call; ``added`` keys come behind its S own."""

    batch: int
    heads: int
    queries: int
    keys: int
    added: int


class Masks(NamedTuple):
    """What hides pairs, and what is added to scores."""

    mask: Mask | None
    score: Score | None


def check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    module: torch.nn.MultiheadAttention,
) -> Sizes:
    """The sizes of a call."""
    batched = query.dim() == 3
    form = "[S, E]"
    if batched:
        form = "[B, S, E]" if module.batch_first else "[S, B, E]"
    widths = (module.embed_dim, module.kdim, module.vdim)
    named = (("query", query), ("key", key), ("value", value))
    for (name, x), width in zip(named, widths, strict=True):
        if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
            required = f"{form} with {width} features"
            if x is not query:
                required += ", of as many dimensions as query has"
            raise InvalidArgument(name, f"shape {list(x.shape)}", required)
    if key.shape[:-1] != value.shape[:-1]:
        required = f"that of key but for the features, {list(key.shape[:-1])}"
        raise InvalidArgument("value", f"shape {list(value.shape)}", required)
    at = 1 if batched and module.batch_first else 0  # of the sequence; the batch is the other one
    batch = query.shape[1 - at] if batched else 1
    if batched and key.shape[1 - at] != batch:
        came = f"shape {list(key.shape)}, {form}"
        raise InvalidArgument("key", came, f"the batch of query, {batch}")
    added = int(module.bias_k is not None) + int(module.add_zero_attn)
    sizes = Sizes(batch, module.num_heads, query.shape[at], key.shape[at], added)
    _check_padding(key_padding_mask, sizes, batched)
    _check_pairs(attn_mask, sizes)
    return sizes


def said_by(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool, sizes: Sizes
) -> Masks:
    """Return what the masks of a call say; ``check_shapes`` has seen them.

    ``attn_mask`` [B * H, L, S] may have one of all heads [L, S]; with ``is_causal`` it counts only
    for its gradient.
    """
    hidden: list[Mask] = []
    added: list[Score] = []
    if is_causal and (attn_mask is None or not attn_mask.requires_grad):
        hidden.append(_causal(sizes))
    elif attn_mask is not None:
        by_heads = attn_mask
        if attn_mask.dim() == 3:
            by_heads = attn_mask.view(sizes.batch, sizes.heads, *attn_mask.shape[1:])
        _sort(by_heads, sizes, hidden, added)
    if key_padding_mask is not None:
        rows = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        _sort(rows[:, None, None], sizes, hidden, added)
    mask = None
    for each in hidden:
        mask = each if mask is None else mask & each
    return Masks(mask, as_score(added) if added else None)


def _sort(tensor: Tensor, sizes: Sizes, hidden: list[Mask], added: list[Score]) -> None:
    """Put a mask among those that hide or those that are added."""
    found = tensor if tensor.dtype is torch.bool else _as_bool(tensor)
    whole = tensor if found is None else found
    if sizes.added:
        whole = pad(whole, (0, sizes.added))
    if found is None:
        added.append(scores.bias(whole))
    else:
        hidden.append(Mask(_HIDDEN, (whole,)))


def _as_bool(tensor: Tensor) -> Tensor | None:
    """Where a float mask hides, if hiding is all that it does; None if it is not, or not known.

    Containers of torch make such masks of bool ones. Kernels skip what a bool mask hides. A look
    at the values is worth it where heads share them, and where it stops no device.
    """
    small = tensor.dim() == 2 or tensor.shape[1] == 1
    if not small or tensor.requires_grad or tensor.device.type != "cpu":
        return None
    if torch.compiler.is_compiling():
        return None
    found = tensor == -math.inf
    return found if bool((found | (tensor == 0)).all()) else None


def _causal(sizes: Sizes) -> Mask:
    """Query m sees keys 0 to m, and those that are added."""
    if not sizes.added:
        return _CAUSAL
    own = sizes.keys
    return masks.function(lambda b, h, m, n: (n <= m) | (n >= own))


def _check_padding(mask: Tensor | None, sizes: Sizes, batched: bool) -> None:
    if mask is None:
        return
    _check_kind("key_padding_mask", mask)
    wanted = (sizes.batch, sizes.keys) if batched else (sizes.keys,)
    if tuple(mask.shape) != wanted:
        required = f"[B, S], {list(wanted)}" if batched else f"[S], {list(wanted)}"
        raise InvalidArgument("key_padding_mask", f"shape {list(mask.shape)}", required)


def _check_pairs(mask: Tensor | None, sizes: Sizes) -> None:
    if mask is None:
        return
    _check_kind("attn_mask", mask)
    pairs = (sizes.queries, sizes.keys)
    every = (sizes.batch * sizes.heads, *pairs)
    if tuple(mask.shape) not in (pairs, every):
        required = f"[L, S], {list(pairs)}, or [B * H, L, S], {list(every)}"
        raise InvalidArgument("attn_mask", f"shape {list(mask.shape)}", required)


def _check_kind(name: str, mask: Tensor) -> None:
    check_tensor(name, mask, _KIND)
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise InvalidArgument(name, f"a tensor of {mask.dtype}", _KIND)
