"""Problems by their sizes."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.problem import Problem


def problem(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    queries: int = 64,
    keys: int = 64,
    **more: Any,
) -> Problem:
    """A dense problem in float16 with D = Dv = 32, unless ``more`` says otherwise."""
    fields: dict[str, Any] = {
        "head_dim": 32,
        "value_dim": 32,
        "dtype": torch.float16,
        "device": "cpu",
        "layout": "dense",
        "mask": (),
        "score": (),
        "scale": 1.0,
        "dropout_p": 0.0,
        "sinks": False,
        **more,
    }
    return Problem(batch, heads, kv_heads, queries, keys, **fields)
