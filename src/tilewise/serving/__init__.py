"""Keys and values kept from call to call: in one piece, or in pages that sequences share."""

from tilewise.serving.caches import KVCache, PagedKVCache
from tilewise.serving.cascade import cascade_attention
from tilewise.serving.generation import Attend, Step, generate
from tilewise.serving.pages import PageAllocator

__all__ = [
    "Attend",
    "KVCache",
    "PageAllocator",
    "PagedKVCache",
    "Step",
    "cascade_attention",
    "generate",
]
