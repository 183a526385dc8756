"""Keys and values kept from call to call: in one piece, or in pages that sequences share."""

from tilewise.serving.cascade import cascade_attention
from tilewise.serving.contiguous import KVCache
from tilewise.serving.generation import Attend, Step, generate
from tilewise.serving.paged import PagedKVCache
from tilewise.serving.sequences import PageAllocator

__all__ = [
    "Attend",
    "KVCache",
    "PageAllocator",
    "PagedKVCache",
    "Step",
    "cascade_attention",
    "generate",
]
