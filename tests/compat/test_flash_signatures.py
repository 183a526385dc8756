"""The functions of flash-attn's stand-in have the names, orders and defaults of its arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tilewise.compat import flash_attn
from tilewise.compat.flash_attn import bert_padding, cute, flash_attn_interface, version_3
from tilewise.compat.flash_attn.layers import rotary

FLAGS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)
PACKING = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
GIVEN = "dout q k v out softmax_lse dq dk dv"
ASKED = "dropout_p softmax_scale causal"
WINDOW = "window_size_left window_size_right softcap alibi_slopes"
WINDOW_OR_NONE = "window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None"
OPEN = {
    "flash_attn_func": f"q k v {FLAGS}",
    "flash_attn_kvpacked_func": f"q kv {FLAGS}",
    "flash_attn_qkvpacked_func": f"qkv {FLAGS}",
    "flash_attn_varlen_func": f"q k v {PACKING} {FLAGS} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {PACKING} {FLAGS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {FLAGS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False",
}
# Of the interface alone, as in the package.
PASSES = {
    "_flash_attn_forward": f"q k v {ASKED} {WINDOW} return_softmax",
    "_flash_attn_varlen_forward": f"q k v {PACKING} {ASKED} {WINDOW_OR_NONE} return_softmax=False "
    "block_table=None leftpad_k=None seqused_k=None zero_tensors=False",
    "_flash_attn_backward": f"{GIVEN} {ASKED} {WINDOW} deterministic rng_state=None",
    "_flash_attn_varlen_backward": f"{GIVEN} {PACKING} {ASKED} {WINDOW} deterministic "
    "rng_state=None zero_tensors=False",
}
BESIDE: dict[Any, str] = {
    rotary.apply_rotary_emb: "x cos sin interleaved=False inplace=False seqlen_offsets=0 "
    "cu_seqlens=None max_seqlen=None",
    rotary.apply_rotary: "x cos sin seqlen_offsets=0 cu_seqlens=None max_seqlen=None "
    "interleaved=False inplace=False conjugate=False",
    bert_padding.unpad_input: "hidden_states attention_mask unused_mask=None",
    bert_padding.pad_input: "hidden_states indices batch seqlen",
    bert_padding.index_first_axis: "input indices",
}
_DESCALES = "q_descale=None k_descale=None v_descale=None"
_WINDOWS = "window_size=(-1,-1) attention_chunk=0 softcap=0.0"
_SPLITS = "num_splits=1 pack_gqa=None deterministic=False"
_FLAGS_3 = (
    f"softmax_scale=None causal=False qv=None {_DESCALES} {_WINDOWS} {_SPLITS} sm_margin=0 "
    "return_attn_probs=False"
)
_USED = "seqused_q=None seqused_k=None"
_FLAGS_4 = (
    "softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 "
    f"{_SPLITS}"
)
_MODS_4 = "score_mod=None score_mod_bwd=None mask_mod=None"
_GATHER_4 = "gather_bwd_recompute_p=False gather_bwd_token_chunk=None"
# Of the interface of Hopper's folder in 2026, and of flash-attn-4 4.0.0b36.
NEWER: dict[Any, str] = {
    version_3.flash_attn_func: f"q k v {_FLAGS_3}",
    version_3.flash_attn_varlen_func: f"q k v {PACKING} {_USED} {_FLAGS_3}",
    version_3.flash_attn_qkvpacked_func: f"qkv softmax_scale=None causal=False {_DESCALES} "
    f"{_WINDOWS} deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    version_3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
    "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{_DESCALES} softmax_scale=None causal=False {_WINDOWS} rotary_interleaved=True "
    "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    version_3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    version_3.get_scheduler_metadata: "batch_size max_seqlen_q max_seqlen_k num_heads_q "
    "num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None "
    "cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False "
    "window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None "
    "sm_margin=0",
    cute.flash_attn_func: f"q k v qv=None gather_kv_indices=None {_FLAGS_4} {_MODS_4} "
    "aux_tensors=None aux_scalars=None block_sparse_tensors=None block_sparse_tensors_bwd=None "
    f"return_lse=False {_GATHER_4}",
    cute.flash_attn_varlen_func: "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None "
    f"max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None {_USED} gather_kv_indices=None "
    f"page_table=None {_FLAGS_4} {_MODS_4} block_sparse_tensors=None aux_tensors=None "
    "aux_scalars=None return_lse=False scheduler_metadata=None seqlen_k_per_split=None "
    f"disable_scheduler_metadata=False {_GATHER_4}",
}
EVERY = [
    *((getattr(flash_attn, name), text) for name, text in OPEN.items()),
    *((getattr(flash_attn_interface, name), text) for name, text in PASSES.items()),
    *BESIDE.items(),
    *NEWER.items(),
]


@pytest.mark.parametrize(("call", "text"), EVERY, ids=[call.__name__ for call, _ in EVERY])
def test_names_orders_and_defaults(call: Any, text: str) -> None:
    none = inspect.Parameter.empty
    found = [
        each.name if each.default is none else f"{each.name}={each.default!r}".replace(" ", "")
        for each in inspect.signature(call).parameters.values()
    ]
    assert found == text.split()


def test_the_passes_are_of_the_interface_alone() -> None:
    assert not any(hasattr(flash_attn, name) for name in PASSES)
