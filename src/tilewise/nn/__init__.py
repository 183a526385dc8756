"""Modules: attention layers over ``tilewise.attention``, and rotary position embedding."""

from tilewise.head_rows import HeadNorm
from tilewise.nn.attention import Attention
from tilewise.nn.conversion import Conversion, Place, convert
from tilewise.nn.implementations import Implementation
from tilewise.nn.multihead import MultiheadAttention
from tilewise.nn.rotation import (
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
    rotary,
)
from tilewise.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Attention",
    "Conversion",
    "DynamicNtkScaling",
    "HeadNorm",
    "Implementation",
    "LinearScaling",
    "Llama3Scaling",
    "MultiheadAttention",
    "NtkScaling",
    "Place",
    "Rotary",
    "RotaryScaling",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "YarnScaling",
    "convert",
    "rotary",
]
