"""The versions of packages whose interfaces ``tilewise.compat`` has."""

FLASH_ATTN_VERSION = "2.8.3"
FLASH_ATTN_3_VERSION = "3.0.0"
XFORMERS_VERSION = "0.0.35"
