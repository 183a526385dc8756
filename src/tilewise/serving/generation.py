"""Greedy decoding of many prompts at once: sequences end, and others take their place."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise.checks import check_tensor
from tilewise.errors import InvalidArgument, OutOfPages
from tilewise.serving.caches import PagedKVCache


class Attend(Protocol):
    """A layer's attention in a step: appends the new keys and values, and attends over all.

    It returns the output [T, Hq, Dv].

    Args:
        layer: which of the caches is its.
        q: [T, Hq, D], packed as the tokens are.
        k: [T, Hk, D].
        v: [T, Hk, Dv]; None if its cache is latent.
        keywords: those of ``PagedKVCache.attend``.
    """

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, **keywords: Any
    ) -> Tensor:
        """Return the output [T, Hq, Dv]."""
        ...


class Step(Protocol):
    """A model in a step: returns the logits [B, V] of what comes after some of the tokens.

    Tokens of several sequences lie one after the other, those of one in order.

    Args:
        tokens: int64 [T].
        positions: int64 [T], of each token in its sequence.
        rows: int64 [B]: the tokens whose next ones are wanted, the last of each sequence.
        attend: the attention of each layer.
    """

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend, /
    ) -> Tensor:
        """Return the logits [B, V]."""
        ...


@dataclass(eq=False)
class _Running:
    """One prompt that is being continued.

    The caches have ``length`` of its tokens; ``pending`` are new to them. It has a number in each
    cache (``sequences``), and may need ``reserved`` pages of each.
    """

    index: int
    pending: list[int]
    sequences: list[int]
    reserved: list[int]
    length: int = 0
    found: list[int] = field(default_factory=list)


def generate(
    step: Step,
    caches: Sequence[PagedKVCache],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int | Sequence[int],
    stop: int | Iterable[int] = (),
    concurrent: int = 64,
) -> list[list[int]]:
    """Continue prompts by the token with the largest logit, the first of equal ones.

    Every round is one step over the new tokens of all running sequences, packed: the whole prompt
    of those that just came, one token of the others. A sequence that ends gives its pages back. The
    next prompt, in order, starts as soon as the others leave the pages that it may need at most. A
    running sequence is never removed early.

    Attention gives a sequence the same bits as it has alone. A model's matrix products may not, so
    near ties may be decided differently in another batch.

    Args:
        step: of a model, such as ``tilelab.models.decoding.step`` or
            ``integrations.transformers.paged_step`` makes.
        caches: one for each layer that attends, all on one device, with sequences of nobody else
            added meanwhile.
        prompts: the tokens of each, one at least.
        new_tokens: how many to find, for all prompts or for each, 1 or more.
        stop: tokens that end a sequence; one that is found is its last.
        concurrent: how many sequences run at once at most.

    Returns:
        The tokens found for each prompt. No sequence of these stays in the caches.

    Raises:
        InvalidArgument: naming the argument that is wrong.
        OutOfPages: a prompt with its new tokens needs more pages than a cache has free.
    """
    counts = _checked(caches, prompts, new_tokens, concurrent)
    stops = frozenset((stop,) if isinstance(stop, int) else stop)
    free = [cache.free_pages for cache in caches]
    needs = [
        [cache.pages_for(len(prompt), len(prompt) + count - 1) for cache in caches]
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    for each in needs:
        for cache, need, left in zip(caches, each, free, strict=True):
            if need > left:
                raise OutOfPages(need, left, cache.pages)
    results: list[list[int]] = [[] for _ in prompts]
    waiting = deque(range(len(prompts)))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < concurrent and _fits(needs[waiting[0]], free):
                index = waiting.popleft()
                free = [left - need for left, need in zip(free, needs[index], strict=True)]
                sequences = [cache.add() for cache in caches]
                running.append(_Running(index, list(prompts[index]), sequences, needs[index]))
            for one, token in zip(running, _round(step, caches, running), strict=True):
                one.length += len(one.pending)
                one.pending = [token]
                one.found.append(token)
            for one in [x for x in running if _ends(x, counts, stops)]:
                results[one.index] = one.found
                running.remove(one)
                free = [left + need for left, need in zip(free, one.reserved, strict=True)]
                _remove(caches, one)
    finally:
        for one in running:
            _remove(caches, one)
    return results


def _round(step: Step, caches: Sequence[PagedKVCache], running: list[_Running]) -> list[int]:
    """Return the next token of each running sequence."""
    device = caches[0].k_pages.device
    tokens = [token for one in running for token in one.pending]
    places = [one.length + i for one in running for i in range(len(one.pending))]
    counts = torch.tensor([len(one.pending) for one in running])
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor | None, **keywords: Any) -> Tensor:
        sequences = [one.sequences[layer] for one in running]
        caches[layer].append(sequences, k, v, starts)
        out: Tensor = caches[layer].attend(sequences, q, cu_seqlens_q=starts, **keywords)
        return out

    with torch.no_grad():
        last = (starts[1:] - 1).to(device)
        packed = torch.tensor([tokens, places], device=device)
        logits = step(packed[0], packed[1], last, attend)
        required = f"logits [{len(running)}, V], a row for each sequence that runs"
        check_tensor("step", logits, required, shape=(len(running), None))
        found: list[int] = logits.argmax(-1).tolist()
    return found


def _ends(one: _Running, counts: Sequence[int], stops: frozenset[int]) -> bool:
    return len(one.found) == counts[one.index] or one.found[-1] in stops


def _fits(need: list[int], free: list[int]) -> bool:
    return all(pages <= left for pages, left in zip(need, free, strict=True))


def _remove(caches: Sequence[PagedKVCache], one: _Running) -> None:
    for cache, sequence in zip(caches, one.sequences, strict=True):
        cache.remove(sequence)


def _checked(
    caches: Sequence[PagedKVCache],
    prompts: Sequence[Sequence[int]],
    new_tokens: int | Sequence[int],
    concurrent: int,
) -> list[int]:
    """Return how many tokens each prompt is to be continued by."""
    if not caches:
        raise InvalidArgument("caches", "none", "one for each layer")
    if concurrent < 1:
        raise InvalidArgument("concurrent", str(concurrent), "1 or more")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InvalidArgument("prompts", f"no tokens in prompt {index}", "one at least")
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    if len(counts) != len(prompts):
        required = f"one number, or one for each of {len(prompts)} prompts"
        raise InvalidArgument("new_tokens", f"{len(counts)} numbers", required)
    if min(counts, default=1) < 1:
        raise InvalidArgument("new_tokens", str(min(counts)), "1 or more")
    return counts
