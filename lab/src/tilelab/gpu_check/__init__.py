"""The check of the GPU backend on a GPU: exact, repeatable, O(N) memory, and how fast.

It needs torch, numpy and the standard library only, and no compiled core.
"""

from tilelab.gpu_check.command import main

__all__ = ["main"]
