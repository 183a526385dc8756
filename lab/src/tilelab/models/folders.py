"""A model's folder in the Hugging Face layout: ``config.json`` beside ``model.safetensors``.

A ``Layout`` is a table: what a family's parameters and numbers are called there. A model that
Hugging Face lacks has a type of its own, so that no library takes it for another one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewise.errors import InvalidArgument, Unsupported

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_CLASSIFIER = "classifier."  # here and in the files
_CLASSES = 2  # of a file that says nothing, as Hugging Face takes it
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Hugging Face has one number for two of an encoder's.
ENCODER_DROPOUTS = {
    "residual_dropout": ("hidden_dropout_prob",),
    "embedding_dropout": ("embedding_dropout_prob", "hidden_dropout_prob"),
    "attention_dropout": ("attention_probs_dropout_prob",),
}


@dataclass(frozen=True)
class Layout:
    """The names of a family here -> in the files; those of tensors come without the prefix."""

    family: str  # in words
    kinds: tuple[str, str]  # ``model_type``: Hugging Face's, and that of a model that it lacks
    prefix: str  # of tensors, in files of models with a head
    layers: str  # what the names of a layer's tensors begin with
    modules: Mapping[str, str]  # of a layer
    parameters: Mapping[str, str]  # outside of layers
    numbers: Mapping[str, str]
    dropouts: Mapping[str, tuple[str, ...]]  # and what stands for it where it is absent
    # Keys that decide what is computed: what each may say, first what it means where it is absent.
    said: Mapping[str, tuple[Any, ...]]
    unsaid: Mapping[str, tuple[Any, ...]]  # likewise, not written
    dropout: float  # where a config says none
    # Parameters that a file may lack, or have besides.
    heads: Mapping[str, str] = field(default_factory=dict)
    outside: tuple[str, ...] = ()  # tensors that never have the prefix
    # Tensors of a file that have to equal others.
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # ends of names of tensors that say nothing

    def config(self, shape: Mapping[str, Any], architecture: str | None) -> dict[str, Any]:
        """Return the keys of ``config.json``; without an architecture, of one that only we have."""
        names = {**self.numbers, **{ours: keys[0] for ours, keys in self.dropouts.items()}}
        return {
            "architectures": [] if architecture is None else [architecture],
            "model_type": self.kinds[architecture is None],
            **{key: allowed[0] for key, allowed in self.said.items()},
            **{theirs: shape[ours] for ours, theirs in names.items()},
        }

    def write(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        values: Mapping[str, Any],
        prefix: str | None = None,
    ) -> None:
        """Write the two files, each whole or not at all; files of an earlier save are replaced.

        The folder is made where it is missing. ``state`` has the tensors as they are in the file,
        by their names here. Without ``prefix`` it is the family's.
        """
        prefix = self.prefix if prefix is None else prefix
        tensors = {
            theirs if theirs.startswith(self.outside) else prefix + theirs: state[ours].contiguous()
            for ours, theirs in self._names(state).items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        weights, config = folder / f".{WEIGHTS}.new", folder / f".{CONFIG}.new"
        save_file(tensors, weights, metadata={"format": "pt"})
        text = json.dumps(dict(values), indent=2, sort_keys=True) + "\n"
        config.write_text(text, encoding="utf-8")
        os.replace(weights, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)

    def read_config(self, folder: Path) -> dict[str, Any]:
        """Read ``config.json`` of a folder.

        Raises:
            InvalidArgument: it is not there, or of another model.
        """
        required = f"a folder with {CONFIG} and {WEIGHTS}"
        try:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument("folder", f"{folder} ({error.strerror})", required) from None
        except ValueError as error:
            came = f"{folder / CONFIG}, which is not JSON ({error})"
            raise InvalidArgument("folder", came, required) from None
        kind = values.get("model_type") if isinstance(values, dict) else None
        if kind not in self.kinds:
            came = f"{folder}, a model of type {kind!r}"
            raise InvalidArgument("folder", came, f"type {self.kinds[0]!r}")
        assert isinstance(values, dict)
        return values

    def shape(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the numbers of a config by their names here.

        Raises:
            InvalidArgument: a number that is missing.
            Unsupported: a model that computes something else.
        """
        for key, allowed in {**self.said, **self.unsaid}.items():
            if values.get(key, allowed[0]) not in allowed:
                what = f"{self.family} with {key} {values[key]!r}"
                raise Unsupported(f"{what}: only {allowed[0]!r} is known")
        for key in self.numbers.values():
            if not isinstance(values.get(key), int):
                raise InvalidArgument(CONFIG, f"no whole number for {key}", "one")
        found = {ours: values[theirs] for ours, theirs in self.numbers.items()}
        for ours, keys in self.dropouts.items():
            found[ours] = next((values[key] for key in keys if key in values), self.dropout)
        return found

    def read(
        self, folder: Path, state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the tensors of a folder, half types widened.

        Args:
            folder: of the files.
            state: of the model as it was made, as it is in a file. What the file lacks of a head
                stays so, and so does a classifier that has other classes there, or another pooling
                before it.

        Returns:
            the new state, and the names of what was not taken from the file.

        Raises:
            InvalidArgument: no such file, tensors that are missing or unknown, or one of another
                shape.
            Unsupported: a tensor that is not the copy that it should be.
        """
        path = folder / WEIGHTS
        tensors, names = self._tensors(path), self._names(state)
        needed = {theirs for ours, theirs in names.items() if ours not in self.heads}
        known = {*names.values(), *self.heads.values()}
        odd = {"no tensor": needed - tensors.keys(), "an unknown tensor": tensors.keys() - known}
        for words, those in odd.items():
            if those:
                required = f"the {len(names)} tensors of {self.family} that {CONFIG} describes"
                raise InvalidArgument(str(path), f"{words} {min(those)!r}", required)
        if not _same_classes(state, tensors):
            names = {ours: each for ours, each in names.items() if not ours.startswith(_CLASSIFIER)}
        found = {ours: tensors[each] for ours, each in names.items() if each in tensors}
        for ours, given in found.items():
            if given.shape != state[ours].shape:
                came = f"{names[ours]} of shape {list(given.shape)}"
                required = f"shape {list(state[ours].shape)}, as {CONFIG} says"
                raise InvalidArgument(str(path), came, required)
        return {**state, **found}, tuple(name for name in state if name not in found)

    def _names(self, state: Iterable[str]) -> dict[str, str]:
        names, found = {**self.parameters, **self.heads}, {}
        for name in state:
            if name not in names:
                _, index, rest = name.split(".", 2)
                module, _, part = rest.rpartition(".")
                names[name] = f"{self.layers}.{index}.{self.modules[module]}.{part}"
            found[name] = names[name]
        return found

    def _tensors(self, path: Path) -> dict[str, Tensor]:
        """Return all tensors of a file that say something, copies left out."""
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InvalidArgument("folder", f"{path} ({error})", "a file of safetensors") from None
        found = {}
        for name, each in stored.items():
            plain = name.removeprefix(self.prefix)
            for old, new in _OLD.items():
                plain = plain.removesuffix(old) + new if plain.endswith(old) else plain
            if not plain.endswith(self.left_out):
                found[plain] = each if each.dtype == torch.float64 else each.float()
        for name, source in self.tied.items():
            copy = found.pop(name, None)
            if copy is not None and not torch.equal(copy, found.get(source, copy.new_empty(0))):
                raise Unsupported(f"{path}: {name} is not {source}, which this model has for both")
        return found


def _same_classes(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file's classifier fits the model's, in its classes and its pooler."""
    own, given = (each.get(f"{_CLASSIFIER}weight") for each in (state, tensors))
    if own is None or given is None:
        return True
    pooled = "pooler.weight" in state, "pooler.dense.weight" in tensors
    return len(own) == len(given) and pooled[0] == pooled[1]


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the weights that were read, in float64 where those are."""
    if any(each.dtype == torch.float64 for each in state.values()):
        model.double()
    model.load_state_dict(state)


def labels(classes: int) -> dict[str, Any]:
    """Return the keys of a config that name classes."""
    return {
        "id2label": {str(each): f"LABEL_{each}" for each in range(classes)},
        "label2id": {f"LABEL_{each}": each for each in range(classes)},
    }


def classes_of(values: Mapping[str, Any]) -> int:
    """Return the number of classes that a config names."""
    named = values.get("id2label")
    if not isinstance(named, dict | None):
        raise InvalidArgument(CONFIG, f"{named!r} for id2label", "an object, or null")
    return _CLASSES if named is None else len(named)
