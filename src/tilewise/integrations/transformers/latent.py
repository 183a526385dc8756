"""The absorbed form of multi-head latent attention (MLA), for decoding with models of transformers.

A layer of MLA caches a latent vector c and a rotated key r for each token, shared by all heads. It
expands them into keys [W_K c; r] and values W_V c of every head, in every call. Products with W_K
and W_V can be moved to the few queries instead:

    q . [W_K c; r] = [W_K^T q_nope; q_rot] . [c; r]        sum of p W_V c = W_V (sum of p c)

So all heads attend to the keys [c; r], whose first numbers are the values. Source: DeepSeek-V2,
arXiv:2405.04434, section 2.1.2. ``absorb`` switches a model, and ``latent_cache`` makes a cache in
which c and r lie side by side, so that the keys and values are views of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.integrations.transformers.masks import is_traced
from tilewise.problem import side_by_side

NAME, PAGED_NAME = "tilewise", "tilewise_paged"
_EXPAND = "expand_kv"  # a layer's method, which expands c and r
_PLAIN = "a torch.nn.Linear without bias, hooks or adapters"


def absorb(model: nn.Module) -> None:
    """Let the MLA layers of a model attend to latent vectors, until ``unabsorb``. Twice is as once.

    A call takes the absorbed form where that multiplies less: in decoding, and with few queries
    behind a long cache. It takes the naive form otherwise, as in training and for prompts. Results
    are equal except for rounding. Weights, masks, caches and the state dict stay what they are.

    Args:
        model: of transformers, with ``attn_implementation="tilewise"``; or ``"tilewise_paged"``,
            where every call takes the absorbed form. With another one the layers take the naive
            form.

    Raises:
        InvalidArgument: the model has another implementation.
        Unsupported: no layer has latents, or its ``kv_b_proj`` is more than a linear layer; then or
            in a later call.
    """
    layers = [each for each in _layers(model) if _EXPAND not in vars(each)]
    for layer in layers:
        if not _is_ours(layer):
            came = f"one with attn_implementation={layer.config._attn_implementation!r}"
            fix = f"model.set_attn_implementation({NAME!r}), after register()."
            required = f"one with {NAME!r} or {PAGED_NAME!r}"
            raise InvalidArgument("model", came, required, fix)
        weights(layer)
    for layer in layers:
        setattr(layer, _EXPAND, partial(_latents, layer))


def unabsorb(model: nn.Module) -> None:
    """Undo ``absorb``.

    Raises:
        Unsupported: no layer has latents.
    """
    for layer in _layers(model):
        vars(layer).pop(_EXPAND, None)


def latent_cache(model: Any) -> Any:
    """Return a ``DynamicCache`` for a model, whose latents ``absorb`` reads without a copy.

    Hand it to ``model.generate(..., past_key_values=cache)`` or to the model. Any other cache of
    transformers works too. Then each call copies the latents of its cache once, and a
    ``DynamicCache`` copies them once more. This one takes kv_lora_rank + qk_rope_head_dim numbers a
    token and layer, and has room for an eighth more tokens than it holds.

    Args:
        model: of transformers, or a decoder of it.

    Raises:
        Unsupported: from a call of the model that wants gradients.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if getattr(type(layer), "update", None) is DynamicLayer.update:  # others: windows, states
            layer.update = partial(_update, layer)
    return cache


def is_absorbed(layer: Any) -> bool:
    """Return whether a layer hands latents over in the place of keys and values."""
    return _EXPAND in layer.__dict__


def operands(
    layer: Any, query: Tensor, latent: Tensor, rotated: Tensor, reads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys and values in the form of fewer multiplications, and W_V if absorbed.

    The query is [B, H, M, nope + rope], the latents [B, 1, N, R] and the rotated keys [B, 1, N,
    rope]. A query reads ``reads`` keys.

    Returns:
        q, k, v, and [H, R, Dv] for ``by_heads`` of the output; None in the naive form.
    """
    down, up = weights(layer)
    rank, width = latent.shape[-1], down.shape[1] + up.shape[2]
    queries, keys = query.shape[2], latent.shape[2]
    # Per head and batch item: R x width for each row that W_K and W_V multiply, and for each pair
    # the widths of keys and values, of which the rotated part is common to both forms.
    if queries * reads * (2 * rank - width) >= (keys - queries) * rank * width:
        return query, *type(layer).expand_kv(layer, latent, rotated), None
    joined = _joined(latent, rotated)
    return absorbed_query(query, down), joined, joined[..., :rank], up


def absorbed_query(query: Tensor, down: Tensor) -> Tensor:
    """Return queries [B, H, M, R + rope] for keys [c; r], of [B, H, M, nope + rope] and W_K."""
    nope, rope = torch.tensor_split(query, [down.shape[1]], -1)
    return torch.cat((by_heads(nope, down), rope), -1)


def by_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [B, H, M, K] times weight [H, K, L]: one product for each head, not B of them."""
    batch, heads, rows, _ = x.shape
    out = torch.bmm(x.transpose(0, 1).flatten(1, 2), weight)
    return out.view(heads, batch, rows, weight.shape[2]).transpose(0, 1)


def latent_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that have latents."""
    return [each for each in model.modules() if hasattr(type(each), _EXPAND)]


def _layers(model: nn.Module) -> list[Any]:
    found = latent_layers(model)
    if not found:
        what = f"{type(model).__name__}, no layer of which has latents: none has {_EXPAND}"
        fix = "hand over a model with MLA, such as DeepseekV3ForCausalLM of transformers 5.23"
        raise Unsupported(what, fix=fix)
    return found


def _is_ours(layer: Any) -> bool:
    return layer.config._attn_implementation in (NAME, PAGED_NAME)


def _latents(layer: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for ``expand_kv``: hand the latents on to our attention, and expand for others."""
    if _is_ours(layer):
        return latent, rotated
    expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, latent, rotated)
    return expanded


def weights(layer: Any) -> tuple[Tensor, Tensor]:
    """Return W_K [H, nope, R] and W_V [H, R, Dv], views of the weight of ``kv_b_proj``."""
    linear = layer.kv_b_proj
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    if type(linear) is not nn.Linear or linear.bias is not None or hooked:
        raise Unsupported(
            f"the absorbed form of {type(layer).__name__}, whose kv_b_proj is not {_PLAIN}: "
            f"{linear}",
            fix="merge the adapter or dequantize the weight, or call unabsorb(model)",
        )
    sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
    down, up = linear.weight.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
    return down, up.transpose(1, 2)


def _joined(latent: Tensor, rotated: Tensor) -> Tensor:
    """Return [c; r]: a view where they lie side by side, else a copy."""
    wanted = torch.is_grad_enabled() and (latent.requires_grad or rotated.requires_grad)
    view = None if wanted or is_traced(latent) else side_by_side(latent, rotated)
    return torch.cat((latent, rotated), -1) if view is None else view


def _update(layer: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Stand in for ``DynamicLayer.update``: append to one tensor [B, H, room, D + Dv]."""
    if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        fix = "call the model with use_cache=False, or under torch.no_grad()"
        raise Unsupported("gradients of what is in a latent_cache", fix=fix)
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    held, width = layer.get_seq_length(), keys.shape[-1]
    total, room = held + keys.shape[2], getattr(layer, "room", None)
    if (
        room is None
        or room.shape[:2] != keys.shape[:2]
        or room.shape[2] < total
        or room.data_ptr() != layer.keys.data_ptr()  # it was reordered, say by a beam search
    ):
        room = keys.new_empty(*keys.shape[:2], total + total // 8, width + values.shape[-1])
        if held:
            room[:, :, :held, :width], room[:, :, :held, width:] = layer.keys, layer.values
        layer.room = room
    room[:, :, held:total, :width], room[:, :, held:total, width:] = keys, values
    layer.keys, layer.values = room[:, :, :total].split([width, values.shape[-1]], -1)
    return layer.keys, layer.values
