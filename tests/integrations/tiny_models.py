"""Small models of transformers with random weights, by eager and by tilewise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS = 99
WINDOW = 6


class Tiny(NamedTuple):
    """A model's class, its config's class, and the sizes of the config."""

    model: str
    config: str
    sizes: dict[str, Any]


_LLAMA = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Weights so large that attention is far from even: a wrong scale or mask is seen.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_EXPERTS = {
    "mlp_layer_types": ["dense", "sparse"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LINEAR = {
    **_LATENT,
    **_EXPERTS,
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 4,
}
LATENT = {
    "deepseek_v2": Tiny("DeepseekV2ForCausalLM", "DeepseekV2Config", {**_LATENT, **_EXPERTS}),
    "deepseek_v3": Tiny("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_LATENT, **_EXPERTS}),
    "axk1": Tiny("AXK1ForCausalLM", "AXK1Config", {**_LATENT, **_EXPERTS}),
    "glm4_moe_lite": Tiny("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**_LATENT, **_EXPERTS}),
    "mistral4": Tiny("Mistral4ForCausalLM", "Mistral4Config", {**_LATENT, **_EXPERTS}),
    "minicpm3": Tiny("MiniCPM3ForCausalLM", "MiniCPM3Config", _LATENT),
    "youtu": Tiny("YoutuForCausalLM", "YoutuConfig", _LATENT),
    "longcat_flash": Tiny(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            **{name: _LATENT[name] for name in _LATENT.keys() - {"num_hidden_layers"}},
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "bailing_hybrid": Tiny(
        "BailingHybridForCausalLM", "BailingHybridConfig", {**_LINEAR, "head_dim": 16}
    ),
    "kimi_linear": Tiny(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {**_LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    ),
}
# Layers whose indexer chooses keys for each query: fewer than the queries of the tests see.
_INDEXED = {
    **_LATENT,
    **_EXPERTS,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "dense"],
    # So many that no key has a score of 0 by all of them: of equal ones any may be chosen.
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 5,
}
_SHARING = {**_INDEXED, "indexer_types": ["full", "shared", "full"]}
INDEXED = {
    "deepseek_v32": Tiny("DeepseekV32ForCausalLM", "DeepseekV32Config", _INDEXED),
    "axk2": Tiny("AXK2ForCausalLM", "AXK2Config", _INDEXED),
    "glm_moe_dsa": Tiny("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _SHARING),
    "hy_v4": Tiny(
        "HYV4ForCausalLM",
        "HYV4Config",
        {**_SHARING, "head_dim": 16, "learnable_sink_init": 0.5},
    ),
    "dots3_note": Tiny(
        "Dots3NoteForCausalLM",
        "Dots3NoteTextConfig",
        {
            **_INDEXED,
            "head_dim": 16,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": WINDOW,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 12,
            "shared_experts_intermediate_size": 32,
        },
    ),
    "mistral_large4": Tiny(
        "MistralLarge4ForConditionalGeneration",
        "MistralLarge4Config",
        {
            "text_config": {**_SHARING, "kv_source_layers": [0, 0, 2]},
            "vision_config": {**_ENCODER, "model_type": "pixtral", "image_size": 28},
        },
    ),
    "qwen4_exp": Tiny(
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {
            **_LLAMA,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32,
            "indexer_n_heads": 12,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
            "layer_types": ["indexed_attention", "indexed_attention"],
        },
    ),
    "deepseek_v4": Tiny(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **_LLAMA,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "hc_mult": 2,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "index_n_heads": 12,
            "index_head_dim": 16,
            "index_topk": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "minimax_m3_vl": Tiny(
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rotary_dim": 8,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        },
    ),
    "glm5_next": Tiny(
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        {
            "text_config": {
                **_SHARING,
                "qk_rope_head_dim": 0,
                "index_topk": 6,
                "index_kpool": 2,
                "layer_types": ["indexed_attention"] * 3,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "image_size": 28,
                "intermediate_size": 32,
                "out_hidden_size": 64,
                "projection_intermediate_size": 32,
            },
        },
    ),
}
DECODERS = {
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "mistral": Tiny("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": WINDOW}),
    "gemma2": Tiny(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_LLAMA,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
        },
    ),
    "qwen3": Tiny(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            **_LLAMA,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "gpt_oss": Tiny(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_LLAMA,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gpt2": Tiny(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": TOKENS,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
# Decoders with a number for each pair of tokens: a bias of the distance, or a gate.
DENSE = {
    # Each query has a sink of its own.
    "inkling2": Tiny(
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        {
            **_LLAMA,
            "head_dim": 16,
            "swa_head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": WINDOW,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "unpadded_vocab_size": TOKENS,
        },
    ),
    # Its layers add a gate to the tensor of the model's mask.
    "doge": Tiny("DogeForCausalLM", "DogeConfig", {**_LLAMA, "keep_window_size": WINDOW}),
}
_T5 = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
ENCODER_DECODERS = {
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", _T5),
    # Its decoder appends the encoder's mask to its own.
    "t5gemma2": Tiny(
        "T5Gemma2ForConditionalGeneration",
        "T5Gemma2Config",
        {
            "encoder": {
                "text_config": {**_GEMMA, "model_type": "t5gemma2_text"},
                "vision_config": {**_ENCODER, "model_type": "siglip_vision_model"},
                "image_token_index": 90,
            },
            "decoder": _GEMMA,
            "image_token_index": 90,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    # Its routers look up padding in the mask.
    "nllb_moe": Tiny(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            "vocab_size": TOKENS,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_sparse_step": 1,
            "decoder_sparse_step": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "dropout": 0.0,
            "num_experts": 4,
            "init_std": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
}
_WHISPER = {
    "vocab_size": TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
MODELS = {
    **DECODERS,
    **DENSE,
    **LATENT,
    **INDEXED,
    "bert": Tiny(
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": TOKENS, "max_position_embeddings": 64},
    ),
    **ENCODER_DECODERS,
    "whisper": Tiny("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    # Its convolutions look up padding in the mask.
    "lasr": Tiny(
        "LasrForCTC",
        "LasrCTCConfig",
        {
            "vocab_size": TOKENS,
            "pad_token_id": 0,
            "encoder_config": {
                **_ENCODER,
                "num_key_value_heads": 4,
                "num_mel_bins": 8,
                "subsampling_conv_channels": 16,
                "conv_kernel_size": 8,
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "activation_dropout": 0.0,
                "layerdrop": 0.0,
            },
        },
    ),
    "vit": Tiny(
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5},
    ),
}


def both(name: str) -> tuple[Any, Any]:
    """The model by eager and by tilewise, with the same weights."""
    import transformers

    tiny = MODELS[name]
    experts = {"experts_implementation": "eager"} if name == "gpt_oss" else {}
    made = []
    for kind in ("eager", "tilewise"):
        torch.manual_seed(0)
        config = getattr(transformers, tiny.config)(**tiny.sizes)
        model = getattr(transformers, tiny.model)
        made.append(model._from_config(config, attn_implementation=kind, **experts).eval())
    eager, ours = made
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "tilewise"
    return eager, ours


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random ones, none of them special."""
    return torch.randint(3, TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
    """Standard normal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(name: str) -> dict[str, Tensor]:
    """What the model is called with: more tokens than its window has."""
    if name == "vit":
        return {"pixel_values": noise(2, 3, 16, 16)}
    if name == "lasr":
        real = torch.ones(2, 48, dtype=torch.long)
        real[1, 32:] = 0
        return {"input_features": noise(2, 48, 8), "attention_mask": real}
    if name == "whisper":
        return {"input_features": noise(2, 8, 24), "decoder_input_ids": tokens(2, 11)}
    if name in ENCODER_DECODERS:
        return {"input_ids": tokens(3, 17), "decoder_input_ids": tokens(3, 11, seed=3)}
    return {"input_ids": tokens(3, 17)}


def assert_equal_to_float32(
    found: Tensor, expected: Tensor, what: str = "", least: float = 1.0
) -> None:
    """Equal but for the rounding of float32: 1e-5 of the largest number, or of ``least``."""
    size = max(least, float(expected.detach().abs().max()))
    error = float((found - expected).detach().abs().max())
    assert error <= 1e-5 * size, f"{what}: {error} of {size}"
