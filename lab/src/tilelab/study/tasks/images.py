"""Classification of images with a ViT: the image tasks of the Long Range Arena, and others.

An image is a sequence of square patches; with ``patch=1`` of its pixels, row by row: 1,024 tokens
of CIFAR-10 and Pathfinder, 16,384 of Path-X (128 pixels a side), 65,536 of Path-256. Pixels are
taken from 0 to 255 to -1 to 1; there is no augmentation. In the arena's own models a pixel's
intensity is one of 256 words; here it is a number that is multiplied, as in every ViT.

Source: Tay et al., Long Range Arena (2021), sections 2.2.4 to 2.2.6.

A file of images is numpy's ``.npz`` with ``images``, uint8 [n, S, S] (gray) or [n, S, S, C], and
``labels``, whole numbers [n] from 0 on. Nothing in it is unpickled.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tilelab.models.vit import Pooling, Shape
from tilelab.study.ask.config import Data, RunConfig
from tilelab.study.choices.variants import ENCODER
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.order import shuffled
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import HUB, table
from tilelab.study.tasks.families import encoder_numbers, vit_of
from tilelab.study.tasks.task import AbstractTask, Batch, DataBytes
from tilewise.errors import InvalidArgument, Unsupported

_SPLIT_SEED = 0  # the same images are held out in every study: a split belongs to the data
_SAMPLE_SEED = 1
_AT_ONCE = 1024  # images that are moved
# What numpy raises for a file that is missing, cut off, or of another kind (a single array is no
# context, which is a TypeError).
_DAMAGED = (OSError, ValueError, EOFError, TypeError, zlib.error, zipfile.BadZipFile)
_MODES = ("L", "RGB")  # of Pillow: gray, colour


class Named(NamedTuple):
    """A data set that has a name."""

    train: str  # file in the folder ``TILEWISE_DATA``
    held_out: str  # file; empty where it has no such part
    side: int  # pixels
    origin: str  # what its file is made from, in words


_CIFAR = (
    "CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html), gray by 0.2989 R + 0.587 G + 0.114 B"
)
_PATHFINDER = (
    "the images of https://github.com/drewlinsley/pathfinder with the numbers of "
    "https://github.com/google-research/long-range-arena, label 1 for one contour"
)
NAMED = {
    "cifar10-gray": Named("cifar10/train_gray.npz", "cifar10/test_gray.npz", 32, _CIFAR),
    "pathfinder32": Named("pathfinder/pathfinder32_hard.npz", "", 32, _PATHFINDER),
    "pathfinder128": Named("pathfinder/pathfinder128.npz", "", 128, _PATHFINDER),
    "pathfinder256": Named("pathfinder/pathfinder256.npz", "", 256, _PATHFINDER),
}


@dataclass(frozen=True)
class Pictures:
    """Some labelled images."""

    pixels: NDArray[np.uint8]  # uint8 [n, C, S, S]
    labels: NDArray[np.int64]  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> Pictures:
        """Some of them, in that order."""
        return Pictures(self.pixels[indices], self.labels[indices])


@dataclass(frozen=True)
class Images:
    """A data set of images that is ready; a ``Prepared`` of ``tasks/task.py``."""

    name: str  # in words
    source: str  # as the config says it
    classes: int
    train: Pictures
    held_out: Mapping[str, Pictures]  # one part

    def __str__(self) -> str:
        size = f"{self.side} x {self.side} x {self.channels}, {self.classes} classes"
        return (
            f"Data: {self.name}, {len(self.train):,} images to learn from ({size}); "
            f"held out: {len(self.held_out['held_out']):,}"
        )

    @property
    def side(self) -> int:
        """Pixels of an image's side."""
        return int(self.train.pixels.shape[2])

    @property
    def channels(self) -> int:
        """Numbers of a pixel."""
        return int(self.train.pixels.shape[1])

    @cached_property
    def sha256(self) -> str:
        """The hash of pixels, labels and split; it copies nothing, because memory is measured."""
        digest = hashlib.sha256()
        for part in (self.train, *self.held_out.values()):
            digest.update(f"{part.pixels.shape} {self.classes}\n".encode())
            digest.update(np.ravel(part.pixels).data)
            digest.update(np.ravel(part.labels).data)
        return digest.hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return a description of the data for records."""
        return {
            "name": self.name,
            "source": self.source,
            "sha256": self.sha256,
            "image": [self.channels, self.side, self.side],
            "classes": self.classes,
            "train_examples": len(self.train),
            "held_out_examples": {name: len(part) for name, part in self.held_out.items()},
        }


def read(data: Data, train_examples: int) -> Images:
    """Return the images of a run, split in two; ``train_examples`` above 0 takes a fixed sample.

    ``data.held_out`` is the share that is held out where the data has no such part of its own.

    Raises:
        InvalidArgument: it is not there, or not such data.
        Unsupported: the Hub without the packages datasets and Pillow.
    """
    source = data.source
    if source.startswith(HUB):
        train, held_out, classes = _from_hub(source)
    else:
        paths = _paths(source)
        train, *others = (_from_file(path, _how(source, path)) for path in paths)
        held_out = others[0] if others else None
        classes = 1 + max(int(each.labels.max(initial=0)) for each in (train, *others))
    if held_out is None:
        train, held_out = _split(train, data.held_out, source)
    elif data.held_out != Data().held_out:
        required = f"{Data().held_out}, which says nothing here: {source} has a held-out part"
        raise InvalidArgument("data.held_out", str(data.held_out), required)
    if held_out.pixels.shape[1:] != train.pixels.shape[1:]:
        came = f"{source} with images {list(train.pixels.shape[1:])} to learn from and "
        came += f"{list(held_out.pixels.shape[1:])} held out"
        raise InvalidArgument("data.source", came, "images of one size")
    if train_examples > len(train):
        required = f"at most {len(train)}, or 0 for all"
        raise InvalidArgument("task.train_examples", str(train_examples), required)
    name = source if source in NAMED or source.startswith(HUB) else Path(source).name
    if train_examples:
        order = shuffled(len(train), _SAMPLE_SEED, 0)[:train_examples]
        train = train.take(np.sort(order))
        name += f" (a sample of {train_examples:,})"
    return Images(name, source, classes, train, {"held_out": held_out})


def _shape(path: Path) -> tuple[int, ...]:
    with zipfile.ZipFile(path) as file, file.open("images.npy") as array:
        if np.lib.format.read_magic(array) == (1, 0):
            return tuple(np.lib.format.read_array_header_1_0(array)[0])
        return tuple(np.lib.format.read_array_header_2_0(array)[0])


def _split(whole: Pictures, share: float, source: str) -> tuple[Pictures, Pictures]:
    """Split the images in two; the training part takes the place of the whole, of gigabytes."""
    count = max(1, round(share * len(whole)))
    if count >= len(whole):
        came = f"{share} of {len(whole)} images of {source}"
        raise InvalidArgument("data.held_out", came, "a share that leaves one to learn from")
    order = shuffled(len(whole), _SPLIT_SEED, 0)
    held_out = whole.take(np.sort(order[:count]))
    learnt = np.sort(order[count:])
    for at in range(0, len(learnt), _AT_ONCE):
        # They only move to the front: what is read later has not been written over.
        part = learnt[at : at + _AT_ONCE]
        whole.pixels[at : at + len(part)] = whole.pixels[part]
    return Pictures(whole.pixels[: len(learnt)], whole.labels[learnt]), held_out


def _paths(source: str) -> list[Path]:
    """Return the file to learn from, and the held-out one where there is one."""
    if source in NAMED:
        folder, named = data_folder(), NAMED[source]
        if folder is None:
            fix = f"Name the folder that has {named.train}, or set data.source to a path. "
            fix += _how(source, Path(named.train))
            raise InvalidArgument("data.source", f"{source!r} and no TILEWISE_DATA", "both", fix)
        return [folder / each for each in (named.train, named.held_out) if each]
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        return [path]
    if not path.is_dir():
        required = f"one of {', '.join(NAMED)}, a file .npz, a folder of train.npz and test.npz"
        raise InvalidArgument("data.source", repr(source), f"{required}, or {HUB}NAME")
    return [path / "train.npz", path / "test.npz"]


def _how(source: str, path: Path) -> str:
    made = f" from {NAMED[source].origin}" if source in NAMED else ""
    return f"Write {path.name} with numpy.savez(path, images=..., labels=...){made}."


def _from_file(path: Path, fix: str) -> Pictures:
    required = "a file of numpy's format .npz with images and labels"
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except KeyError as error:
        raise InvalidArgument("data.source", f"{path} ({error.args[0]})", required, fix) from None
    except _DAMAGED as error:
        came = f"{path} ({' '.join(str(error).split())[:200]})"
        raise InvalidArgument("data.source", came, required, fix) from None
    return _checked(images, labels, str(path))


def _checked(images: NDArray[Any], labels: NDArray[Any], source: str) -> Pictures:
    square = images.ndim in (3, 4) and images.shape[1] == images.shape[2] > 0
    if not square or images.dtype != np.uint8 or not len(images):
        came = f"{source} with images {list(images.shape)} of {images.dtype}"
        required = "squares of one size, uint8 [n, S, S] or [n, S, S, C], one image or more"
        raise InvalidArgument("data.source", came, required)
    whole = labels.shape == (len(images),) and labels.dtype.kind in "iu"
    if not whole or labels.min(initial=0) < 0:
        came = f"{source} with labels {list(labels.shape)} of {labels.dtype}"
        required = f"whole numbers from 0 on, [{len(images)}]"
        raise InvalidArgument("data.source", came, required)
    last = images if images.ndim == 4 else images[..., None]
    return Pictures(np.ascontiguousarray(last.transpose(0, 3, 1, 2)), labels.astype(np.int64))


def _from_hub(source: str) -> tuple[Pictures, Pictures | None, int]:
    """Read images by a name of the Hub, or from a folder that is laid out like a data set there."""
    parts = table(source, None, None, "a file .npz")
    import datasets  # it is there

    try:
        import PIL  # noqa: F401  datasets decodes images with it
    except ImportError:
        fix = "pip install 'tilewise[hub]', or set data.source to a file .npz"
        raise Unsupported("images of the Hub without the package pillow", fix=fix) from None
    if "train" not in parts:
        came = f"{source} with the splits {', '.join(parts)}"
        raise InvalidArgument("data.source", came, "a split 'train'")
    features = parts["train"].features
    images = [name for name, each in features.items() if isinstance(each, datasets.Image)]
    labels = [name for name, each in features.items() if isinstance(each, datasets.ClassLabel)]
    labels = labels or [name for name in features if name == "label"]
    if len(images) != 1 or len(labels) != 1:
        came = f"{source} with the columns {', '.join(features)}"
        raise InvalidArgument("data.source", came, "one column of images and one of labels")
    held_out = next((each for each in ("validation", "test") if each in parts), None)
    found = [
        _hub_rows(parts[each], images[0], labels[0], f"{source}, {each}")
        for each in ("train", held_out)
        if each
    ]
    named = getattr(features[labels[0]], "num_classes", None)
    classes = named or 1 + max(int(each.labels.max()) for each in found)
    return found[0], found[1] if held_out else None, classes


def _hub_rows(table: Any, image: str, label: str, source: str) -> Pictures:
    rows = []
    for each in table[image]:
        if each.mode not in _MODES:
            came = f"{source} with an image of mode {each.mode}"
            raise InvalidArgument("data.source", came, "images of mode L (gray) or RGB (colour)")
        rows.append(np.asarray(each))
    sizes = sorted({row.shape for row in rows})
    if len(sizes) != 1:
        came = f"{source} with images of {' and '.join(map(str, sizes[:3]))}"
        raise InvalidArgument("data.source", came, "images of one size, all gray or all in colour")
    return _checked(np.stack(rows), np.array(table[label]), source)


VARIANTS = (*ENCODER, "softcap")


class ImageClassification(Classification):
    """The class of an image; see ``AbstractTask`` and the top of this file.

    Where the data has no held-out part (Pathfinder), ``data.held_out`` is the share of a fixed one.
    ``model.context`` is the number of an image's tokens.
    """

    families = ("vit",)
    tokenizers = ("bytes",)  # what it takes: a pixel's number is a byte
    sources = f"one of {', '.join(NAMED)}, a file .npz or a folder of them, or hub:NAME"
    classes = 0  # as many as the data has
    sized_by_data = True
    tunes = False  # images have one part that is held out
    most_rows = most_tokens = 32768
    watches_at_once = False

    def __init__(self, patch: int, pooling: Pooling, train_examples: int) -> None:
        super().__init__(pooling)
        self.patch, self.train_examples = patch, train_examples
        self._pooling: Pooling = pooling

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        AbstractTask.check(self, config)  # sequences of one length, and a share that is held out
        data, standard = config.data, Data()
        if config.attention.variant.name not in VARIANTS:
            required = f"one of {', '.join(VARIANTS)}: an image has no order"
            raise config.unfit("attention.variant", required)
        if data.source == standard.source:
            raise config.unfit("data.source", self.sources)
        if data.size_cap_bytes != standard.size_cap_bytes:
            required = f"{standard.size_cap_bytes}; task.train_examples takes a part of the images"
            raise config.unfit("data.size_cap_bytes", required)
        named = NAMED.get(data.source)
        if named is None:
            return
        if named.held_out and data.held_out != standard.held_out:
            required = f"{standard.held_out}: {data.source} has a held-out part of its own"
            raise config.unfit("data.held_out", required)
        self._shape(config, named.side, 1, 1)

    def _shape(self, config: RunConfig, side: int, channels: int, classes: int) -> Shape:
        if side % self.patch:
            required = f"a divisor of {side}, the pixels of a side of {config.data.source}"
            raise config.unfit("task.patch", required)
        shape = Shape(
            **encoder_numbers(config.model),
            image=side,
            patch=self.patch,
            channels=channels,
            classes=classes,
            pooling=self._pooling,
        )
        if config.model.context != shape.tokens:
            token = " and a class token" if shape.pooling == "first" else ""
            cut = f"{side} x {side} pixels in patches of {self.patch} x {self.patch}"
            required = f"{shape.tokens}: {cut} are {shape.patches} tokens{token}"
            raise config.unfit("model.context", required, f"Set model.context={shape.tokens}.")
        return shape

    def prepare(self, config: RunConfig, cache: Path) -> Any:
        """Return the images, ``Images``."""
        return read(config.data, self.train_examples)

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """See ``AbstractTask``; by the headers of the files."""
        try:
            shapes = [_shape(path) for path in _paths(config.data.source)]
        except (InvalidArgument, KeyError, *_DAMAGED):
            return DataBytes()  # of the Hub, or ``prepare`` will say what is wrong
        sizes = [math.prod(shape) for shape in shapes]
        colour = [math.prod(shape) for shape in shapes if len(shape) == 4]  # channels change places
        own = round(config.data.held_out * sizes[0]) if len(sizes) == 1 else 0
        sample = self.train_examples * math.prod(shapes[0][1:])
        kept = (sample or sizes[0]) + own + sum(sizes[1:])
        return DataBytes(kept, max(sum(sizes) + max(own + sample, *colour, 0), kept))

    def batch(self, config: RunConfig, data: Any, split: Any, indices: list[int]) -> Batch:
        """Images as the model takes them, float32 [B, C, S, S] in -1 to 1."""
        numbers = torch.from_numpy(split.pixels[indices]).float() / 127.5 - 1.0
        labels, count = torch.from_numpy(split.labels[indices]), len(indices)
        return Batch((numbers,), labels, count, count * config.model.context)

    def model(self, config: RunConfig, data: Any, seed: int, device: torch.device) -> Any:
        """Return a ViT, from scratch or from a checkpoint."""
        shape = self._shape(config, data.side, data.channels, data.classes)
        return vit_of(config, shape, seed, device)

    def looked_up(self, model: nn.Module) -> int:
        """Positions and the class token."""
        token = getattr(model, "class_token", None)
        return super().looked_up(model) + (0 if token is None else token.numel())

    def attended(self, config: RunConfig, data: Any) -> float:
        """Return the number of an image's tokens."""
        return float(config.model.context)
