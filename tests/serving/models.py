"""Prompts, and what a model says of one of them alone, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tilewise.serving import PagedKVCache, Step, generate


def drawn_prompts(count: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Random ones of different lengths, from 1 to ``longest``."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def one_at_a_time(
    step: Step,
    caches: Sequence[PagedKVCache],
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    stop: Iterable[int],
) -> list[list[int]]:
    """Each prompt by a call of its own."""
    return [
        generate(step, caches, [prompt], new_tokens=count, stop=stop)[0]
        for prompt, count in zip(prompts, counts, strict=True)
    ]
