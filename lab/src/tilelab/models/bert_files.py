"""BERT on disk, in the Hugging Face layout: names of tensors, keys of the config, checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelab.models import folders
from tilelab.models.folders import CONFIG, WEIGHTS
from tilewise.errors import InvalidArgument, Unsupported

_PREFIX = "bert."  # of the encoder's tensors, in files of models with a head
# A head of classes over the mean of all tokens is another type: no library shall draw a pooler for
# its classifier.
_TYPE, _MEAN_TYPE = "bert", "tilewise-bert"

# What a layer's modules are called here and in the file.
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_ENDS = {
    "tokens.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "kinds.weight": "embeddings.token_type_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
_HEADS = {
    "pooler.weight": "pooler.dense.weight",
    "pooler.bias": "pooler.dense.bias",
    "classifier.weight": "classifier.weight",
    "classifier.bias": "classifier.bias",
    "transform.weight": "cls.predictions.transform.dense.weight",
    "transform.bias": "cls.predictions.transform.dense.bias",
    "transform_norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "transform_norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "token_bias": "cls.predictions.bias",
}
_CLASSIFIER, _POOLER = "classifier.", "pooler.dense.weight"
_OUTSIDE = (_CLASSIFIER, "cls.")  # without the prefix, also where the encoder has it
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_LEFT_OUT = ("embeddings.position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias")
_ARCHITECTURES = {
    "none": "BertModel",
    "masked": "BertForMaskedLM",
    "classes": "BertForSequenceClassification",
}
_CLASSES = 2  # of a file that says nothing, as Hugging Face takes it
# Keys of a config that decide what is computed: what each may say, and its meaning where absent.
_REQUIRED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "hidden_act": (("gelu",), "gelu"),
    "position_embedding_type": (("absolute",), "absolute"),
    "is_decoder": ((False,), False),
    "add_cross_attention": ((False,), False),
    "tie_word_embeddings": ((True,), True),
}
_NUMBERS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "feed_forward": "intermediate_size",
    "context": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "kinds": "type_vocab_size",
}
# Hugging Face has one number for the first two; ours is beside it.
_DROPOUTS = {
    "residual_dropout": "hidden_dropout_prob",
    "embedding_dropout": "embedding_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}


def config(shape: Mapping[str, Any], eps: float, head: tuple[str, int, str]) -> dict[str, Any]:
    """Return the keys of ``config.json``.

    Args:
        shape: the numbers by their names here.
        eps: of norms.
        head: its kind, and of one of classes how many they are and the pooling before it.
    """
    kind, classes, pooling = head
    mean = kind == "classes" and pooling == "mean"
    values: dict[str, Any] = {
        "architectures": [] if mean else [_ARCHITECTURES[kind]],
        "model_type": _MEAN_TYPE if mean else _TYPE,
        "hidden_act": "gelu",
        "layer_norm_eps": eps,
        "tie_word_embeddings": True,
        **{theirs: shape[ours] for ours, theirs in (*_NUMBERS.items(), *_DROPOUTS.items())},
    }
    if kind == "classes":
        values["id2label"] = {str(each): f"LABEL_{each}" for each in range(classes)}
        values["label2id"] = {f"LABEL_{each}": each for each in range(classes)}
        if classes == 1:
            values["problem_type"] = "regression"
    return values


def numbers(folder: Path, eps: float) -> dict[str, Any]:
    """Return the numbers of the BERT in a folder, by their names here.

    Args:
        folder: of the files.
        eps: the only one of norms that is known.

    Raises:
        InvalidArgument: no such folder, or it is of another model.
        Unsupported: a BERT that computes something else.
    """
    values = folders.read_config(folder, (_TYPE, _MEAN_TYPE))
    for key, (allowed, absent) in {**_REQUIRED, "layer_norm_eps": ((eps,), eps)}.items():
        if values.get(key, absent) not in allowed:
            raise Unsupported(f"a BERT with {key} {values[key]!r}: only {allowed[0]!r} is known")
    missing = [key for key in _NUMBERS.values() if not isinstance(values.get(key), int)]
    if missing:
        raise InvalidArgument(CONFIG, f"no whole number for {missing[0]}", "one")
    found = {ours: values[theirs] for ours, theirs in _NUMBERS.items()}
    found |= {ours: values.get(theirs, 0.1) for ours, theirs in _DROPOUTS.items()}
    if _DROPOUTS["embedding_dropout"] not in values:
        found["embedding_dropout"] = found["residual_dropout"]
    return found


def head_of(folder: Path) -> tuple[Any, int, Any]:
    """Return the head of the BERT in a folder, as ``config`` takes it.

    Raises:
        InvalidArgument: no such folder, it is of another model, or of a head that is not known.
    """
    values = folders.read_config(folder, (_TYPE, _MEAN_TYPE))
    labels = values.get("id2label")
    classes = len(labels) if isinstance(labels, dict) else _CLASSES
    if values["model_type"] == _MEAN_TYPE:
        return "classes", classes, "mean"
    told = values.get("architectures") or [_ARCHITECTURES["none"]]
    kinds = [kind for kind, name in _ARCHITECTURES.items() if told == [name]]
    if not kinds:
        required = f"one of {', '.join(_ARCHITECTURES.values())}"
        fix = "Say which head it shall have."
        raise InvalidArgument("head", f"None, and {folder} with {told}", required, fix)
    return kinds[0], classes, "first"


def _names(state: Mapping[str, Tensor], layers: int) -> dict[str, str]:
    """Return every parameter's name here -> in the file, without the prefix."""
    found = {**_ENDS, **{ours: theirs for ours, theirs in _HEADS.items() if ours in state}}
    for index in range(layers):
        for ours, theirs in _LAYER.items():
            for part in ("weight", "bias"):
                name = f"layers.{index}.{ours}.{part}"
                found[name] = f"encoder.layer.{index}.{theirs}.{part}"
    return found


def write(
    folder: Path, state: Mapping[str, Tensor], layers: int, values: Mapping[str, Any]
) -> None:
    """Write the two files, each whole or not at all; files of an earlier save are replaced.

    Args:
        folder: made where it is missing.
        state: of the model.
        layers: how many.
        values: of ``config``.
    """
    prefix = "" if values["architectures"] == [_ARCHITECTURES["none"]] else _PREFIX
    tensors = {
        theirs if theirs.startswith(_OUTSIDE) else prefix + theirs: state[ours].contiguous()
        for ours, theirs in _names(state, layers).items()
    }
    folders.write(folder, tensors, values)


def read(
    folder: Path, state: Mapping[str, Tensor], layers: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the weights of a model from a folder.

    Args:
        folder: of the files.
        state: of the model as it was made: what the file lacks of a head stays so, and so does a
            classifier that has other classes there, or another pooling before it.
        layers: how many.

    Returns:
        the new state, and the names of what was not taken from the file.

    Raises:
        InvalidArgument: tensors of the encoder are missing, there are unknown ones, or one has
            another shape.
        Unsupported: an output embedding that is not the token embedding.
    """
    path = folder / WEIGHTS
    tensors = _tensors(path)
    names = _names(state, layers)
    known = {*names.values(), *_HEADS.values()}
    for words, odd in (
        ("no tensor", {t for o, t in names.items() if o not in _HEADS} - tensors.keys()),
        ("an unknown tensor", tensors.keys() - known),
    ):
        if odd:
            required = f"the tensors of the BERT that {CONFIG} describes"
            raise InvalidArgument(str(path), f"{words} {min(odd)!r}", required)
    if not _same_classes(tensors, state):
        tensors = {name: each for name, each in tensors.items() if not name.startswith(_CLASSIFIER)}
    found, drawn = {}, []
    for ours, theirs in names.items():
        if theirs not in tensors:
            found[ours] = state[ours]
            drawn.append(ours)
        elif tensors[theirs].shape != state[ours].shape:
            came = f"{theirs} of shape {list(tensors[theirs].shape)}"
            raise InvalidArgument(str(path), came, f"shape {list(state[ours].shape)}")
        else:
            found[ours] = tensors[theirs]
    dtype = found["tokens.weight"].dtype
    return {name: each.to(dtype) for name, each in found.items()}, tuple(drawn)


def _same_classes(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> bool:
    """Return whether a file's classifier fits the model's, in its classes and its pooler."""
    own, given = state.get("classifier.weight"), tensors.get("classifier.weight")
    if own is None or given is None:
        return True
    return len(own) == len(given) and ("pooler.weight" in state) == (_POOLER in tensors)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, names without prefix, half types widened, copies left out."""
    found = {_plain(name): each for name, each in folders.read_tensors(path).items()}
    for name, source in _TIED.items():
        copy = found.pop(name, None)
        if copy is not None and not torch.equal(copy, found.get(source, copy.new_empty(0))):
            raise Unsupported(f"{path}: {name} is not {source}, which this BERT has for both")
    return {name: each for name, each in found.items() if name not in _LEFT_OUT}


def _plain(name: str) -> str:
    """Return a tensor's name without prefix; old files say gamma and beta of norms."""
    name = name.removeprefix(_PREFIX)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
