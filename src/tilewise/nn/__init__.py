"""Modules: attention layers over ``tilewise.attention``, and rotary position embedding."""

from tilewise.nn.attention import Attention
from tilewise.nn.implementations import Implementation
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.rotation import Rotary, rotary
from tilewise.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Attention",
    "Implementation",
    "MultiheadAttention",
    "Rotary",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "rotary",
]
