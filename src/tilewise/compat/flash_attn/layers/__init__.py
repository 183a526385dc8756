"""Layers of flash-attn: rotary position embedding."""
