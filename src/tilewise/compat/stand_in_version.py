"""The version of flash-attn whose interface ``tilewise.compat.flash_attn`` has."""

FLASH_ATTN_VERSION = "2.8.3"
