"""The versions of flash-attn whose interfaces ``tilewise.compat.flash_attn`` has."""

FLASH_ATTN_VERSION = "2.8.3"
FLASH_ATTN_3_VERSION = "3.0.0"
