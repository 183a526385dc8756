"""ListOps: the value, 0 to 9, of a nested expression of operators on lists of digits.

``[MAX 2 9 [MIN 4 7 ] 0 ]`` is 9. Operators are MIN, MAX, MED (the integer part of the median) and
SM (the sum modulo 10). The parentheses of the files say nothing that brackets do not, and are no
tokens, as in the Long Range Arena. A start token stands before each expression.

There are two forms: ``"lra"``, the Long Range Arena's expressions of 500 to 2,000 tokens, and
``"nyu"``, the original ones, most of them shorter than 50. A part of an expression has another
value than the whole, so none is ever cut. A context that is too short is refused, and ``longest``
leaves longer expressions out. The classes are not equally frequent: 0 and 9 are the most frequent
(each about 17 %). A model that sees the first operator alone does better than chance: MAX is mostly
9 and MIN mostly 0.

Sources: Nangia and Bowman, ListOps: A Diagnostic Dataset for Latent Tree Learning (2018); Tay et
al., Long Range Arena (2021), section 2.2.1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tilelab.common.files import first_of
from tilelab.models.vit import Pooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import HUB, Examples, Ragged, Split, folder_of, lines
from tilelab.study.tasks.task import Examination
from tilewise.errors import InvalidArgument

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
    """The value of an expression.

    Validation and test set of the Arena are held out together. Where NYU's training file is not
    there, a tenth of its test file is held out, by a hash of the expression: the same ones whatever
    ``longest`` is. Expressions of more than ``longest`` tokens, the start token not counted, are
    left out; 0 for none.
    """

    tokenizers = ("listops",)
    classes = 10
    quarters = True
    sources = "listops, or the path of a folder with the files of the form"

    def __init__(self, form: Literal["lra", "nyu"], longest: int, pooling: Pooling) -> None:
        super().__init__(pooling)
        self.form, self.longest = form, longest

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.data.source.startswith(HUB):
            raise InvalidArgument("data.source", repr(config.data.source), self.sources)
        if self.longest and config.model.context < self.longest + 1:
            self._refuse(config, self.longest)

    def _folder(self, config: RunConfig) -> Path:
        return folder_of(config.data.source, "listops", f"listops/{self.form}")

    def files(self, config: RunConfig) -> list[Path | None]:
        """See ``Classification``."""
        form, folder = _FORMS[self.form], self._folder(config)
        return [first_of(folder, name) for name in (form.train, *form.held_out)]

    def prepare(self, config: RunConfig, cache: Path) -> Examples:
        """Return the expressions as tokens."""
        form, source = _FORMS[self.form], config.data.source
        folder = self._folder(config)
        names = (form.train, *form.held_out)
        found = dict(zip(names, self.files(config), strict=True))
        spare = "" if self.form == "lra" else form.train  # its test file has enough for both
        missing = [name for name, path in found.items() if path is None and name != spare]
        if missing:
            name = missing[0]
            fix = f"Get it from {form.site}, or set data.source."
            raise InvalidArgument("data.source", f"{folder} without {name}", name, fix)
        learnt, *parts = ([] if path is None else self._rows(path) for path in found.values())
        rows = [row for part in parts for row in part]
        split = ""
        if found[form.train] is None:
            learnt = [row for row in rows if not _kept_out(row)]
            rows = [row for row in rows if _kept_out(row)]
            split = f", of {form.held_out[0]} alone"
        limit = f" of at most {self.longest:,} tokens" if self.longest else ""
        data = Examples(
            name=f"ListOps ({self.form.upper()}{split}){limit}",
            source=source,
            vocabulary=len(_WORDS) + 1,
            start=_START,
            border=None,
            train=_split(learnt),
            held_out={"held_out": _split(rows)},
            tokenizer="listops",
        )
        return self.checked(data)

    def examination(self, config: RunConfig, data: Examples) -> Examination:
        """See ``Classification``."""
        self._check_fits(config, data)
        return super().examination(config, data)

    def evaluated(self, config: RunConfig, data: Examples, whole: bool) -> int:
        """See ``Classification``; it is asked before the first run, which is when to refuse."""
        self._check_fits(config, data)
        return super().evaluated(config, data, whole)

    def _check_fits(self, config: RunConfig, data: Examples) -> None:
        longest = max(
            int(each.first.lengths.max()) for each in (data.train, *data.held_out.values())
        )
        if config.model.context < longest + 1:
            self._refuse(config, longest)

    def _refuse(self, config: RunConfig, longest: int) -> None:
        required = f"{longest + 1:,}, the longest expression and a start token, or more"
        fix = f"Or set task.longest to {config.model.context - 1:,}: expressions are never cut."
        raise InvalidArgument("model.context", f"{config.model.context:,}", required, fix)

    def _rows(self, path: Path) -> list[_Row]:
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
                found.append(_Row(tokens, int(columns[form.label])))
        return found


class _Row(NamedTuple):
    tokens: list[int]
    label: int


def tokens_of(expression: str) -> list[int]:
    """Return the tokens of an expression, parentheses left out; a KeyError has an unknown word."""
    return [_NUMBERS[word] for word in expression.split() if word not in _SILENT]


def _kept_out(row: _Row) -> bool:
    """Return whether an expression is held out, which depends on the expression alone."""
    return hashlib.sha256(bytes(row.tokens)).digest()[0] % _HELD_OUT_PARTS == 0


def _split(rows: list[_Row]) -> Split:
    labels = np.array([row.label for row in rows], np.int64)
    return Split(Ragged.of([row.tokens for row in rows]), None, labels)
