"""flash-attn's Python interface over tilewise: its names, orders, defaults and layouts.

``tilewise.compat.install("flash_attn")`` makes ``import flash_attn`` find it. What is covered is in
``docs/compatibility.md``.
"""

from tilewise.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# The version whose interface this is.
__version__ = "2.8.3"
