"""The weights of a finished run as a model's folder in the Hugging Face layout.

The folder has the weights of the last held-out evaluation: the average, for an optimizer that
averages. The export needs neither the data of the run nor the checkpoint that it began with: sizes
that the config does not say are those of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from tilelab.common.files import telling_full_disk
from tilelab.models import bert, vit
from tilelab.models.folders import CONFIG, WEIGHTS
from tilelab.models.gpt2 import GPT2
from tilelab.study.ask.config import RunConfig, parse
from tilelab.study.choices import optimizers
from tilelab.study.records.events import RunRecord, Start
from tilelab.study.tasks.families import encoder_numbers, gpt2_shape
from tilelab.study.train import state as states
from tilelab.study.train.state import CheckpointError, State
from tilelab.study.train.trainer import weights_of
from tilewise.errors import InvalidArgument, Unsupported

_Model = bert.BERT | vit.ViT | GPT2
_Weights = Mapping[str, Tensor]


class Exported(NamedTuple):
    """The exported files."""

    family: str  # of ``config.Model``
    kind: str  # of ``config.json``; ``tilewise-...`` for what Hugging Face lacks
    step: int


def export(record: RunRecord, checkpoint: Path, folder: Path) -> Exported:
    """Write ``config.json`` and ``model.safetensors`` of the model that a run has trained.

    Raises:
        InvalidArgument: the run is not over or has diverged, or the folder is not empty or cannot
            be written.
        Unsupported: a model that the layout cannot say.
        CheckpointError: the checkpoint is not there, damaged, or not that of the run's end.
        DiskFullError: there is no room for the config.
    """
    start, end = record.start, record.end
    if end is None or end.status != "done":
        came = f"{start.run}, which {'is not over' if end is None else f'diverged: {end.reason}'}"
        raise InvalidArgument("run", came, "one that is done")
    config = parse(RunConfig, start.config)
    _check_variant(config)
    _check_empty(folder)
    state = _state(start, checkpoint)
    if state.step != end.step:
        raise CheckpointError(f"{checkpoint}: of step {state.step}, and the run has {end.step}")
    model = _model(config, start, weights_of(state))
    if states.weights_sha256(model) != end.weights_sha256:
        raise CheckpointError(f"{checkpoint}: its weights are not those that the run ended with")
    optimizer = optimizers.build(config.optimizer, model).optimizer
    if optimizers.averages(optimizer):
        optimizer.load_state_dict(states.unpack(state.values["optimizer"], state.tensors))
        optimizers.evaluation_mode(optimizer)
    try:
        with telling_full_disk(folder):
            model.save(folder)
    except (OSError, SafetensorError) as error:  # the latter of weights, a full disk too
        came, required = f"{folder} ({error})", "one that can be written and has room"
        raise InvalidArgument("folder", came, required) from None
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return Exported(config.model.family, values["model_type"], state.step)


def _check_variant(config: RunConfig) -> None:
    """The layout says nothing of masks and scores: whoever read it would compute something else."""
    own = "causal" if config.model.family == "gpt2" else "full"
    variant = config.attention.variant.name
    if variant != own:
        what = f"an export of a {config.model.family} with attention.variant {variant}"
        fix = f"the Hugging Face layout has no place for it: only {own} can be exported"
        raise Unsupported(what, fix=fix)


def _check_empty(folder: Path) -> None:
    required = "a folder that is empty, or not there yet"
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument("folder", f"{folder}, a file", required)
    inside = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
    if inside:
        raise InvalidArgument("folder", f"{folder} with {', '.join(inside[:3])}", required)


def _state(start: Start, checkpoint: Path) -> State:
    identity = {
        "config": start.config_hash,
        "seed": str(start.seed),
        "corpus": start.corpus["sha256"],
    }
    state = states.read(checkpoint, identity)
    if state is None:
        message = (
            f"{checkpoint} is not there: without its checkpoint nothing is left of the weights of "
            f"{start.run}. Remove the run's folder, and run the study again to train it anew"
        )
        raise CheckpointError(message)
    return state


def _model(config: RunConfig, start: Start, weights: _Weights) -> _Model:
    """Return the model with these weights, in eval mode or not: nothing is computed with it."""
    family = config.model.family
    try:
        model = _made(config, start.corpus, weights)
    except KeyError as error:
        raise _foreign(start, family, str(error.args[0])) from None
    own = {name: each.shape for name, each in model.state_dict().items()}
    given = {name: each.shape for name, each in weights.items()}
    odd = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
    if odd:
        raise _foreign(start, family, odd[0])
    model.load_state_dict(weights)
    return model


def _foreign(start: Start, family: str, name: str) -> Unsupported:
    what = f"an export of {start.run}: its model is not the {family} of tilelab.models"
    return Unsupported(what, fix=f"write {WEIGHTS} by hand; they differ in {name}")


def _made(config: RunConfig, corpus: Mapping[str, Any], weights: _Weights) -> _Model:
    """Return a model of the config's numbers, and of those that the weights have."""
    if config.model.family == "gpt2":
        return GPT2(gpt2_shape(config.model, len(weights["tokens.weight"])))
    numbers = encoder_numbers(config.model)
    if config.model.family == "vit":
        channels, side, _ = corpus["image"]
        of_images: vit.Pooling = "first" if "class_token" in weights else "mean"
        patch = math.isqrt(weights["embed.weight"].shape[1] // channels)
        classes = len(weights["classifier.bias"])
        shape = vit.Shape(
            **numbers,
            image=side,
            patch=patch,
            channels=channels,
            classes=classes,
            pooling=of_images,
        )
        return vit.ViT(shape)
    tables = {"context": "positions", "vocabulary": "tokens", "kinds": "kinds"}
    sizes = {name: len(weights[f"{table}.weight"]) for name, table in tables.items()}
    head = bert.Head("masked" if "token_bias" in weights else "none")
    if "classifier.bias" in weights:
        pooling: bert.HeadPooling = "first" if "pooler.weight" in weights else "mean"
        if weights["classifier.weight"].shape[1] == 2 * weights["tokens.weight"].shape[1]:
            pooling = "pairs"
        head = bert.Head("classes", len(weights["classifier.bias"]), pooling)
    return bert.BERT(bert.Shape(**numbers, **sizes), head=head)
