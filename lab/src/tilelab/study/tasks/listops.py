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
from typing import Any, Literal, NamedTuple

from tilelab.models.vit import Pooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import Encoding, Examples, Rows, lines
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
            learnt = [row for row in held_out if not _kept_out(row)]
            held_out = [row for row in held_out if _kept_out(row)]
        split = f", of {form.held_out[0]} alone" if alone else ""
        limit = f" of at most {self.longest:,} tokens" if self.longest else ""
        parts = {
            name: Rows([row.tokens for row in rows], [row.label for row in rows])
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
