"""flash-attn's two functions on a CPU, forward and backward: exact, in O(N) memory.

``scripts/hf_kernel.py`` puts this file above the modules of tilewise that it needs.
"""

from .compat.flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
