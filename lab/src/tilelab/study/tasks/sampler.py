"""Sample text from a model, a token at a time."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from tilelab.models.gpt2 import GPT2

__all__ = ["PROMPT_TOKENS", "printable", "sample"]

PROMPT_TOKENS = 64
_UNSEEN = ("Cc", "Cf", "Co", "Cn")  # controls, marks of direction, and what is no character


@torch.no_grad()
def sample(
    model: GPT2, prompt: Sequence[int], count: int, seed: int, autocast: torch.dtype | None = None
) -> list[int]:
    """Return tokens that the model puts after a prompt, drawn from its own distribution.

    Its mode and torch's random state are left as they were. Models that agree write the same: the
    same numbers are drawn whatever the model is.

    Args:
        model: it sees its last ``context`` tokens.
        prompt: one token or more.
        count: of tokens.
        seed: of what is drawn.
        autocast: the dtype of matrix multiplications; None for that of the weights.

    Returns:
        ``count`` tokens, without the prompt.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    tokens = list(prompt)
    was_training = model.training
    model.eval()
    try:
        for draw in draws:
            seen = torch.tensor([tokens[-model.shape.context :]], device=device)
            with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                logits = model(seen)
            sums = logits[0, -1].double().softmax(0).cumsum(0)
            # The first token whose sum is above: a draw in [0, 1) of the last sum, which rounds.
            index = torch.searchsorted(sums, draw * sums[-1], right=True)
            tokens.append(int(index.clamp(max=len(sums) - 1)))
    finally:
        model.train(was_training)
    return tokens[len(prompt) :]


def printable(text: str) -> str:
    """Return the text with U+FFFD for every character that is not seen, but newlines and tabs."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(each) in _UNSEEN and each not in "\n\t"
        else each
        for each in text
    )
