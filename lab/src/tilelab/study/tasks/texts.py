"""Texts with labels, from their bytes or from word pieces: reviews, and whatever has their format.

Bytes are the tokens of the Long Range Arena's task "text": ids 0 to 255, and before each text a
start token. What goes over the context is cut off. Word pieces are BERT's, between ``[CLS]`` and
``[SEP]``.

Sources: Tay et al., Long Range Arena (2021), section 2.2.2; Maas et al., Learning Word Vectors for
Sentiment Analysis (2011).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from tilelab.study.ask.config import RunConfig
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.wordpiece import wordpiece
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import Examples, Ragged, Split
from tilelab.study.tasks.files import ended, folder_of, objects
from tilelab.study.tasks.hub import HUB, table
from tilewise.errors import InvalidArgument

__all__ = ["LabelledTexts", "TextClassification", "Texts"]

_BYTES = 256
_PARTS = {"train": "train", "held_out": "test"}  # of a data set, and what its file is called


class Texts(NamedTuple):
    """Texts, and the class of each."""

    texts: list[str]
    labels: list[int]


class _Encoding(NamedTuple):
    """A tokenizer, and the tokens around what it gives."""

    vocabulary: int
    start: int
    border: int | None
    encode: Callable[[list[str]], Sequence[Sequence[int]]]


def _encoding(name: str) -> _Encoding:
    if name == "bytes":
        return _Encoding(_BYTES + 1, _BYTES, None, _bytes_of)
    pieces = wordpiece(data_folder())
    return _Encoding(pieces.vocabulary, pieces.first, pieces.border, pieces.encode)


def _bytes_of(texts: list[str]) -> list[list[int]]:
    return [list(each.encode()) for each in texts]


class LabelledTexts(Classification):
    """The label of a text; subclasses read the texts.

    Args:
        passage: cut texts into passages of at most so many tokens, special ones too, each an
            example with its text's label; a last one that is shorter than half of that is left out
            (but not where it is the only one). 0 to take texts whole.
        pooling: as of ``Classification``.
    """

    tokenizers = ("bytes", "wordpiece")
    title: ClassVar[str]

    def __init__(self, passage: int, pooling: Literal["first", "mean"]) -> None:
        super().__init__(pooling)
        self.passage = passage
        self.quarters = not passage  # passages are of one length

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if self.passage > config.model.context:
            required = f"at most model.context={config.model.context}: no passage is cut"
            raise InvalidArgument("task.passage", str(self.passage), required)

    @abstractmethod
    def read(self, source: str) -> dict[str, Texts]:
        """Return the texts: ``"train"``, and the part that is held out.

        Args:
            source: ``data.source``.

        Raises:
            InvalidArgument: they are not there, or something else.
        """

    def prepare(self, config: RunConfig, cache: Path) -> Examples:
        """Return the texts as tokens."""
        encoding = _encoding(config.data.tokenizer)
        parts = {
            name: self._split(texts, encoding)
            for name, texts in self.read(config.data.source).items()
        }
        cut = f", in passages of {self.passage:,} tokens" if self.passage else ""
        data = Examples(
            name=f"{self.title}{cut}",
            source=config.data.source,
            vocabulary=encoding.vocabulary,
            start=encoding.start,
            border=encoding.border,
            train=parts.pop("train"),
            held_out=parts,
            tokenizer=config.data.tokenizer,
        )
        return self.checked(data)

    def _split(self, texts: Texts, encoding: _Encoding) -> Split:
        room = self.passage - 1 - (encoding.border is not None)
        rows: list[Sequence[int]] = []
        labels: list[int] = []
        for tokens, label in zip(encoding.encode(texts.texts), texts.labels, strict=True):
            found = _passages(tokens, room) if self.passage else [tokens]
            rows += found
            labels += [label] * len(found)
        return Split(Ragged.of(rows), None, np.array(labels, np.int64))


def _passages(tokens: Sequence[int], room: int) -> list[Sequence[int]]:
    found = [tokens[at : at + room] for at in range(0, len(tokens), room)] or [tokens]
    return found[:-1] if len(found) > 1 and 2 * len(found[-1]) < room else found


class TextClassification(LabelledTexts):
    """IMDb's reviews, good or bad, or other texts in files of the same format.

    ``data.source`` is one of:

    * ``"imdb"``: the folder of that name in ``TILEWISE_DATA``;
    * a folder with ``train.jsonl`` and ``test.jsonl`` (or with ``.gz``); each line is an object
      with ``text`` and ``label``, a number from 0 on;
    * ``"hub:NAME"`` for a data set of the Hub with these columns and splits, e.g.
      ``"hub:stanfordnlp/imdb"``.

    The test part is held out.

    Args:
        classes: of labels.
        passage: as of ``LabelledTexts``.
        pooling: as of ``Classification``.
    """

    sources = "imdb, a folder with train.jsonl and test.jsonl, or hub:NAME"
    title = "texts with labels"

    def __init__(self, classes: int, passage: int, pooling: Literal["first", "mean"]) -> None:
        super().__init__(passage, pooling)
        self.classes = classes

    def files(self, config: RunConfig) -> list[Path | None]:
        """See ``Classification``."""
        if config.data.source.startswith(HUB):
            return []
        folder = folder_of(config.data.source, "imdb", "imdb")
        return [ended(folder / f"{name}.jsonl") for name in _PARTS.values()]

    def read(self, source: str) -> dict[str, Texts]:
        """See ``LabelledTexts``."""
        if source.startswith(HUB):
            found = {
                part: table(source, None, split, "a folder with train.jsonl and test.jsonl")
                for part, split in _PARTS.items()
            }
            return {part: self._texts(rows, f"{source}, {part}") for part, rows in found.items()}
        folder = folder_of(source, "imdb", "imdb")
        texts = {}
        for part, name in _PARTS.items():
            path = ended(folder / f"{name}.jsonl")
            if path is None:
                fix = "Get reviews by data.source=hub:stanfordnlp/imdb, or set data.source."
                came = f"{folder} without {name}.jsonl"
                raise InvalidArgument("data.source", came, f"{name}.jsonl or {name}.jsonl.gz", fix)
            texts[part] = self._texts(objects(path), str(path))
        return texts

    def _texts(self, rows: Any, place: str) -> Texts:
        found = Texts([], [])
        for number, row in enumerate(rows, 1):
            text, label = row.get("text"), row.get("label")
            whole = isinstance(label, int) and not isinstance(label, bool)
            if not isinstance(text, str) or not whole or not 0 <= label < self.classes:
                came = f"{place}, row {number}: a text of {type(text).__name__}, label {label!r}"
                required = f"a text, and a label from 0 to {self.classes - 1} (task.classes)"
                raise InvalidArgument("data.source", came, required)
            found.texts.append(text)
            found.labels.append(label)
        return found
