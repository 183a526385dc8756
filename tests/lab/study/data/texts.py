"""Small corpora of tokens that never were in a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilelab.study.data.tokens import Tokens


def tokens_of(
    train: NDArray[Any], held_out: NDArray[Any] | None = None, vocabulary: int = 256, **changes: Any
) -> Tokens:
    """Tokens that stand for one byte each.

    Args:
        train, held_out: token ids; nothing is held out where only one is given.
        vocabulary: token ids.
        changes: other fields.
    """
    held_out = train[:0] if held_out is None else held_out
    made = Tokens(
        name="a made up text",
        source="made up",
        tokenizer="bytes",
        sha256="0" * 64,
        vocabulary=vocabulary,
        train=train,
        held_out=held_out,
        token_bytes=np.ones(vocabulary, np.int64),
        train_bytes=len(train),
        held_out_bytes=len(held_out),
        train_words=None,
        held_out_words=None,
        decode=lambda tokens: bytes(tokens).decode(errors="replace"),
    )
    return replace(made, **changes)
