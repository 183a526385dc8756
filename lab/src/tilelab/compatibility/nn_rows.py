"""Rows of ``docs/compatibility.md`` for torch's attention modules in ``tilewise.nn``."""

from __future__ import annotations

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_MHA = ("MultiheadAttention",)
_ENCODER = ("TransformerEncoderLayer",)
_DECODER = ("TransformerDecoderLayer",)
_LAYERS = (*_ENCODER, *_DECODER)
_CONVERT = ("convert",)

_INTRO = """
`tilewise.nn.MultiheadAttention`, `TransformerEncoderLayer` and `TransformerDecoderLayer` are
subclasses of torch's modules of these names.

- The forward is tilewise's. The constructor, the parameters, the initial values for a seed and
  the state dict are torch's.
- `tilewise.nn.convert(model)` converts torch's modules in a model in place, and prints what it
  did.
- Torch's fast path in eval mode is not taken.
"""

TABLES = (
    Table(
        title="`torch.nn.MultiheadAttention` and the transformer layers",
        intro=_INTRO,
        functions=(*_MHA, *_LAYERS, *_CONVERT),
        rows=(
            Row(
                _MHA,
                "embed_dim, num_heads, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, "
                "device, dtype",
                "covered",
            ),
            Row(
                _MHA,
                "dropout",
                "covered",
                "in training only; torch.manual_seed repeats it; drops other pairs than torch",
            ),
            Row(
                _MHA,
                "query, key, value",
                "covered",
                "3-D, 2-D (unbatched), float64; nested tensors of both layouts, any of q, k and v "
                "the same or not, without masks and weights",
            ),
            Row(
                _MHA,
                "key_padding_mask, attn_mask",
                "covered",
                "bool (True = does not attend) or added floats, with a gradient; also one of each; "
                "the kernel reads both as they are and never merges them",
            ),
            Row(
                _MHA,
                "need_weights=True",
                "covered",
                "torch's default; plain operations write the weights, with a SlowPathWarning once "
                "per process; drop_weights=True on a module gives None instead",
            ),
            Row(_MHA, "average_attn_weights", "covered"),
            Row(
                _MHA,
                "is_causal",
                "covered",
                "also without attn_mask, which torch refuses; with it a hint, as in torch",
            ),
            Row(
                _MHA,
                "a query that sees no key",
                "covered",
                "gives the bias of out_proj, with weights 0 and gradients 0; torch gives NaN with "
                "weights",
            ),
            Row(
                _MHA,
                "wrong shapes and dtypes",
                "refused",
                "InvalidArgument, a ValueError, that names the argument; torch raises "
                "AssertionError or RuntimeError",
            ),
            Row(
                _LAYERS,
                "d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, "
                "batch_first, norm_first, bias, device, dtype",
                "covered",
            ),
            Row(
                _ENCODER,
                "src, src_mask, src_key_padding_mask, is_causal",
                "covered",
                "alone and in torch.nn.TransformerEncoder, with enable_nested_tensor or without",
            ),
            Row(
                _DECODER,
                "tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, "
                "memory_key_padding_mask, tgt_is_causal, memory_is_causal",
                "covered",
            ),
            Row(
                _CONVERT,
                "model",
                "covered",
                "modules of exactly these three classes of torch; parameters, buffers, hooks and "
                "flags stay; a second call does nothing",
            ),
            Row(
                _CONVERT,
                "subclasses of them, a forward replaced on the instance, scripted modules",
                "refused",
                "left as they are, and named with the reason",
            ),
            Row(_CONVERT, "drop_weights", "covered", "sets it on every MultiheadAttention"),
            Row(_CONVERT, "quiet", "covered", "returns the report without printing it"),
        ),
    ),
)
