"""flash-attn's names for rotary position embedding."""

from tilewise.compat.flash_attn.layers.embedding import (
    RotaryEmbedding,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from tilewise.compat.flash_attn.layers.tables import (
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_torch,
)

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]
