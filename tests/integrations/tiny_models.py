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
    "bert": Tiny(
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": TOKENS, "max_position_embeddings": 64},
    ),
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", _T5),
    "whisper": Tiny("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
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
    if name == "whisper":
        return {"input_features": noise(2, 8, 24), "decoder_input_ids": tokens(2, 11)}
    if name == "t5":
        return {"input_ids": tokens(3, 17), "decoder_input_ids": tokens(3, 11, seed=3)}
    return {"input_ids": tokens(3, 17)}


def assert_equal_to_float32(
    found: Tensor, expected: Tensor, what: str = "", least: float = 1.0
) -> None:
    """Equal but for the rounding of float32: 1e-5 of the largest number, or of ``least``."""
    size = max(least, float(expected.detach().abs().max()))
    error = float((found - expected).detach().abs().max())
    assert error <= 1e-5 * size, f"{what}: {error} of {size}"
