"""The text of a study, and the parts of it that are held out: for verdicts, and for tuning.

Content and names alone decide a split, so it is the same on every machine and for every seed and
arm. Files go to one side or the other by the hash of their path (near copies of others always to
training). A single file is cut: its last part is held out, and the part before that is for tuning.
WikiText has a held-out part of its own, and its last articles of the training part are for tuning.
A part for tuning is taken from the training text: the held-out text is the same with and without.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tilelab.common.files import unpacked
from tilelab.study.data import wikitext
from tilewise.errors import InvalidArgument

# Third-party packages and test suites differ between distributions of the same Python.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_PATTERN = frozenset("*?[")
_SHORT_LINE = 20  # bytes up to which a line may be anybody's: ``return self``
_CANDIDATE_SHARES = 4  # of the held-out share: files that are looked at for it


class Piece(NamedTuple):
    """A file that was read."""

    path: str  # relative to where the search began, with ``/``
    data: bytes


class Part(NamedTuple):
    """A part of a text as the tokenizer gets it."""

    text: bytes  # UTF-8, or any bytes where only bytes are asked for
    words: int | None = None  # original words of WikiText; None for other text


@dataclass(frozen=True)
class Corpus:
    """A text as it was found, split in two, or in three where a part is for tuning."""

    name: str  # the source in words
    train: bytes  # bytes as they are in the files
    held_out: bytes
    files: int  # how many went in
    is_wikitext: bool = False  # words that have to be made into text
    # Of the documents of each part; None: each is one, or WikiText.
    sizes: tuple[Sequence[int], ...] | None = None
    tuning: bytes = b""  # empty where nothing is kept for it

    @property
    def sha256(self) -> str:
        """The hash of text and split: the training length in decimal, a newline, the parts.

        With a part for tuning, the held-out length follows the training length, after a space.
        """
        lengths = [len(self.train), *([len(self.held_out)] if self.tuning else [])]
        digest = hashlib.sha256(f"{' '.join(map(str, lengths))}\n".encode())
        for part in self.parts:
            digest.update(part)
        return digest.hexdigest()

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The training text, the held-out text, and that for tuning where there is one."""
        return (self.train, self.held_out, *([self.tuning] if self.tuning else []))

    def documents(self) -> tuple[Sequence[int], ...]:
        """Return bytes of each document of each part, of the text as ``prepared`` gives it."""
        if not self.is_wikitext:
            return self.sizes or tuple([len(part)] for part in self.parts)
        parts = (wikitext.articles(part.decode()) for part in self.parts)
        return tuple(
            [len(wikitext.detokenise(article).encode()) for article in part] for part in parts
        )

    def prepared(self) -> list[Part]:
        """Return each part to tokenize; WikiText is detokenised and its words are counted."""
        if not self.is_wikitext:
            return [Part(part) for part in self.parts]
        texts = [part.decode() for part in self.parts]
        return [Part(wikitext.detokenise(text).encode(), wikitext.words(text)) for text in texts]


def load(source: str, held_out: float, size_cap_bytes: int, tuning: float = 0.0) -> Corpus:
    """Find a text and split it.

    Args:
        source: one of ``NAMES``, or the path of a text file (``.gz`` or not), of a folder with the
            official WikiText files, or of any folder of text files. The path of a folder may end
            with a pattern of its files: ``/usr/share/**/*.py``.
        held_out: the share of the bytes that is kept for evaluation; WikiText brings its own part.
        size_cap_bytes: the most bytes that are read: whole files in the order of their paths, or
            whole lines of a single file. It does not cap WikiText's held-out text.
        tuning: the share of the bytes that is kept for tuning, of WikiText of the training part.

    Raises:
        InvalidArgument: no such text, not text, or too little of it to split.
    """
    if source in NAMED:
        words, pieces_of = NAMED[source]
        return _split_files(words, pieces_of(size_cap_bytes), held_out, tuning)
    if source in wikitext.NAMES:
        return _wikitext(wikitext.find(source, data_folder()), size_cap_bytes, tuning)
    path = Path(source).expanduser()
    if path.is_file():
        return _split_file(path.name, _lines(_read(path), size_cap_bytes), held_out, tuning)
    if path.is_dir():
        if files := wikitext.inside(path):
            return _wikitext(files, size_cap_bytes, tuning)
        pieces = _text_files(path, size_cap_bytes)
        return _split_files(path.resolve().name, pieces, held_out, tuning)
    if _PATTERN.intersection(source):
        return _split_files(source, _matching(path, size_cap_bytes), held_out, tuning)
    raise InvalidArgument("data.source", repr(source), f"{', '.join(NAMES)}, or a path that exists")


def data_folder() -> Path | None:
    """Return the folder of data sets that the user named by ``TILEWISE_DATA``; None for none."""
    named = os.environ.get("TILEWISE_DATA")
    return Path(named).expanduser() if named else None


def standard_library(size_cap_bytes: int, folder: Path | None = None) -> list[Piece]:
    """Return the ``*.py`` of this Python (or ``folder``) by path, whole files up to a size."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found = [
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    return _whole_files(root, found, size_cap_bytes, _read_if_possible)


def installed_packages(size_cap_bytes: int) -> list[Piece]:
    """Return the ``*.py`` in UTF-8 of the packages beside torch, as ``standard_library`` does."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    root = Path(torch.origin).parent.parent
    return _whole_files(root, list(root.rglob("*.py")), size_cap_bytes, _read_if_utf8)


# Name -> what records and reports call the text, and its files up to so many bytes in all.
NAMED: dict[str, tuple[str, Callable[[int], list[Piece]]]] = {
    "stdlib": (
        f"the standard library of Python {sysconfig.get_python_version()}",
        standard_library,
    ),
    "packages": ("the installed Python packages", installed_packages),
}
NAMES = (*NAMED, *wikitext.NAMES)


def _read_if_utf8(path: Path) -> bytes | None:
    """Return the bytes; None for a file that cannot be read, or is not text in UTF-8."""
    data = _read_if_possible(path)
    if data is None or b"\0" in data:
        return None
    try:
        data.decode()
    except UnicodeDecodeError:
        return None
    return data


def _read_if_possible(path: Path) -> bytes | None:
    """Return the bytes; None for a dangling link or a file of another user (the hash tells)."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _matching(path: Path, size_cap_bytes: int) -> list[Piece]:
    """Return the files of a pattern, sorted by path, up to a size; ``**`` is any folders."""
    at = next(number for number, part in enumerate(path.parts) if _PATTERN.intersection(part))
    root, pattern = Path(*path.parts[:at]), "/".join(path.parts[at:])
    found = [each for each in root.glob(pattern) if each.is_file()]
    return _whole_files(root, found, size_cap_bytes, _read)


def _text_files(root: Path, size_cap_bytes: int) -> list[Piece]:
    """Return all files of a folder but hidden ones, sorted by path, up to a size."""
    found = [
        path
        for path in root.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    return _whole_files(root, found, size_cap_bytes, _read)


def _whole_files(
    root: Path, found: list[Path], size_cap_bytes: int, read: Callable[[Path], bytes | None]
) -> list[Piece]:
    """Files in the order of their paths; the first that goes over the size ends the list."""
    pieces: list[Piece] = []
    size = 0
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        data = read(path)
        if data is None:
            continue
        size += len(data)
        if size > size_cap_bytes:
            break
        pieces.append(Piece(path.relative_to(root).as_posix(), data))
    return pieces


def _read(path: Path) -> bytes:
    try:
        data = unpacked(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        came = f"{path} ({reason})"
        raise InvalidArgument("data.source", came, "files that can be read") from None
    if b"\0" in data:
        fix = "Move it out of the folder, or name the text files' own folder."
        raise InvalidArgument("data.source", f"{path}, which is not text", "text files", fix)
    return data


def _lines(data: bytes, size_cap_bytes: int) -> bytes:
    """Return the text up to a size, cut after a line (or a character, where a line is longer)."""
    return data if len(data) <= size_cap_bytes else data[: _cut(data, size_cap_bytes)]


def _cut(data: bytes, at: int) -> int:
    """Return the last place up to ``at`` that ends a line, or a character where none does."""
    after_line = data.rfind(b"\n", 0, at) + 1
    if after_line:
        return after_line
    while at > 0 and at < len(data) and data[at] & 0xC0 == 0x80:  # inside a character of UTF-8
        at -= 1
    return at


def _split_file(name: str, data: bytes, held_out: float, tuning: float) -> Corpus:
    """Hold out the last part of a text, from the start of a line on; the one before for tuning."""
    border = _cut(data, len(data) - int(len(data) * held_out))
    first = _cut(data, border - int(len(data) * tuning)) if tuning else border
    found = Corpus(name, data[:first], data[border:], 1, tuning=data[first:border])
    return _checked(found, tuning)


def _split_files(
    name: str, pieces: Sequence[Piece], held_out: float, tuning: float = 0.0
) -> Corpus:
    """Hold out whole files, and keep others for tuning. A single file is cut."""
    if len(pieces) == 1:
        return _split_file(name, pieces[0].data, held_out, tuning)
    size = sum(len(piece.data) for piece in pieces)
    kept = _chosen(pieces, pieces, int(size * held_out))
    rest = [piece for piece in pieces if piece.path not in kept]
    tried = _chosen(rest, pieces, int(size * tuning)) if tuning else set()
    parts = [
        [piece.data for piece in pieces if (piece.path in kept, piece.path in tried) == side]
        for side in ((False, False), (True, False), (False, True))
    ]
    train, evaluation, chosen = (b"".join(part) for part in parts)
    sizes = tuple([len(data) for data in part] for part in parts[: 3 if tuning else 2])
    found = Corpus(name, train, evaluation, len(pieces), sizes=sizes, tuning=chosen)
    return _checked(found, tuning)


def _chosen(among: Sequence[Piece], pieces: Sequence[Piece], share: int) -> set[str]:
    """Return the paths that fit into a share of bytes, or the smallest, in hashes' order."""
    # Copies of others stay in training: their text would be learnt by heart.
    candidates, left = _first_by_hash(among, share), share
    copies = _copies(pieces, candidates)
    kept = set()
    for piece in candidates:
        if len(piece.data) <= left and piece.path not in copies:
            kept.add(piece.path)
            left -= len(piece.data)
    if among and not kept:
        kept = {min(among, key=lambda piece: (len(piece.data), piece.path)).path}
    return kept


def _first_by_hash(pieces: Sequence[Piece], share: int) -> list[Piece]:
    # A few shares: more would hardly be held out, and is compared with all of the text.
    found, size = [], 0
    for piece in sorted(pieces, key=lambda piece: hashlib.sha256(piece.path.encode()).digest()):
        if 0 < len(piece.data) <= share and size <= _CANDIDATE_SHARES * share:
            found.append(piece)
            size += len(piece.data)
    return found


def _copies(pieces: Sequence[Piece], candidates: Sequence[Piece]) -> set[str]:
    """Return the candidates most of whose text is, line by line, in another file as well."""
    # Such as tables of code pages. Short lines say nothing; licences are less than most of a file.
    lines_of = {
        piece.path: {line for line in piece.data.split(b"\n") if len(line) > _SHORT_LINE}
        for piece in candidates
    }
    wanted = set().union(*lines_of.values())
    files = Counter[bytes]()  # line -> how many files have it
    for piece in pieces:
        files.update(wanted.intersection(piece.data.split(b"\n")))
    return {
        path
        for path, lines in lines_of.items()
        if 2 * sum(len(line) for line in lines if files[line] > 1) > sum(map(len, lines))
    }


def _wikitext(files: wikitext.Files, size_cap_bytes: int, tuning: float) -> Corpus:
    train, held_out = _lines(_read(files.train), size_cap_bytes), _read(files.held_out)
    for path, data in ((files.train, train), (files.held_out, held_out)):
        try:
            data.decode()
        except UnicodeDecodeError:
            came = f"{path}, which is not UTF-8"
            raise InvalidArgument("data.source", came, "the files of WikiText") from None
    first = wikitext.last_articles(train, int(len(train) * tuning)) if tuning else len(train)
    parts = train[:first], held_out
    found = Corpus(_share(files, train), *parts, 2, is_wikitext=True, tuning=train[first:])
    return _checked(found, tuning)


def _share(files: wikitext.Files, train: bytes) -> str:
    """Return the name of a WikiText, with the share of its words where not all are there."""
    share = wikitext.words(train.decode()) / wikitext.WORDS
    of_103 = files.name.startswith("wikitext-103")
    return f"{files.name}, {share:.1%} of its words" if of_103 and share < 0.95 else files.name


def _checked(corpus: Corpus, tuning: float) -> Corpus:
    if corpus.train and corpus.held_out and (corpus.tuning or not tuning):
        return corpus
    size = sum(map(len, corpus.parts))
    came = f"{size:,} bytes in {corpus.files} files ({corpus.name})"
    shares = "data.held_out, data.tuning" if tuning else "data.held_out"
    fix = f"Give more text, or a larger {shares} or data.size_cap_bytes."
    required = "text for both training and evaluation" + (", and for tuning" if tuning else "")
    raise InvalidArgument("data.source", came, required, fix)
