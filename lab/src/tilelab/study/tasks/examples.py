"""Labelled examples: their files, their text, and as tokens that are ready to be learnt from."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilelab.common.files import unpacked
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.tokenizers import wordpiece
from tilewise.errors import InvalidArgument, Unsupported

_SIZE_BYTES = 4  # of the field ISIZE that a file of gzip ends with (RFC 1952, section 2.3.1)


def folder_of(source: str, name: str, inside: str) -> Path:
    """Return the folder of ``data.source``: a path, or ``inside`` the data folder for the ``name``.

    Raises:
        InvalidArgument: its name, where no ``TILEWISE_DATA`` says where it is.
    """
    if source != name:
        return Path(source).expanduser()
    named = data_folder()
    if named is None:
        fix = f"Name the folder that has {inside}, or set data.source to its path."
        raise InvalidArgument("data.source", f"{name!r} and no TILEWISE_DATA", "both", fix)
    return named / inside


def unpacked_bytes(path: Path) -> int:
    """Size of a file, unpacked; of one that gzip packed as it says itself, modulo 4 GiB."""
    size = path.stat().st_size
    if path.suffix != ".gz" or size < _SIZE_BYTES:
        return size
    with path.open("rb") as file:
        file.seek(-_SIZE_BYTES, os.SEEK_END)
        return max(size, int.from_bytes(file.read(), "little"))


def lines(path: Path) -> list[str]:
    """Return the lines of a file in UTF-8: only a newline ends one, whatever else is in the text.

    Raises:
        InvalidArgument: it cannot be read or unpacked, or is not UTF-8.
    """
    try:
        text = unpacked(path).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        came = f"{path} ({' '.join(str(error).split())[:200]})"
        required = "a file of text in UTF-8, whole, packed by gzip if its name ends in .gz"
        fix = "It is damaged or something else: get it again."
        raise InvalidArgument("data.source", came, required, fix) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    found = []
    for number, line in enumerate(lines(path), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            came = f"{path}, line {number}: {line[:40]!r}"
            raise InvalidArgument("data.source", came, "an object in JSON on every line")
        found.append(value)
    return found


HUB = "hub:"  # of a ``data.source``


def table(source: str, configuration: str | None, split: str | None, files: str) -> Any:
    """A split of a data set (None: all), by a name of the Hub or the path of a folder laid out so.

    ``files`` says in words what ``data.source`` may be instead.
    """
    try:
        import datasets
    except ImportError:
        fix = f"pip install 'tilewise[hub]', or set data.source to {files}"
        raise Unsupported("a data set of the Hub without the package datasets", fix=fix) from None
    try:
        return datasets.load_dataset(source.removeprefix(HUB), configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        came = f"{source} ({' '.join(str(error).split())[:200]})"
        of = "" if configuration is None else f"the configuration {configuration} and "
        of += "a split" if split is None else f"the split {split}"
        raise InvalidArgument("data.source", came, f"a data set with {of}") from None


class Rows(NamedTuple):
    """Examples before they are tokens."""

    first: list[Any]  # texts, or what else an ``Encoding`` encodes
    labels: list[Any]  # classes from 0 on, or numbers
    second: list[str] | None = None  # the other ones of pairs; None for single sequences
    left_out: int = 0  # lines of the file that are no examples

    def take(self, indices: Sequence[int]) -> Rows:
        """Some of them, in that order."""
        first, labels = ([each[index] for index in indices] for each in (self.first, self.labels))
        second = None if self.second is None else [self.second[index] for index in indices]
        return Rows(first, labels, second, self.left_out)


class Encoding(NamedTuple):
    """How sequences become tokens."""

    vocabulary: int  # token ids
    start: int | None  # token before a sequence; None for none
    border: int | None  # token behind each part; None for none
    encode: Callable[[list[Any]], Sequence[Sequence[int]]]


_BYTES = 256


def encoding_of(tokenizer: str) -> Encoding:
    """Return the encoding of texts by ``"bytes"`` or ``"wordpiece"``."""
    if tokenizer == "bytes":
        return Encoding(_BYTES + 1, _BYTES, None, lambda texts: [list(t.encode()) for t in texts])
    pieces = wordpiece(data_folder())
    return Encoding(pieces.vocabulary, pieces.first, pieces.border, pieces.encode)


@dataclass(frozen=True)
class Ragged:
    """Sequences of tokens of different lengths in one array."""

    tokens: NDArray[np.int32]  # int32, all of them, one sequence after the other
    borders: NDArray[np.int64]  # int64 [n + 1]: sequence i is tokens[borders[i] : borders[i + 1]]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """These sequences."""
        borders = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        tokens = np.empty(borders[-1], np.int32)
        for row, begin, end in zip(rows, borders[:-1], borders[1:], strict=True):
            tokens[begin:end] = row
        return cls(tokens, borders)

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __getitem__(self, index: int) -> list[int]:
        found: list[int] = self.tokens[self.borders[index] : self.borders[index + 1]].tolist()
        return found

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.borders)


@dataclass(frozen=True)
class Split:
    """Some examples."""

    first: Ragged  # the sequence of each
    second: Ragged | None  # the other one of a pair; None for single sequences
    labels: NDArray[Any]  # int64 classes from 0 on, or float64 numbers

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def parts(self) -> tuple[Ragged, ...]:
        """The sequences, or the first and the second ones of pairs."""
        return (self.first,) if self.second is None else (self.first, self.second)

    def update(self, digest: Any) -> None:
        """Put all of it into a hash; nothing is copied, as memory is measured meanwhile."""
        for ragged in self.parts:
            digest.update(np.ravel(ragged.borders).data)
            digest.update(np.ravel(ragged.tokens).data)
        digest.update(np.ravel(self.labels).data)


@dataclass(frozen=True)
class Examples:
    """A data set that is ready; a ``Prepared`` of ``tasks/task.py``."""

    name: str  # in words
    source: str  # as the config says it
    vocabulary: int  # token ids
    start: int | None  # token before a sequence; None for none
    border: int | None  # token behind each part; None for none
    train: Split
    held_out: Mapping[str, Split]  # the parts that are evaluated, by name, the main one first
    tokenizer: str  # what made the tokens, for the record
    tuning: Split | None = None  # that trials are scored on; None without ``data.tuning``

    def __post_init__(self) -> None:
        tuning = {} if self.tuning is None else {"tuning": self.tuning}
        for part, split in (("train", self.train), *self.held_out.items(), *tuning.items()):
            if not len(split):
                required = "one example or more to learn from, and to be evaluated"
                raise InvalidArgument("data.source", f"{self.name} without {part}", required)

    def __str__(self) -> str:
        parts = ", ".join(f"{len(split):,} {name}" for name, split in self.held_out.items())
        tuned = "" if self.tuning is None else f", {len(self.tuning):,} for tuning"
        learnt = f"{len(self.train):,} examples to learn from{tuned}"
        return f"Data: {self.name}, {learnt}; held out: {parts}"

    @cached_property
    def sha256(self) -> str:
        """The hash of all tokens and labels, and of the rule that puts sequences together."""
        digest = hashlib.sha256(f"{self.vocabulary} {self.start} {self.border}\n".encode())
        self.train.update(digest)
        for name, split in self.held_out.items():
            digest.update(f"\n{name}\n".encode())
            split.update(digest)
        if self.tuning is not None:
            digest.update(b"\ntuning\n")
            self.tuning.update(digest)
        return digest.hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return a description of the data for records."""
        return {
            "name": self.name,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "sha256": self.sha256,
            "vocabulary": self.vocabulary,
            "train_examples": len(self.train),
            "held_out_examples": {name: len(split) for name, split in self.held_out.items()},
            **({} if self.tuning is None else {"tuning_examples": len(self.tuning)}),
        }

    def sequence(self, split: Split, index: int, context: int) -> tuple[list[int], list[int]]:
        """Return an example as one sequence of at most ``context`` tokens, and its token types."""
        second = None if split.second is None else split.second[index]
        return joined(split.first[index], second, context, self.start, self.border)

    def pair(self, split: Split, index: int, context: int) -> list[tuple[list[int], list[int]]]:
        """Return both parts of an example as sequences of their own, with token type 0."""
        parts = (part[index] for part in split.parts)
        return [joined(each, None, context, self.start, self.border) for each in parts]

    def lengths(
        self, split: Split, context: int | None = None, *, apart: bool = False
    ) -> NDArray[np.int64]:
        """Return tokens of each example's sequence, cut at a context or whole.

        With ``apart`` both parts of a pair are sequences of their own, the first ones in front.
        """
        parts = [part.lengths + (self.border is not None) for part in split.parts]
        found = np.concatenate(parts) if apart else np.sum(parts, axis=0)
        found = found + (self.start is not None)
        return found if context is None else np.minimum(found, context)


def joined(
    first: Sequence[int],
    second: Sequence[int] | None,
    context: int,
    start: int | None,
    border: int | None,
) -> tuple[list[int], list[int]]:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], and the types 0 and 1.

    An input that is too long loses tokens at its ends, one at a time from the part that is longer
    then. With equal parts the second loses one, as in BERT's fine-tuning.

    Raises:
        InvalidArgument: a context that has no room for a token of each part.
    """
    parts = 1 if second is None else 2
    special = (start is not None) + parts * (border is not None)
    room = context - special
    if room < parts:
        required = f"{special + parts} or more: {special} are special tokens"
        raise InvalidArgument("model.context", str(context), required)
    ends = [] if border is None else [border]
    head = [] if start is None else [start]
    if second is None:
        tokens = [*head, *first[:room], *ends]
        return tokens, [0] * len(tokens)
    n = min(len(first), max(room - len(second), room - room // 2))
    m = min(len(second), room - n)
    one, two = [*head, *first[:n], *ends], [*second[:m], *ends]
    return one + two, [0] * len(one) + [1] * len(two)
