"""ViT on disk, in the Hugging Face layout: names of tensors, keys of the config, checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tilelab.models import folders
from tilelab.models.folders import CONFIG, WEIGHTS
from tilewise.errors import InvalidArgument, Unsupported

_PREFIX = "vit."  # of the encoder's tensors, in files of models with a head
# A ViT without a class token is another type: no library shall draw one for it.
_TYPE, _MEAN_TYPE = "vit", "tilewise-vit"

# What a layer's modules are called here and in the file.
_LAYER = {
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "layernorm_before",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "mlp_norm": "layernorm_after",
}
_ENDS = {
    "class_token": "embeddings.cls_token",
    "positions.weight": "embeddings.position_embeddings",
    "embed.weight": "embeddings.patch_embeddings.projection.weight",
    "embed.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
    "classifier.weight": "classifier.weight",
    "classifier.bias": "classifier.bias",
}
_HEAD = "classifier."  # without the prefix
# Of encoders that were trained otherwise: a head over the class token, a token for hidden patches.
_LEFT_OUT = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token")
# Keys of a config that decide what is computed: what each may say, and its meaning where absent.
_REQUIRED: dict[str, tuple[Any, Any]] = {"hidden_act": ("gelu", "gelu"), "qkv_bias": (True, True)}
_NUMBERS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "feed_forward": "intermediate_size",
    "image": "image_size",
    "patch": "patch_size",
    "channels": "num_channels",
}
# Hugging Face has one number for the first two; ours is beside it.
_DROPOUTS = {
    "residual_dropout": "hidden_dropout_prob",
    "embedding_dropout": "embedding_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
_CLASSES = 2  # of a file that says nothing, as Hugging Face takes it


def write(folder: Path, state: Mapping[str, Tensor], shape: Mapping[str, Any], eps: float) -> None:
    """Write the two files, each whole or not at all; files of an earlier save are replaced.

    Args:
        folder: made where it is missing.
        state: of the model.
        shape: its numbers by their names here.
        eps: of norms.
    """
    first = shape["pooling"] == "first"
    values: dict[str, Any] = {
        "architectures": ["ViTForImageClassification"] if first else [],
        "model_type": _TYPE if first else _MEAN_TYPE,
        "hidden_act": "gelu",
        "layer_norm_eps": eps,
        "qkv_bias": True,
        **{theirs: shape[ours] for ours, theirs in (*_NUMBERS.items(), *_DROPOUTS.items())},
        "id2label": {str(each): f"LABEL_{each}" for each in range(shape["classes"])},
        "label2id": {f"LABEL_{each}": each for each in range(shape["classes"])},
    }
    sides = (shape["channels"], shape["patch"], shape["patch"])
    tensors = {}
    for ours, theirs in _names(state).items():
        tensor = state[ours]
        if ours == "embed.weight":
            tensor = tensor.view(-1, *sides)
        elif ours in ("class_token", "positions.weight"):
            tensor = tensor.reshape(1, -1, shape["width"])
        name = theirs if theirs.startswith(_HEAD) else _PREFIX + theirs
        tensors[name] = tensor.contiguous()
    folders.write(folder, tensors, values)


def _names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return every parameter's name here -> in the file, without the prefix."""
    found = {}
    for name in state:
        if name in _ENDS:
            found[name] = _ENDS[name]
            continue
        _, index, rest = name.split(".", 2)
        module, _, part = rest.rpartition(".")
        found[name] = f"encoder.layer.{index}.{_LAYER[module]}.{part}"
    return found


def numbers(folder: Path, eps: float) -> dict[str, Any]:
    """Return the numbers of the ViT in a folder, by their names here.

    Args:
        folder: of the files.
        eps: the only one of norms that is known.

    Raises:
        InvalidArgument: no such folder, or it is of another model.
        Unsupported: a ViT that computes something else.
    """
    values = folders.read_config(folder, (_TYPE, _MEAN_TYPE))
    for key, (known, absent) in {**_REQUIRED, "layer_norm_eps": (eps, eps)}.items():
        if values.get(key, absent) != known:
            raise Unsupported(f"a ViT with {key} {values[key]!r}: only {known!r} is known")
    found: dict[str, Any] = {}
    for ours, theirs in _NUMBERS.items():
        value = values.get(theirs)
        if not isinstance(value, int):
            came = "nothing" if value is None else repr(value)
            raise InvalidArgument(CONFIG, f"{came} for {theirs}", "a whole number")
        found[ours] = value
    found |= {ours: values.get(theirs, 0.0) for ours, theirs in _DROPOUTS.items()}
    if _DROPOUTS["embedding_dropout"] not in values:
        found["embedding_dropout"] = found["residual_dropout"]
    labels = values.get("id2label")
    if not isinstance(labels, dict | None):
        raise InvalidArgument(CONFIG, f"{labels!r} for id2label", "an object, or null")
    found["classes"] = _CLASSES if labels is None else len(labels)
    found["pooling"] = "first" if values["model_type"] == _TYPE else "mean"
    return found


def read(
    folder: Path, state: Mapping[str, Tensor], patch: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the weights of a model from a folder.

    Args:
        folder: of the files.
        state: of the model as it was made: a head that the file lacks, or that has other classes
            there, stays so.
        patch: pixels of a side.

    Returns:
        the new state, and the names of what was not taken from the file.

    Raises:
        InvalidArgument: tensors of the encoder are missing, there are unknown ones, or one has
            another shape.
    """
    path = folder / WEIGHTS
    tensors, names = _tensors(path), _names(state)
    encoder = {theirs for theirs in names.values() if not theirs.startswith(_HEAD)}
    for words, odd in (
        ("no tensor", encoder - tensors.keys()),
        ("an unknown tensor", tensors.keys() - set(names.values())),
    ):
        if odd:
            required = f"the tensors of the ViT that {CONFIG} describes"
            raise InvalidArgument(str(path), f"{words} {min(odd)!r}", required)
    found, drawn = {}, []
    for ours, theirs in names.items():
        own, given = state[ours], tensors.get(theirs)
        if given is None or (theirs.startswith(_HEAD) and given.shape != own.shape):
            found[ours] = own
            drawn.append(ours)
            continue
        shape = [*own.shape]
        if ours == "embed.weight":
            shape = [len(own), own.shape[1] // patch**2, patch, patch]
        elif ours in ("class_token", "positions.weight"):
            shape = [1, own.numel() // own.shape[-1], own.shape[-1]]
        if list(given.shape) != shape:
            came = f"{theirs} of shape {list(given.shape)}"
            raise InvalidArgument(str(path), came, f"shape {shape}, as {CONFIG} says")
        found[ours] = given.reshape(own.shape)
    dtype = found["positions.weight"].dtype
    return {name: each.to(dtype) for name, each in found.items()}, tuple(drawn)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file that are of use, names without prefix, half types widened."""
    found = {name.removeprefix(_PREFIX): each for name, each in folders.read_tensors(path).items()}
    return {name: each for name, each in found.items() if name not in _LEFT_OUT}
