"""WikiText-2 and -103: where their files are, their words, and the text that these stand for.

The files hold words that are set apart by spaces, punctuation too, and three marks for joints
inside a word or number (``@-@``, ``@,@``, ``@.@``). ``detokenise`` makes ordinary text of them.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tilelab.common.files import first_of
from tilewise.errors import InvalidArgument

# source -> suffix of the official files, and the stem of single files that say the source
# themselves
_SOURCES = {
    "wikitext-2": ("tokens", "wikitext2"),
    "wikitext-103": ("tokens", "wikitext103"),
    "wikitext-2-raw": ("raw", "wikitext2"),
    "wikitext-103-raw": ("raw", "wikitext103"),
}
NAMES = tuple(_SOURCES)
WORDS = 103_227_021  # of the training text of WikiText-103 (Merity et al. 2016)

# Applied in this order to each line. Every rule only takes away spaces, or the marks of a joint.
_LITERAL = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
_PAIRS = tuple(
    (re.compile(rf"{opening}[ ]*([^{closing}]*?)[ ]*{closing}"), rf"{before}\1{after}")
    for opening, closing, before, after in (
        (r"\(", r"\)", "(", ")"),
        (r"\[", r"\]", "[", "]"),
        (r"\{", r"\}", "{", "}"),
        ('"', '"', '"', '"'),
        ("'", "'", "'", "'"),
    )
)
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))
_TITLE = re.compile(r" ?= (?!=).* (?<!= )= ?")
_LAST = ((" °", "°"), (" 's", "'s"))


class Files(NamedTuple):
    """The two files of a WikiText."""

    name: str  # with ``(prefix)`` for a part of the official training file
    train: Path
    held_out: Path  # the official validation text


def detokenise(text: str) -> str:
    """Turn WikiText's words into ordinary text.

    These are the rules behind published word perplexities of GPT-2 (those of Megatron-LM), with two
    differences. Brackets and quotes pair up within a line, so an unclosed one does not turn all
    those after it. The letter N stays an N. So the rules add, replace and lose only spaces and the
    marks of joints. The text without spaces is the same before and after, with marks read as what
    they mark. The result does not tell whether a joint had a space.
    """
    return "\n".join(_detokenise_line(line) for line in text.split("\n"))


def _detokenise_line(line: str) -> str:
    for old, new in _LITERAL:
        line = line.replace(old, new)
    for pattern, new in _PAIRS:
        line = pattern.sub(new, line)
    for old, new in (*_HEADINGS, *_LAST):
        line = line.replace(old, new)
    return line.removeprefix(" ").removesuffix(" ")


def words(text: str) -> int:
    """Count the words of the original: pieces between single spaces; a line's end is one too.

    The test set of WikiText-103 has 245,566 by this count, the usual one for word perplexity.
    """
    return text.strip().count(" ") + 1


def articles(text: str) -> list[str]:
    """Return the text cut before the title of each article; all of it, in order.

    A title is a line ``= words =`` between blank ones (or at the start); headings inside an article
    have more marks.
    """
    lines = text.split("\n")
    blank = [not line.strip() for line in ("", *lines, "")]
    cuts = [
        at
        for at, line in enumerate(lines)
        if _TITLE.fullmatch(line) and blank[at] and blank[at + 2]
    ]
    before = "".join(lines[: cuts[0]]) if cuts else ""
    edges = [0, *(cuts if before.strip() else cuts[1:]), len(lines)]
    found = ["\n".join(lines[begin:end]) + "\n" for begin, end in pairwise(edges)]
    found[-1] = found[-1].removesuffix("\n")
    return found


def last_articles(text: bytes, size: int) -> int:
    """Return where the last articles begin that take at most ``size`` bytes, or else the last one.

    0 where no article begins after the first byte. ``text`` is UTF-8.
    """
    looked = max(size, 1)
    while True:
        line = text.rfind(b"\n", 0, max(len(text) - looked, 0)) + 1
        first, *whole = articles(text[line:].decode())  # the first may be cut in two
        if whole:
            return line + len(first.encode())
        if not line:
            return 0
        looked *= 2


def find(name: str, folder: Path | None) -> Files:
    """Return the files of a WikiText in a folder of data sets.

    Looked for, with or without ``.gz``: the official ``wiki.train.tokens`` (``.raw``) and
    ``wiki.valid.tokens`` in ``NAME/`` or ``NAME-v1/``, and ``wikitext103.train.tokens.txt`` and the
    like beside them or in ``wikitext/``. A file ``...train-prefix...`` is taken where the whole is
    not.
    """
    suffix, stem = _SOURCES[name]
    if folder is not None:
        for place in (folder, *(folder / each for each in (name, f"{name}-v1", "wikitext"))):
            official = place.name.startswith(name.removesuffix("-raw"))
            if found := _pair(place, name, suffix, stem, official):
                return found
    came = "no TILEWISE_DATA" if folder is None else f"TILEWISE_DATA={folder} without it"
    address = f"https://wikitext.smerity.com/{name}-v1.zip"
    fix = (
        f"Get it with: mkdir -p data && cd data && curl -LO {address} && unzip {name}-v1.zip && "
        "export TILEWISE_DATA=$PWD"
    )
    required = f"a folder with {name}/wiki.train.{suffix} and wiki.valid.{suffix} ({name})"
    raise InvalidArgument("data.source", came, required, fix)


def inside(folder: Path) -> Files | None:
    """Return the official files of a WikiText right in a folder; None for another folder."""
    found = (_pair(folder, folder.name, suffix, "", official=True) for suffix in ("tokens", "raw"))
    return next(filter(None, found), None)


def _pair(folder: Path, name: str, suffix: str, stem: str, official: bool) -> Files | None:
    train, part, valid = [], [], []
    if official:
        train, valid = [f"wiki.train.{suffix}"], [f"wiki.valid.{suffix}"]
    if stem:
        train += [f"{stem}.train.{suffix}.txt"]
        part = [f"{stem}.train-prefix.{suffix}.txt"]
        # Raw validation text is the same in WikiText-2 and -103.
        valid += [f"{stem}.valid.{suffix}.txt"] + ["wikitext.valid.raw.txt"] * (suffix == "raw")
    learnt, held_out = first_of(folder, *train), first_of(folder, *valid)
    if learnt is None:
        learnt, name = first_of(folder, *part), f"{name} (prefix)"
    return Files(name, learnt, held_out) if learnt and held_out else None
