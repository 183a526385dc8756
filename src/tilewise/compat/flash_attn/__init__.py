"""flash-attn's Python interface over tilewise: its names, orders, defaults and layouts.

``tilewise.compat.install("flash_attn")`` makes ``import flash_attn`` find it.
``docs/compatibility.md`` lists what it covers.
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
from tilewise.compat.stand_in_version import FLASH_ATTN_VERSION

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

__version__ = FLASH_ATTN_VERSION  # whose interface this is
