"""GPT-2 with a paged cache: what ``tilewise.serving.generate`` asks of a model."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor

from tilelab.models.gpt2 import GPT2
from tilelab.models.layers import Layer
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Attention, Rotary, rotary
from tilewise.serving import Attend, PagedKVCache, Step
from tilewise.variants.values import as_mask, as_score


def caches(model: GPT2, *, pages: int, page_size: int, **keywords: Any) -> list[PagedKVCache]:
    """Return a cache for each layer; with a window where the layer's mask is one.

    ``keywords`` are others of ``PagedKVCache``, such as ``storage``.

    Raises:
        Unsupported: as ``step``.
    """
    made = []
    for layer in _layers(model):
        attention = layer.attention
        _check(attention)
        weight = attention.key.weight
        sizes = {"kv_heads": attention.kv_heads, "head_dim": attention.head_dim}
        given = {"dtype": weight.dtype, "device": weight.device, "window": _window(attention)}
        made.append(
            PagedKVCache(pages=pages, page_size=page_size, **{**sizes, **given, **keywords})
        )
    return made


def step(model: GPT2) -> Step:
    """Return the model's step, for ``generate``; in evaluation mode.

    Raises:
        InvalidArgument: the model is in training mode.
        Unsupported: the model has a pattern, or a layer's mask or score counts queries from the
            first one of a call (only bands aligned bottom right, ALiBi and softcap say the same of
            one query as of all).
    """
    layers = _layers(model)
    for layer in layers:
        _check(layer.attention)
    if model.pattern is not None:
        what = "decoding with a pattern of blocks, which counts queries from the first"
        raise Unsupported(what, fix="use a variant whose mask is a causal window")
    if model.training:
        raise InvalidArgument("model", "one in training mode", "evaluation mode", "model.eval()")

    def run(tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        last = int(positions.max())
        if last >= model.shape.context:
            required = f"no more tokens than the model's context of {model.shape.context}"
            raise InvalidArgument("prompts", f"one with a token at position {last}", required)
        x = model.embedded(tokens, positions)
        for index, layer in enumerate(layers):
            x = layer(x, partial(_attended, layer.attention, index, attend, positions))
        return model.logits(model.norm(x[rows]))

    return run


def _layers(model: GPT2) -> list[Layer]:
    return cast("list[Layer]", list(model.layers))


def _attended(
    attention: Attention, index: int, attend: Attend, positions: Tensor, x: Tensor
) -> Tensor:
    """Return the attention of a layer over its cache, [T, width] to the same; positions [T]."""
    q, k, v = (
        project(x).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.query, attention.key, attention.value)
    )
    if attention.query_norm is not None and attention.key_norm is not None:
        q, k = attention.query_norm(q), attention.key_norm(k)
    if attention.rotary is not None:
        q, k = (_rotated(each, positions, attention.rotary) for each in (q, k))
    words = {"mask": attention.mask, "score": attention.score, "scale": attention.scale}
    out: Tensor = attention.output(attend(index, q, k, v, **words).flatten(1))
    return out


def _rotated(rows: Tensor, positions: Tensor, how: Rotary) -> Tensor:
    """Rows [T, H, D], each turned by its own position."""
    return rotary(rows.transpose(0, 1)[None], positions, **how._asdict())[0].transpose(0, 1)


def _window(attention: Attention) -> int | None:
    """Return how many keys a query sees where the mask is a causal window."""
    program = () if attention.mask is None else as_mask(attention.mask).program
    if len(program) == 1 and program[0].op == "band" and program[0].params[1] == 0:
        left = int(program[0].params[0])
        return None if left < 0 else left + 1
    return None


def _check(attention: Attention) -> None:
    mask = () if attention.mask is None else as_mask(attention.mask).program
    score = () if attention.score is None else as_score(attention.score).program
    for name, program in (("mask", mask), ("score", score)):
        for instr in program:
            band = instr.op == "band" and instr.params[2] == 1
            relative = instr.op in ("softcap", "and", "or", "not", "below") and not instr.slots
            slopes = instr.op == "alibi" and not instr.params
            if not (band or relative or slopes):
                raise Unsupported(
                    f"decoding with a {name} of {instr.op}, which may count queries from the first",
                    fix="use masks.causal(), masks.window(), scores.alibi or scores.softcap",
                )
