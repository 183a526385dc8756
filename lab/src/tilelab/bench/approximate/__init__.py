"""Approximate and sparse attention as published: small references to measure exact attention with.

Each function takes q [B, H, N, D], k and v [B, H, N, D | Dv], and autograd can differentiate it.
Its cost is that of its paper, not N x N. ``keys`` (bool [N]) says which keys there are; the others
are padding. None is tuned: each is what a reader of the paper would write in torch.
"""

from tilelab.bench.approximate.bigbird import bigbird
from tilelab.bench.approximate.linear import linear
from tilelab.bench.approximate.linformer import linformer
from tilelab.bench.approximate.local import local
from tilelab.bench.approximate.longformer import longformer
from tilelab.bench.approximate.performer import performer
from tilelab.bench.approximate.reformer import reformer

__all__ = ["bigbird", "linear", "linformer", "local", "longformer", "performer", "reformer"]
