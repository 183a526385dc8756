"""Attention over sequences that several processes hold in parts (``torch.distributed``)."""

from tilewise.distributed.attention import context_parallel, context_parallel_attention
from tilewise.distributed.cache import split_cache_attention
from tilewise.distributed.costs import Comparison, Forecast, compare, forecast
from tilewise.distributed.layout import Layout, balanced_layout
from tilewise.distributed.peers import LostPeer
from tilewise.distributed.replay import LINKS, Link
from tilewise.distributed.sharding import shard, unshard

__all__ = [
    "LINKS",
    "Comparison",
    "Forecast",
    "Layout",
    "Link",
    "LostPeer",
    "balanced_layout",
    "compare",
    "context_parallel",
    "context_parallel_attention",
    "forecast",
    "shard",
    "split_cache_attention",
    "unshard",
]
