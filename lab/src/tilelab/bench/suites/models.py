"""Suite ``models``: one attention layer of well-known models, from its input to its output.

Projections to queries, keys and values, attention with the model's mask and softcap, and the output
projection; without norms, rotations and the feed-forward part. The layer's width is taken to be
heads x head_dim, which is the model's own for most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilelab.bench.suites.steps import Settings, Step
from tilelab.bench.suites.timed import timed
from tilelab.peers.methods import exact
from tilelab.peers.work import Attend, Given, Pass, Work
from tilewise import masks, scores
from tilewise.inspect.known_models import KnownModel, known_model

SUITE = "models"
_SHORT = 1024  # every model is measured up to here, before any at its own length


def steps(settings: Settings) -> list[Step]:
    """Return every model at a short length, then those whose own length is within the sweep."""
    passes: tuple[tuple[Pass, str], ...] = (("forward", "forward"), ("both", "training"))
    works = [
        _work(name, length, dtype, way, words, settings)
        for (name, length), dtype, (way, words) in product(
            _sizes(settings), settings.dtypes, passes
        )
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex), layer)


def _sizes(settings: Settings) -> list[tuple[str, int]]:
    longest = max(settings.lengths)
    short = [(name, min(known_model(name).length, _SHORT, longest)) for name in settings.models]
    whole = [(name, known_model(name).length) for name in settings.models]
    return list(dict.fromkeys([*short, *(each for each in whole if each[1] <= longest)]))


def _work(name: str, length: int, dtype: str, passes: Pass, words: str, settings: Settings) -> Work:
    model = known_model(name)
    return Work(
        SUITE,
        f"{name}, {words}",
        length,
        dtype,
        model.heads,
        model.kv_heads,
        model.head_dim,
        passes=passes,
        mask=_mask(model),
        score=None if model.softcap is None else scores.softcap(model.softcap),
        flex_score=None if model.softcap is None else _softcap(model.softcap),
        device=settings.device,
    )


def _mask(model: KnownModel) -> Any:
    if model.window is not None:
        return masks.window(model.window, 0)
    return masks.causal() if model.causal else None


def _softcap(cap: float) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: cap * torch.tanh(s / cap)


def layer(work: Work, given: Given, attend: Attend) -> Callable[[], Any]:
    """The call of a layer that attends in this way; for training, gradients of input and weights.

    Args:
        work: what is measured.
        given: tensors of the attention alone; the layer has its own.
        attend: the attention.
    """
    generator = torch.Generator().manual_seed(1)
    width = work.heads * work.head_dim
    rows = (work.heads + 2 * work.kv_heads) * work.head_dim
    dtype, training = given.q.dtype, work.passes != "forward"

    def drawn(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, generator=generator) * scale
        return made.to(dtype).to(work.device).requires_grad_(training)

    x = drawn(work.batch, work.length, width)
    inwards, outwards = (drawn(out, width, scale=width**-0.5) for out in (rows, width))
    grad = torch.ones_like(x)

    def forward() -> Tensor:
        made = torch.nn.functional.linear(x, inwards)
        made = made.view(work.batch, work.length, -1, work.head_dim)
        sizes = [work.heads, work.kv_heads, work.kv_heads]
        q, k, v = (part.transpose(1, 2) for part in torch.split(made, sizes, dim=2))
        return torch.nn.functional.linear(attend(q, k, v).transpose(1, 2).flatten(2), outwards)

    if not training:
        return forward
    return lambda: torch.autograd.grad(forward(), (x, inwards, outwards), grad)
