"""Rows of ``docs/compatibility.md`` for flash-attn 2.8.3."""

from __future__ import annotations

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_DENSE = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
_VARLEN = (
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)
_TRAINED = (*_DENSE, *_VARLEN)
_PASS = "flash_attn_interface."
_FORWARD = (f"{_PASS}_flash_attn_forward", f"{_PASS}_flash_attn_varlen_forward")
_BACKWARD = (f"{_PASS}_flash_attn_backward", f"{_PASS}_flash_attn_varlen_backward")
_PASSES = (*_FORWARD, *_BACKWARD)
_PACKED = (_FORWARD[1], _BACKWARD[1])
_CACHE = ("flash_attn_with_kvcache",)
_ATTENTION = (*_TRAINED, *_CACHE)
_PADDING = (
    "bert_padding.unpad_input",
    "bert_padding.unpad_input_for_concatenated_sequences",
    "bert_padding.pad_input",
    "bert_padding.index_first_axis",
    "bert_padding.index_put_first_axis",
    "bert_padding.index_first_axis_residual",
)
_ROTARY = ("layers.rotary.apply_rotary_emb", "ops.triton.rotary.apply_rotary")
_IN_PLACE = ("layers.rotary.apply_rotary_emb_qkv_", "layers.rotary.apply_rotary_emb_kv_")
_MODULE = ("layers.rotary.RotaryEmbedding",)

_INTRO = """
Import these functions from `tilewise.compat.flash_attn`. Importing it patches nothing.

- **Stand-in.** `tilewise.compat.install("flash_attn")` makes `import flash_attn` find these
  functions where the package itself is absent. They come with the version and the metadata of
  flash-attn 2.8.3, which transformers looks for. `uninstall` undoes it.
- **What they take.** CPU and GPU; float16, bfloat16, float32 and float64; head widths up to 512;
  any strides. The same call gives the same bits.
- **Single passes.** ring-flash-attention and yunchang call the forward and the backward pass by
  themselves. Both are here. The backward passes take the output and the lse of all keys.
- **Not here.** Importing another name of the package (`modules`, `losses`, `flash_attn_gpu`)
  fails with an error that says so.
"""

_ALL_OF_THEM = (
    Row(
        ("flash_attn_func", "flash_attn_varlen_func"),
        "q, k, v",
        "covered",
        "`[B, S, H, D]`, packed `[T, H, D]`; v's width may differ from q's",
    ),
    Row((_DENSE[1], _VARLEN[1]), "qkv", "covered", "`[B, S, 3, H, D]`, packed `[T, 3, H, D]`"),
    Row((_DENSE[2], _VARLEN[2]), "q, kv", "covered", "kv `[B, S, 2, H, D]`, packed `[T, 2, H, D]`"),
    Row(_TRAINED, "dropout_p", "covered", "by a counter-based generator; `torch.manual_seed` "
        "repeats it; goes with `softcap` too"),
    Row(_ATTENTION, "softmax_scale", "covered"),
    Row(_ATTENTION, "causal", "covered", "bottom right; rows without keys give 0"),
    Row(_ATTENTION, "window_size", "covered", "-1 for no bound on either side; integers, or "
        "tensors of them"),
    Row(_ATTENTION, "window_size=(None, None)", "refused", "flash-attn 4's form of (-1, -1)"),
    Row(_ATTENTION, "softcap", "covered", "0 or less for none"),
    Row(_ATTENTION, "alibi_slopes", "covered", "`[H]` or `[B, H]`, any floating dtype; "
        "`softmax_lse` has the documented bias, which flash-attn's kernels shift by a number per "
        "row where causal; no gradient"),
    Row(_TRAINED, "deterministic", "accepted", "results always are"),
    Row(_TRAINED, "return_attn_probs", "covered", "the reference computes `S_dmask`, as it is "
        "N x N. It has the unrounded shape and the right scaling, and is negative (or -0.0) where "
        "dropped. `softmax_lse` has a gradient, and is +inf for a row without keys"),
)  # fmt: skip

_SEQUENCES = (
    Row((_VARLEN[0], _VARLEN[2]), "cu_seqlens_q, cu_seqlens_k", "covered", "int32 or int64; must "
        "end at the number of packed rows"),
    Row((_VARLEN[1],), "cu_seqlens", "covered", "int32 or int64; must end at the number of rows"),
    Row((_VARLEN[0], _VARLEN[2]), "max_seqlen_q, max_seqlen_k", "accepted", "lengths are read from "
        "cu_seqlens; they size `S_dmask`"),
    Row((_VARLEN[1],), "max_seqlen", "accepted", "as above"),
    Row((_VARLEN[0],), "block_table", "covered", "any page size; forward only; on the CPU one "
        "sequence's keys at a time are copied"),
    Row((_VARLEN[0],), "block_table with dropout_p > 0", "refused", "paged keys are for inference"),
    Row((_VARLEN[0],), "block_table with a gradient", "refused", "a backward pass raises; "
        "flash-attn has no gradient"),
)  # fmt: skip

_CACHED = (
    Row(_CACHE, "q, k_cache, v_cache", "covered", "any page size, any strides"),
    Row(_CACHE, "k, v", "covered", "written into the cache in place"),
    Row(_CACHE, "a gradient", "refused", "a backward pass raises; flash-attn silently gives no "
        "gradient"),
    Row(_CACHE, "rotary_cos, rotary_sin", "covered", "any even rotary width, any floating dtype"),
    Row(_CACHE, "rotary_cos without k", "refused", "as flash-attn does"),
    Row(_CACHE, "rotary_interleaved", "covered"),
    Row(_CACHE, "cache_seqlens", "covered", "a number, int32 or int64"),
    Row(_CACHE, "cache_batch_idx", "covered", "int32 or int64"),
    Row(_CACHE, "cache_batch_idx with a block_table", "refused", "as flash-attn does"),
    Row(_CACHE, "cache_leftpad", "covered", "with a block_table too; on a GPU the rows before it "
        "must be finite"),
    Row(_CACHE, "block_table", "covered", "on a GPU read in place; on the CPU one sequence's keys "
        "at a time are copied"),
    Row(_CACHE, "num_splits", "accepted", "splits depend on a sequence's number of keys alone"),
    Row(_CACHE, "return_softmax_lse", "covered", "+inf for a row without keys"),
    Row(_ATTENTION, "q_descale, k_descale, v_descale, qv, learnable_sink, ...", "refused",
        "arguments of flash-attn 3 and 4, by Python's TypeError: `tilewise.attention` has float8 "
        "scales and sinks"),
)  # fmt: skip

_BY_THEMSELVES = (
    Row(_PASSES, "q, k, v", "covered", "as above; a gradient through a pass raises"),
    Row(_PASSES, "dropout_p, softmax_scale, causal, softcap, alibi_slopes", "covered"),
    Row(_PASSES, "window_size_left, window_size_right", "covered"),
    Row(_PACKED, "cu_seqlens_q, cu_seqlens_k", "covered"),
    Row(_PACKED, "max_seqlen_q, max_seqlen_k", "accepted", "lengths are read from cu_seqlens; with "
        "leftpad_k or seqused_k on a GPU the longest sequence's number of keys"),
    Row(_PACKED, "zero_tensors", "accepted", "rows without keys are 0 anyway"),
    Row(_FORWARD, "return_softmax", "covered", "as `return_attn_probs`"),
    Row((_FORWARD[1],), "block_table, leftpad_k, seqused_k", "covered", "without dropout; "
        "also together"),
    Row(_BACKWARD, "dout, out, softmax_lse", "covered", "of these keys, or of more keys, merged"),
    Row(_BACKWARD, "dq, dk, dv", "covered", "written in place, any strides; None to leave one out"),
    Row(_BACKWARD, "deterministic", "accepted", "results always are"),
    Row(_BACKWARD, "rng_state", "covered", "required with dropout; "
        "flash-attn draws another one"),
)  # fmt: skip

_OTHERS = (
    Row((*_PADDING[:3],), "hidden_states", "covered", "differentiable"),
    Row((_PADDING[0],), "attention_mask, unused_mask", "covered", "bool or integer"),
    Row((_PADDING[1],), "attention_mask_in_length", "covered"),
    Row((_PADDING[2],), "indices, batch, seqlen", "covered"),
    Row((_PADDING[3], _PADDING[5]), "input, indices", "covered", "repeated indices add up in the "
        "gradient"),
    Row((_PADDING[4],), "values, indices, first_axis_dim", "covered"),
    Row(_ROTARY, "x, cos, sin", "covered", "computed in float32; cos and sin have gradients too"),
    Row(_ROTARY, "interleaved, inplace, seqlen_offsets, cu_seqlens", "covered"),
    Row(_ROTARY, "max_seqlen", "accepted", "lengths are read from cu_seqlens"),
    Row((_ROTARY[1],), "conjugate", "covered"),
    Row((_IN_PLACE[0],), "qkv, cos_k, sin_k, num_heads_q", "covered", "rotated in place"),
    Row((_IN_PLACE[1],), "kv", "covered", "rotated in place"),
    Row(_IN_PLACE, "cos, sin, interleaved, seqlen_offsets", "covered"),
    Row(_MODULE, "dim, base, interleaved, scale_base, device", "covered"),
)  # fmt: skip

TABLES = (
    Table(
        "`tilewise.compat.flash_attn`",
        _INTRO,
        (*_ATTENTION, *_PASSES, *_PADDING, *_ROTARY, *_IN_PLACE, *_MODULE),
        (*_ALL_OF_THEM, *_SEQUENCES, *_CACHED, *_BY_THEMSELVES, *_OTHERS),
        (
            ("every attention", _ATTENTION),
            ("every attention but `flash_attn_with_kvcache`", _TRAINED),
            ("every pass", _PASSES),
        ),
    ),
)
