"""Modules: attention layers over ``tilewise.attention``, and rotary position embedding."""

from tilewise.nn.attention import Attention
from tilewise.nn.conversion import Conversion, Place, convert
from tilewise.nn.implementations import Implementation
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.rotation import Rotary, rotary
from tilewise.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Attention",
    "Conversion",
    "Implementation",
    "MultiheadAttention",
    "Place",
    "Rotary",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "convert",
    "rotary",
]
