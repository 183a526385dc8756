"""Models of transformers over paged caches: what ``tilewise.serving.generate`` asks of a model.

Serve a model from pages:

    tilewise.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise_paged")
    caches = paged_caches(model.eval(), pages=1000, page_size=16)
    tilewise.serving.generate(paged_step(model), caches, prompts, new_tokens=100)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.integrations.transformers.latent import (
    PAGED_NAME,
    absorbed_query,
    by_heads,
    is_absorbed,
    latent_layers,
    weights,
)
from tilewise.serving import Attend, PagedKVCache, Step
from tilewise.variants import masks, scores

_CAUSAL = masks.causal()
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What a layer may hand over and pages have no place for.
_CHANGES = (
    "position_bias",
    "sinks",
    "head_mask",
    "output_attentions",
    "cache",
    "indices",
    "block_indices",
)


def paged_caches(model: Any, *, pages: int, page_size: int, **keywords: Any) -> list[PagedKVCache]:
    """Return a cache for each layer of a model, with a window where the layer has one.

    A model with latent attention (MLA) gets latent caches: a token takes kv_lora_rank +
    qk_rope_head_dim numbers a layer. Call ``absorb(model)`` before ``paged_step``.

    Args:
        model: a decoder of transformers; its config says what its layers are.
        pages: of each cache.
        page_size: keys of a page.
        keywords: others of ``PagedKVCache``, such as ``storage``.

    Raises:
        Unsupported: layers that are not attention over all keys or a window.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = {
        "kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "dtype": model.dtype,
        "device": model.device,
    }
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        width = rank + config.qk_rope_head_dim
        sizes |= {"kv_heads": 1, "head_dim": width, "value_dim": rank, "latent": True}
    given = {"pages": pages, "page_size": page_size, **sizes, **keywords}
    return [PagedKVCache(**{"window": window, **given}) for window in _windows(config)]


def paged_step(model: Any) -> Step:
    """Return the step of a model, for ``generate``: one call of it over packed tokens.

    Args:
        model: a decoder made with ``attn_implementation="tilewise_paged"``, in evaluation mode.

    Raises:
        InvalidArgument: it was made otherwise, or is in training mode.
        Unsupported: an encoder and decoder, or layers that are not causal attention over all keys
            or a window, here or when the step runs.
    """
    config = model.config
    if config.get_text_config()._attn_implementation != PAGED_NAME:
        came = f"one with attn_implementation={config._attn_implementation!r}"
        fix = f"model.set_attn_implementation({PAGED_NAME!r}), after register()."
        raise InvalidArgument("model", came, f"one with {PAGED_NAME!r}", fix)
    if model.training:
        raise InvalidArgument("model", "one in training mode", "evaluation mode", "model.eval()")
    if config.is_encoder_decoder:
        fix = "use model.generate with attn_implementation='tilewise'"
        raise Unsupported("an encoder and decoder over paged caches", fix=fix)
    layers = len(_windows(config.get_text_config()))
    if not all(map(is_absorbed, latent_layers(model))):
        fix = "call tilewise.integrations.transformers.absorb(model) first"
        raise Unsupported("the naive form of latent attention (MLA) over paged caches", fix=fix)

    def run(tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        attended = set()

        def noted(layer: int, q: Tensor, k: Tensor, v: Tensor | None, **keywords: Any) -> Tensor:
            attended.add(layer)
            return attend(layer, q, k, v, **keywords)

        logits: Tensor = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            tilewise_attend=noted,
        ).logits
        if len(attended) != layers:  # another attention would have mixed the sequences
            raise Unsupported(
                f"a model of {layers} layers, {len(attended)} of which attend over paged caches",
                fix="use model.generate with attn_implementation='tilewise'",
            )
        return logits[0]

    return run


def paged_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tilewise_attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention function of ``AttentionInterface``, over the caches of a ``paged_step``.

    The arguments are those of ``attention_forward``, of one batch item that packs all sequences.

    Args:
        module: the layer; ``layer_idx`` names its cache.
        query: [1, Hq, T, D].
        key: [1, Hk, T, D], of the tokens alone.
        value: [1, Hk, T, Dv].
        attention_mask: None, not one of ``attention_forward``: causality and windows are the
            caches'.
        scaling: 1/sqrt(D) if None.
        dropout: 0.
        is_causal: over what the layer says; True.
        sliding_window: how many keys a query sees, its own the last of them.
        softcap: scores are kept inside (-softcap, softcap).
        s_aux: [Hq], attention sinks.
        tilewise_attend: the step's.
        kwargs: what the model says beside.

    Returns:
        ([1, T, Hq, Dv], None).

    Raises:
        Unsupported: outside of a step, or what pages have no place for.
    """
    if tilewise_attend is None:
        raise Unsupported(
            f"attn_implementation={PAGED_NAME!r} outside of tilewise.serving.generate, or in a "
            "model that does not hand keywords on to its attention",
            fix="call the step of paged_step(model) by generate; else use 'tilewise'",
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    given = {name: kwargs.get(name) for name in _CHANGES}
    refused = [name for name, value in given.items() if value is not None and value is not False]
    refused += ["attention_mask"] if attention_mask is not None else []
    refused += ["dropout"] if dropout else []
    refused += [] if causal else ["a layer that is not causal"]
    if refused or query.shape[0] != 1:
        what = ", ".join(refused) or f"{query.shape[0]} batch items"
        fix = "use model.generate with attn_implementation='tilewise'"
        raise Unsupported(f"{what} over paged caches", fix=fix)
    up: Tensor | None = None
    values: Tensor | None = value[0].transpose(0, 1)
    if is_absorbed(module):  # keys are latents, and values rotated keys
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        down, up = weights(module)
        query, key, values = absorbed_query(query, down), torch.cat((key, value), -1), None
    q, k = (each[0].transpose(0, 1) for each in (query, key))
    out = tilewise_attend(
        module.layer_idx,  # type: ignore[arg-type]  # an integer, which torch's stubs do not know
        q,
        k,
        values,
        mask=_CAUSAL if sliding_window is None else masks.window(sliding_window - 1, 0),
        score=None if softcap is None else scores.softcap(softcap),
        scale=scaling,
        sinks=s_aux,
    )
    if up is not None:
        out = by_heads(out.transpose(0, 1)[None], up)[0].transpose(0, 1)
    return out[None], None


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer; None for all keys."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = [_FULL if window is None else _SLIDING] * layers
    other = sorted(set(types) - {_FULL, _SLIDING})
    if other:
        raise Unsupported(
            f"layers of {', '.join(other)} over paged caches",
            fix="use model.generate with attn_implementation='tilewise'",
        )
    return [None if kind == _FULL else window for kind in types]
