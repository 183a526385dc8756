"""Classification of images with a ViT: the image tasks of the Long Range Arena, and others.

An image is a sequence of square patches; with ``patch=1`` of its pixels, row by row: 1,024 tokens
of CIFAR-10 and Pathfinder, 16,384 of Path-X (128 pixels a side), 65,536 of Path-256. Pixels are
taken from 0 to 255 to -1 to 1; there is no augmentation. In the arena's own models a pixel's
intensity is one of 256 words; here it is a number that is multiplied, as in every ViT.

Source: Tay et al., Long Range Arena (2021), sections 2.2.4 to 2.2.6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilelab.models.vit import Pooling, Shape, ViT
from tilelab.study.ask.config import Data, RunConfig
from tilelab.study.choices.variants import ENCODER
from tilelab.study.records.events import LayerSoftmax
from tilelab.study.tasks.classification import Classification, ExampleBatches, Output, evaluating
from tilelab.study.tasks.families import vit_of
from tilelab.study.tasks.images_files import NAMED, Images, Pictures, data_bytes, read
from tilelab.study.tasks.softmaxes import watched
from tilelab.study.tasks.task import AbstractTask, Batch, DataBytes, Examination, Held
from tilewise.errors import InvalidArgument

__all__ = ["ImageClassification"]

VARIANTS = (*ENCODER, "softcap")
_TOKENS = 32768  # of an evaluation's forward pass, if a single image has not more


def _numbers(pictures: Pictures, indices: list[int]) -> Tensor:
    """Images as the model takes them, float32 [B, C, S, S] in -1 to 1."""
    return torch.from_numpy(pictures.pixels[indices]).float() / 127.5 - 1.0


class _Batches(ExampleBatches):
    """Batches of images, in the order of every classification."""

    def __init__(self, images: Any, config: RunConfig, seed: int) -> None:
        super().__init__(images, config, seed)
        self._images: Images = images

    def _of(self, indices: list[int]) -> Batch:
        train, tokens = self._images.train, len(indices) * self._context
        labels = torch.from_numpy(train.labels[indices])
        return Batch((_numbers(train, indices),), labels, len(indices), tokens)


class _Examination(Examination):
    """All held-out images, in their own order."""

    def __init__(self, task: ImageClassification, config: RunConfig, data: Images) -> None:
        self._task, self._held_out = task, data.held_out
        self._rows = max(1, _TOKENS // config.model.context)
        self._watched = min(config.evaluation.attention_windows, len(data.held_out))

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        """Return the loss and the accuracy; of the first images what the attention looks like."""
        softmaxes: list[LayerSoftmax] | None = None
        with evaluating(model, autocast) as device:
            logits = self._logits(model, device, 0, len(self._held_out))
            with watched(model) as found:
                if found is not None and self._watched:
                    self._logits(model, device, 0, self._watched)
                    softmaxes = found()
        output = Output(logits.numpy(), self._held_out.labels)
        loss = self._task.loss_of(output)
        metrics = {**self._task.score({"held_out": output}), self._task.loss_name: loss}
        ordered = {name: metrics[name] for name in self._task.metrics}
        return Held(loss, metrics=ordered, softmaxes=softmaxes)

    def _logits(self, model: nn.Module, device: torch.device, begin: int, end: int) -> Tensor:
        found = []
        for at in range(begin, end, self._rows):
            indices = list(range(at, min(at + self._rows, end)))
            found.append(model(_numbers(self._held_out, indices).to(device)).double().cpu())
        return torch.cat(found)


class ImageClassification(Classification):
    """The class of an image; see ``AbstractTask`` and the top of this file.

    ``data.source`` is one of:

    * ``"cifar10-gray"``, ``"pathfinder32"``, ``"pathfinder128"`` or ``"pathfinder256"``, in the
      folder ``TILEWISE_DATA``;
    * the path of a file ``.npz`` or of a folder with ``train.npz`` and ``test.npz``
      (``images_files.py``);
    * ``"hub:NAME"`` for a data set by its name on the Hub.

    Where the data has no held-out part (Pathfinder), ``data.held_out`` is the share of a fixed one.
    ``model.context`` is the number of an image's tokens.

    Args:
        patch: pixels of a patch's side.
        pooling: what the head sees: ``"first"``, a class token, or ``"mean"`` of all patches.
        train_examples: learn from a fixed sample of so many; 0 for all.
    """

    families = ("vit",)
    tokenizers = ("bytes",)  # what it takes: a pixel's number is a byte
    sources = f"one of {', '.join(NAMED)}, a file .npz or a folder of them, or hub:NAME"
    classes = 0  # as many as the data has
    sized_by_data = True

    def __init__(self, patch: int, pooling: Pooling, train_examples: int) -> None:
        super().__init__(pooling)
        self.patch, self.train_examples = patch, train_examples

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        AbstractTask.check(self, config)  # sequences of one length, and a share that is held out
        data, variant, standard = config.data, config.attention.variant.name, Data()
        if variant not in VARIANTS:
            required = f"one of {', '.join(VARIANTS)}: an image has no order"
            raise InvalidArgument("attention.variant", variant, required)
        if data.source == standard.source:
            raise InvalidArgument("data.source", repr(data.source), self.sources)
        if data.size_cap_bytes != standard.size_cap_bytes:
            required = f"{standard.size_cap_bytes}; task.train_examples takes a part of the images"
            raise InvalidArgument("data.size_cap_bytes", str(data.size_cap_bytes), required)
        named = NAMED.get(data.source)
        if named is None:
            return
        if named.held_out and data.held_out != standard.held_out:
            required = f"{standard.held_out}: {data.source} has a held-out part of its own"
            raise InvalidArgument("data.held_out", str(data.held_out), required)
        shape = self._shape(config, named.side, 1, 1)
        if config.model.context != shape.tokens:
            raise wrong_context(config, shape)

    def _shape(self, config: RunConfig, side: int, channels: int, classes: int) -> Shape:
        model, dropout = config.model, config.model.dropout
        if side % self.patch:
            required = f"a divisor of {side}, the pixels of a side of {config.data.source}"
            raise InvalidArgument("task.patch", str(self.patch), required)
        return Shape(
            layers=model.layers,
            heads=model.heads,
            width=model.width,
            image=side,
            patch=self.patch,
            channels=channels,
            classes=classes,
            feed_forward=model.feed_forward,
            pooling=self.pooling,
            embedding_dropout=dropout.embedding,
            attention_dropout=dropout.attention,
            residual_dropout=dropout.residual,
        )

    def prepare(self, config: RunConfig, cache: Path) -> Any:
        """Return the images, ``Images``."""
        return read(config.data, self.train_examples)

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """See ``AbstractTask``."""
        return data_bytes(config.data, self.train_examples)

    def batches(self, config: RunConfig, data: Any, seed: int) -> ExampleBatches:
        """Full batches of images, an epoch after the other."""
        return _Batches(data, config, seed)

    def model(self, config: RunConfig, data: Any, seed: int, device: torch.device) -> Any:
        """Return a ViT, from scratch or from a checkpoint."""
        shape = self._shape(config, data.side, data.channels, data.classes)
        if config.model.context != shape.tokens:
            raise wrong_context(config, shape)
        return vit_of(config, shape, seed, device)

    def examination(self, config: RunConfig, data: Any) -> Examination:
        """Return the examination on all held-out images."""
        return _Examination(self, config, data)

    def looked_up(self, model: nn.Module) -> int:
        """Positions and the class token."""
        assert isinstance(model, ViT)
        token = 0 if model.class_token is None else model.class_token.numel()
        return model.positions.weight.numel() + token

    def attended(self, config: RunConfig, data: Any) -> float:
        """Return the number of an image's tokens."""
        return float(config.model.context)

    def evaluated(self, config: RunConfig, data: Any, whole: bool) -> int:
        """Return the number of all held-out images."""
        return len(data.held_out)


def wrong_context(config: RunConfig, shape: Shape) -> InvalidArgument:
    """Return the error of a context that is not what an image of the data has."""
    token = " and a class token" if shape.pooling == "first" else ""
    side = f"{shape.image} x {shape.image} pixels in patches of {shape.patch} x {shape.patch}"
    required = f"{shape.tokens}: {side} are {shape.patches} tokens{token}"
    fix = f"Set model.context={shape.tokens}."
    return InvalidArgument("model.context", str(config.model.context), required, fix)
