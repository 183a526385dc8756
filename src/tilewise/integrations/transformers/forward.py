"""The attention function of transformers: one call of ``tilewise.attention`` for a layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engine.key_lists import KeyBlocks
from tilewise.engine.run import autocast
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.functional import attention
from tilewise.integrations.transformers.compressed import Compressed, compressed_of
from tilewise.integrations.transformers.latent import by_heads, is_absorbed, operands
from tilewise.integrations.transformers.masks import Pairs
from tilewise.merging import merge
from tilewise.routes import attention_varlen, by_the_faster, elsewhere
from tilewise.variants import masks, scores
from tilewise.variants.values import Mask, Score

_CAUSAL = masks.causal("top_left")
_MORE_KEYS = (
    "A model that appends keys after its mask was made extends masks that are tensors only: "
    "model.set_attn_implementation('eager') for it."
)


class _Seen(NamedTuple):
    """Contents of a layer's mask: which pairs attend, what is added to them, and how many keys."""

    mask: Mask | None
    added: Tensor | None
    keys: int


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pairs | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``AttentionInterface``: softmax(score(scaling q.k)) v by tilewise.

    The score is softcap first, then position_bias and a mask that adds. Without a mask it is causal
    where the layer is and there is more than one query, as transformers' sdpa has it. The few calls
    that torch computes faster are left to it, see ``tilewise.prefer``.

    Args:
        module: the layer; asked for ``is_causal``, and for its weights after ``absorb``.
        query: [B, Hq, M, D].
        key: [B, Hk, N, D], each head for Hq / Hk of query's; latents of a layer after ``absorb``.
        value: [B, Hk, N, Dv]; rotated keys of a layer after ``absorb``.
        attention_mask: of ``make_mask``; or a user's own [B, 1 or Hq, M, N], boolean (True: attend)
            or floating (added), which is dense by nature.
        scaling: 1/sqrt(D) if None.
        dropout: the probability of dropping a pair; repeated by torch.manual_seed.
        is_causal: over what the layer says.
        position_bias: floating, broadcastable to [B, Hq, M, N]; its gradient is defined.
        softcap: scores are kept inside (-softcap, softcap).
        s_aux: [Hq], attention sinks.
        sinks: [B, Hq, M, 1], a sink for each query instead (Inkling 2); its gradient is defined.
        kwargs: what the model says beside: sliding_window is in the mask already; cu_seq_lens_q and
            cu_seq_lens_k pack sequences where the mask does not. An indexer's choice is all that a
            query reads, where the mask lets it: indices [B, M, K], keys for all heads, or
            block_indices [B, Hk or 1, M, K], blocks of module.indexer.block_size keys; -1 is none.

    Returns:
        ([B, M, Hq, Dv], None): weights are never there.

    Raises:
        InvalidArgument, InvalidType: attention_mask is none of these, or for other lengths.
        Unsupported: attention weights, a head mask or a paged cache is asked for; or dropout of
            keys that an indexer chose.
    """
    _refuse(kwargs)
    # A model may have normalized q and k in float32, and not v.
    query, key, value = autocast(query, key, value)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    compressed = compressed_of(module)
    if compressed is not None and compressed.size:
        own = key.shape[2] - compressed.size
        behind = key[:, :, own:], value[:, :, own:], compressed
        seen = _read(attention_mask, query, key[:, :, :own], causal, kwargs)
        said = {"scale": scaling, "dropout_p": float(dropout)}
        near = key[:, :, :own], value[:, :, :own], seen
        return _of_both(query, near, behind, s_aux, said), None
    seen = _read(attention_mask, query, key, causal, kwargs)
    chosen = _chosen(module, attention_mask, kwargs)
    if seen.keys < key.shape[2]:
        key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
        chosen = None if chosen is None else _among(chosen, seen.keys)
    if position_bias is not None:
        position_bias = position_bias[..., : seen.keys]
    up = None
    if is_absorbed(module):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        reads = seen.keys if chosen is None else min(seen.keys, chosen.indices.shape[-1])
        query, key, value, up = operands(module, query, key, value, reads)
    steps: list[Score] = [] if softcap is None else [scores.softcap(softcap)]
    steps += [scores.bias(each) for each in (position_bias, seen.added) if each is not None]
    if sinks is not None:
        # Softmax is the same if a row's scores and its sink move together: the sink moves to 0.
        steps.append(scores.bias(-sinks))
        s_aux = sinks.new_zeros(query.shape[1])
    keywords: dict[str, Any] = {
        "mask": seen.mask,
        "score": steps or None,
        "scale": scaling,
        "sinks": s_aux,
        "dropout_p": float(dropout),
        "keys": chosen,
    }
    lengths = _packed(seen.mask, kwargs)
    out: Tensor
    if lengths is None:
        out = by_the_faster(query, key, value, **keywords)
    else:
        out = _of_packed(query, key, value, lengths, keywords)
    out = out if up is None else by_heads(out, up)
    return out.transpose(1, 2).contiguous(), None


def _refuse(kwargs: Mapping[str, Any]) -> None:
    """Say of what is asked for, and cannot be, why and what to do."""
    if kwargs.get("output_attentions") or _collects_weights():
        raise Unsupported(
            "output_attentions=True with attn_implementation='tilewise': the weights, one number "
            "for each pair of tokens, are never written",
            fix="model.set_attn_implementation('eager') for the calls that want them",
        )
    if kwargs.get("head_mask") is not None:
        fix = "multiply the output of the heads, or use attn_implementation='eager'"
        raise Unsupported("head_mask, which scales attention weights", fix=fix)
    if kwargs.get("cache") is not None:
        raise Unsupported(
            "continuous batching (cache=) with attn_implementation='tilewise'",
            fix="use model.generate, or attn_implementation='sdpa' for generate_batch",
        )


def _collects_weights() -> bool:
    """Return whether transformers' hooks wait for weights.

    Not every model passes output_attentions on to its layers. If torch.compile traces the model as
    a whole, the hooks' request is part of the graph. If it compiles a layer by itself, the request
    is in a ContextVar, which dynamo does not know. It is read when the layer is traced, and again
    after hooks have changed.
    """
    collector = _collector()
    if collector is None:
        return False
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", True):
        now: bool = _when_traced()
        return now
    return _names_weights(collector.get())


def _names_weights(waited_for: Mapping[str, Any] | None) -> bool:
    return any(name.endswith("attentions") for name in waited_for or ())


def _collects_weights_now() -> bool:
    collector = _collector()
    return collector is not None and _names_weights(collector.get())


_compiler: Any = torch.compiler
_when_traced = _compiler.assume_constant_result(_collects_weights_now)


@lru_cache(maxsize=1)
def _collector() -> Any:
    """Return where transformers' hooks write down what they wait for; None where it has none."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


def _read(
    given: Pairs | Tensor | None,
    query: Tensor,
    key: Tensor,
    causal: bool,
    kwargs: Mapping[str, Any],
) -> _Seen:
    queries, keys = query.shape[2], key.shape[2]
    if isinstance(given, Pairs):
        # No broadcast of one row: BridgeTower makes such a mask, and its image layers are causal by
        # is_causal while its own attention, without a mask, sees every pair.
        if given.shape[2:] != (queries, keys):
            came = f"one for {given.shape[2]} queries and {given.shape[3]} keys"
            required = f"one for the {queries} queries and {keys} keys of this layer"
            raise InvalidArgument("attention_mask", came, required, _MORE_KEYS)
        return _Seen(given.mask, None, given.keys)
    if given is None:
        window = kwargs.get("sliding_window")
        if window is not None and window < keys:
            raise Unsupported(
                f"sliding_window={window} over {keys} keys without a mask that has it",
                fix="this model makes no mask: use attn_implementation='sdpa' for it",
            )
        return _Seen(_CAUSAL if causal and queries > 1 else None, None, keys)
    required = "a mask of tilewise, or a boolean or floating tensor [B, 1 or Hq, M, N]"
    if not isinstance(given, Tensor):
        raise InvalidType("attention_mask", f"a {type(given).__name__}", required)
    if given.dim() != 4 or not (given.dtype is torch.bool or given.dtype.is_floating_point):
        came = f"{given.dtype} of shape {tuple(given.shape)}"
        raise InvalidArgument("attention_mask", came, required)
    given = given[..., :keys]
    if given.dtype is torch.bool:
        return _Seen(masks.dense(given), None, keys)
    return _Seen(None, given, keys)


def _chosen(module: Any, mask: object, kwargs: Mapping[str, Any]) -> KeyBlocks | None:
    """Return the keys that an indexer chose for each query; None where there is no indexer."""
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if isinstance(mask, Pairs) and mask.chosen is not None:
        indices = mask.chosen
    if indices is not None:
        return KeyBlocks(indices[:, None], 1)
    return None if blocks is None else KeyBlocks(blocks, module.indexer.block_size)


def _of_both(
    query: Tensor,
    own: tuple[Tensor, Tensor, _Seen],
    compressed: tuple[Tensor, Tensor, Compressed],
    sinks: Tensor | None,
    keywords: dict[str, Any],
) -> Tensor:
    """[B, M, Hq, Dv] over the keys of a layer and the compressed ones behind them."""
    if elsewhere():
        what = "compressed keys by tiles in a sequence that several processes share"
        raise Unsupported(what, fix="leave the block of context_parallel")
    key, value, seen = own
    assert seen.added is None  # a compressor by tiles refuses masks that are tensors
    near = attention(query, key, value, mask=seen.mask, return_lse=True, **keywords)
    key, value, (_, mask, chosen) = compressed
    keys = None if chosen is None else KeyBlocks(chosen[:, None], 1)
    far = attention(query, key, value, mask=mask, keys=keys, return_lse=True, **keywords)
    return merge(near, far, sinks=sinks).out.transpose(1, 2).contiguous()


def _among(chosen: KeyBlocks, keys: int) -> KeyBlocks:
    """Keep the first keys alone. An indexer with too few to choose from names later ones, too."""
    indices, block, _ = chosen
    return KeyBlocks(torch.where(indices * block < keys, indices, -1), block)


def _packed(mask: Mask | None, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return where packed sequences begin, from position_ids or padding, unless the mask knows."""
    begins = kwargs.get("cu_seq_lens_q")
    if begins is None or (mask is not None and mask.captured):
        return None
    of_keys = kwargs.get("cu_seq_lens_k")
    return begins, begins if of_keys is None else of_keys


def _of_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[Tensor, Tensor],
    keywords: dict[str, Any],
) -> Tensor:
    """[1, Hq, T, Dv] of sequences that lie one after the other; masks count within each."""
    biased = any("bias" in step.text for step in keywords["score"] or ())
    chosen = keywords["keys"] is not None
    if query.shape[0] != 1 or biased or chosen:
        came = f"one for {query.shape[0]} batch items"
        came = "one with a bias" if biased else "one with an indexer" if chosen else came
        required = "one batch item, which holds all sequences, no bias and no indexer"
        raise InvalidArgument("cu_seq_lens_q", came, required)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    out: Tensor = attention_varlen(q, k, v, *lengths, **keywords)
    return out.transpose(0, 1)[None]
