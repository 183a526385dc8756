"""``tilewise tune``: measures blocks for the GPU that is there, and keeps those that are faster.

It needs torch, Triton, numpy and the standard library only, and no compiled core.
"""

from tilelab.tune.command import main

__all__ = ["main"]
