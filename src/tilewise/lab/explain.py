"""``tilewise explain``: the plan for a problem that is given by its shape, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import tilewise
from tilewise.variants import masks, scores

__all__ = ["main"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(argv: Sequence[str] | None = None) -> int:
    """Print how a call of this shape would be done, and why no other backend would do it."""
    options = _parser().parse_args(argv)
    batch, heads, queries, head_dim = options.shape
    kv_heads, keys = options.kv_heads or heads, options.keys or queries
    value_dim = options.value_dim or head_dim
    dtype = getattr(torch, options.dtype)
    # Nobody touches these, so the system gives them no memory, however large they are.
    q = torch.empty(batch, heads, queries, head_dim, dtype=dtype)
    k = torch.empty(batch, kv_heads, keys, head_dim, dtype=dtype)
    v = torch.empty(batch, kv_heads, keys, value_dim, dtype=dtype)
    print(
        tilewise.explain(
            q,
            k,
            v,
            mask=_mask(options),
            score=scores.softcap(options.softcap) if options.softcap else None,
            dropout_p=options.dropout,
            backend=options.backend,
        )
    )
    return 0


def _mask(options: argparse.Namespace) -> masks.Mask | None:
    if options.window is not None:
        return masks.window(options.window, options.window)
    return masks.causal() if options.causal else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise explain",
        description="How a problem would be done: backend, tiles, and why no other backend.",
        epilog="In Python, tilewise.explain(q, k, v, ...) explains any call.",
    )
    add = parser.add_argument
    add("shape", nargs=4, type=int, metavar="SIZE", help="the queries: B HQ M D")
    add("--keys", type=int, metavar="N", help="number of keys (default M)")
    add("--kv-heads", type=int, metavar="HK", help="key/value heads (default HQ)")
    add("--value-dim", type=int, metavar="DV", help="width of the values (default D)")
    add("--dtype", choices=_DTYPES, default="float32")
    add("--dropout", type=float, default=0.0, metavar="P")
    add("--softcap", type=float, metavar="CAP")
    add("--backend", help="ask for this backend instead of choosing")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--causal", action="store_true", help="causal, aligned bottom right")
    which.add_argument("--window", type=int, metavar="W", help="W keys to either side")
    return parser
