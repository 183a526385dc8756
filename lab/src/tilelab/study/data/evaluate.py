"""The loss of a model on the held-out text, in nats, bits per byte and per original word."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tilelab.study.data.order import Windows
from tilelab.study.data.tokens import Tokens

__all__ = ["Score", "evaluate", "word_perplexity"]

_LOGITS_BYTES = 1 << 28  # the most that the logits of one forward pass may take, in float32
_MOST_ROWS = 8


class Score(NamedTuple):
    """The loss of a model on the targets that count.

    Args:
        nats: sum of their cross-entropies.
        tokens: how many they are.
        bytes: of the text that they stand for.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between tokenizers."""
        return self.nats / self.bytes / math.log(2)


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: Windows, tokens: Tokens, autocast: torch.dtype | None = None
) -> Score:
    """Score a model, without dropout; its mode and the random state are left as they were.

    The same windows go through the model in the same groups whatever is compared, and
    cross-entropies are taken in float32 and added in float64.

    Args:
        model: tokens [B, S] -> logits [B, S, V].
        windows: what is scored.
        tokens: the text that the windows are of, for the bytes of each token.
        autocast: the dtype of matrix multiplications; None for that of the weights.
    """
    device = next(model.parameters()).device
    byte_count = torch.from_numpy(tokens.token_bytes)
    rows = _LOGITS_BYTES // (4 * windows.context * tokens.vocabulary)
    nats, count, size = 0.0, 0, 0
    was_training = model.training
    model.eval()
    try:
        for part in windows.parts(min(max(rows, 1), _MOST_ROWS)):
            with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                logits = model(*(each.to(device) for each in part.model_inputs))
            targets = part.targets.to(device).flatten()
            losses = functional.cross_entropy(
                logits.flatten(0, 1).float(), targets, reduction="none"
            )
            counted = part.counted.flatten()
            nats += losses[counted.to(device)].double().sum().item()
            count += int(counted.sum())
            size += int(byte_count[part.targets.flatten()[counted]].sum())
    finally:
        model.train(was_training)
    return Score(nats, count, size)


def word_perplexity(score: Score, tokens: Tokens) -> float | None:
    """exp(nats per original word), None for a text whose original words are not known.

    ``exp(nats / score.bytes * bytes / (words - 1))`` with the bytes of the held-out text after its
    first token and its ``words`` before it was detokenised. For the full strided pass, where
    ``score.bytes == bytes``, that is ``exp(nats / (words - 1))``: neither the first token nor the
    first word is predicted. For a sample of windows it is the same, estimated from that sample.

    Args:
        score: of windows of the held-out text.
        tokens: that text.

    Source: the adjusted perplexity of Megatron-LM (Shoeybi et al. 2019).
    """
    if tokens.held_out_words is None:
        return None
    bytes_after_first = tokens.held_out_bytes - int(tokens.token_bytes[tokens.held_out[0]])
    return _exp(score.nats / score.bytes * bytes_after_first / (tokens.held_out_words - 1))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
