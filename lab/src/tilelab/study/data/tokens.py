"""Tokens of a corpus: made once, kept in a file with a checksum, mapped into memory.

A cache is two files: ``tokens-KEY.bin`` holds the training tokens, then the held-out ones, and then
those for tuning where there are some. ``tokens-KEY.json`` says what they are and has the SHA-256 of
the first. The key is made of the text's hash, the tokenizer and the format, so that a cache is
never stale. The JSON is written last: a crash before it leaves nothing that would be read.

A vocabulary that is trained on the text itself (the tokenizer ``"bpe"``) lies beside its tokens, in
``vocabulary-KEY.json`` with a checksum.

The borders of a text's documents (files of a folder, articles of WikiText) are kept beside the
tokens, in ``documents-KEY.json``; they are only made where they are asked for. A text from a single
file is one document.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tilelab.common.files import replacing, write_atomically
from tilelab.study.ask.config import Data
from tilelab.study.data import corpus
from tilelab.study.data.tokenizers import (
    Tokenizer,
    Vocabulary,
    of_vocabulary,
    tokenizer,
    train_vocabulary,
)
from tilewise.errors import InvalidArgument, TilewiseError

_AT_ONCE = 1 << 22  # tokens
_PARTS = ("train", "held_out", "tuning")  # in the order in which they are kept


@dataclass(frozen=True)
class Documents:
    """The documents of the parts of a text."""

    train: NDArray[np.int64]  # the first token of each document, int64, ascending from 0
    held_out: NDArray[np.int64]  # the same of the held-out text
    tuning: NDArray[np.int64] | None = None  # and of that for tuning, where there is one


def document_begins(
    sizes: Sequence[int], tokens: NDArray[Any], token_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the first token of each document, from the documents' bytes in order.

    A token that reaches over a border belongs to the document that it begins in; a document in
    which no token begins is none.
    """
    borders = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))[:-1]])
    found = np.zeros(len(borders), np.int64)
    done = before = 0
    for at in range(0, len(tokens), _AT_ONCE):
        bytes_of = token_bytes[tokens[at : at + _AT_ONCE]]
        starts = before + np.cumsum(bytes_of) - bytes_of
        before += int(bytes_of.sum())
        count = int(np.searchsorted(borders, starts[-1], side="right"))
        found[done:count] = at + np.searchsorted(starts, borders[done:count])
        done = count
    return np.unique(found[:done])


def segments(
    starts: NDArray[np.int64], first: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the documents of tokens in a row, and whether the next token is of the same one.

    ``starts`` has the first token of each document. The results are int64 and bool [length].
    """
    numbers = np.searchsorted(starts, np.arange(first, first + length + 1), side="right") - 1
    return numbers[:-1], numbers[:-1] == numbers[1:]


def mean_piece(starts: NDArray[np.int64], size: int, window: int, *, cut_at_starts: bool) -> float:
    """Return the mean length, over all tokens, of the document piece that a token is in.

    With ``cut_at_starts`` documents are cut into pieces of a window from their own beginning. Else
    all of the text is cut into windows, and these at the borders of documents.
    """
    cuts = [starts, np.array([size], np.int64)]
    if cut_at_starts:
        ends = np.append(starts[1:], size)
        cuts += [np.arange(a, b, window) for a, b in zip(starts, ends, strict=True)]
    else:
        cuts.append(np.arange(0, size, window))
    pieces = np.diff(np.unique(np.concatenate(cuts))).astype(np.float64)
    return float((pieces**2).sum() / pieces.sum())


FORMAT = 1
_OTHER_CHECKSUM = "its checksum is another one"


class CorruptCacheError(TilewiseError):
    """A file of a token cache is not what was written."""


@contextmanager
def reading(what: str, *files: Path) -> Iterator[None]:
    """Any error of this block is that of a damaged file of a cache, and says what to delete."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        them, made = ("it", "it") if len(files) == 1 else (" and ".join(map(str, files)), "they")
        raise CorruptCacheError(
            f"{what} {files[0]} is damaged ({error}). Delete {them}, and run the same command "
            f"again: {made} will be made anew."
        ) from None


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus."""

    name: str  # of the text, in words
    source: str  # as the config says it
    tokenizer: str  # as the config says it
    # Of the text and its split, before it was tokenized; and of a vocabulary trained on it.
    sha256: str
    vocabulary: int  # token ids
    train: NDArray[Any]  # mapped from a file, read only
    held_out: NDArray[Any]
    token_bytes: NDArray[np.int64]  # int64 [vocabulary]: bytes of text that each token stands for
    train_bytes: int  # of the text
    held_out_bytes: int
    train_words: int | None  # of WikiText, before it was detokenised
    held_out_words: int | None
    decode: Callable[[Sequence[int]], str] = field(compare=False)  # see ``Tokenizer``
    find_documents: Callable[[], Documents] | None = field(default=None, compare=False)
    find_text: Callable[[], tuple[bytes, bytes]] | None = field(default=None, compare=False)
    tuning: NDArray[Any] | None = None  # what trials are scored on; None: the held-out text
    tuning_bytes: int = 0
    tuning_words: int | None = None

    def scored_on(self, text: Literal["held-out", "tuning"]) -> Tokens:
        """Return the same with that text in the place of the held-out one."""
        if text == "held-out":
            return self
        assert self.tuning is not None, "the config of tokens without such a text says held-out"

        def find_documents() -> Documents:
            known = self.documents
            return known if known.tuning is None else Documents(known.train, known.tuning)

        return replace(
            self,
            held_out=self.tuning,
            held_out_bytes=self.tuning_bytes,
            held_out_words=self.tuning_words,
            find_documents=find_documents,
        )

    @cached_property
    def documents(self) -> Documents:
        """The beginnings of its documents; where none are known, each part is one document."""
        if self.find_documents is None:
            return Documents(np.zeros(1, np.int64), np.zeros(1, np.int64))
        return self.find_documents()

    def text(self) -> tuple[bytes, bytes]:
        """Return the training text and the held-out text that the tokens stand for.

        Raises:
            InvalidArgument: the text is not there any more, or is another one now.
        """
        if self.find_text is None:  # tokens that are bytes
            return self.train.tobytes(), self.held_out.tobytes()
        train, held_out = self.find_text()
        if (len(train), len(held_out)) != (self.train_bytes, self.held_out_bytes):
            came = f"{self.source}, which has changed since its tokens were made"
            raise InvalidArgument("data.source", came, "the text of the tokens")
        return train, held_out

    def __str__(self) -> str:
        learnt, held_out = len(self.train), len(self.held_out)
        tuned = "" if self.tuning is None else f", {len(self.tuning):,} for tuning"
        return f"Text: {self.name}, {learnt:,} tokens to learn from, {held_out:,} held out{tuned}"

    def as_json(self) -> dict[str, Any]:
        """Return all but the tokens, for records."""
        facts = {name: getattr(self, name) for name in _FACTS}
        sizes = {"train_tokens": len(self.train), "held_out_tokens": len(self.held_out)}
        counts = {name: getattr(self, name) for name in _COUNTS}
        if self.tuning is not None:
            sizes["tuning_tokens"] = len(self.tuning)
            counts |= {name: getattr(self, name) for name in _TUNING_COUNTS}
        return {**facts, **sizes, **counts}


_FACTS = ("name", "source", "tokenizer", "sha256", "vocabulary")
_COUNTS = ("train_bytes", "held_out_bytes", "train_words", "held_out_words")
_TUNING_COUNTS = ("tuning_bytes", "tuning_words")


def prepare(data: Data, cache: Path) -> Tokens:
    """Return the tokens of a text, from the cache or made now.

    Several processes may ask at once: one makes them, the others wait for it.

    Raises:
        InvalidArgument: no such text or vocabulary (the message says how to get it), or a cache
            folder that cannot be made.
        CorruptCacheError: a cache that is not what was written; the message says what to delete.
        DiskFullError: there is no room for the cache.
    """
    text = _text(data)
    _make_folder(cache)
    text_sha256 = text.sha256
    chosen = _tokenizer(data, text, text_sha256, cache)
    identity = f"{FORMAT} {text_sha256} {text.is_wikitext} {chosen.sha256}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    binary = cache / f"tokens-{key}.bin"
    sidecar = binary.with_suffix(".json")
    _made_once(sidecar, lambda: _write(text, chosen, binary, sidecar))
    said, parts = _open(binary, sidecar)
    # The same text may come in other files.
    borders = hashlib.sha256(f"{key} {text.sizes}".encode()).hexdigest()[:16]

    def find_documents() -> Documents:
        return _documents(cache / f"documents-{borders}.json", data, chosen, parts)

    def find_text() -> tuple[bytes, bytes]:
        train, held_out, *_ = _text(data).prepared()
        return train.text, held_out.text

    return Tokens(
        name=text.name,
        source=data.source,
        tokenizer=data.tokenizer,
        sha256=_sha256(text_sha256, chosen.sha256) if data.tokenizer == "bpe" else text_sha256,
        vocabulary=len(chosen.token_bytes),
        train=parts[0],
        held_out=parts[1],
        tuning=parts[2] if text.tuning else None,
        token_bytes=chosen.token_bytes,
        **{name: said[name] for name in (*_COUNTS, *(_TUNING_COUNTS if text.tuning else ()))},
        decode=chosen.decode,
        find_documents=find_documents,
        find_text=None if data.tokenizer == "bytes" else find_text,
    )


def _text(data: Data) -> corpus.Corpus:
    return corpus.load(data.source, data.held_out, data.size_cap_bytes, data.tuning)


def _make_folder(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        came = f"{cache} ({error.strerror})"
        fix = "Name another in the environment variable TILEWISE_CACHE."
        raise InvalidArgument("cache folder", came, "a folder that can be made", fix) from None


def _sha256(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _tokenizer(data: Data, text: corpus.Corpus, text_sha256: str, cache: Path) -> Tokenizer:
    """Return the tokenizer of a config; a trained one from its file, or trained now."""
    if data.tokenizer != "bpe":
        return tokenizer(data.tokenizer)
    most = data.vocabulary_bytes
    wanted = [str(FORMAT), text_sha256, str(text.is_wikitext), str(data.vocabulary)]
    key = _sha256(*wanted, *([str(most)] if most else []))[:16]
    path = cache / f"vocabulary-{key}.json"

    def make() -> None:
        made = train_vocabulary(text.prepared()[0].text, data.vocabulary, most)
        said = {**made._asdict(), "sha256": made.sha256}
        write_atomically(path, json.dumps(said, indent=1) + "\n")

    _made_once(path, make)
    with reading("the vocabulary", path):
        said = json.loads(path.read_text(encoding="utf-8"))
        merges = tuple((left, right) for left, right in said["merges"])
        found = Vocabulary(tuple(said["tokens"]), merges)
        if found.sha256 != said["sha256"]:
            raise ValueError(_OTHER_CHECKSUM)
    return of_vocabulary(found)


def _documents(
    path: Path, data: Data, chosen: Tokenizer, parts: Sequence[NDArray[Any]]
) -> Documents:
    """Return the borders of the documents, from their file or found now."""

    def make() -> None:
        documents = _text(data).documents()
        found = {
            name: document_begins(sizes, part, chosen.token_bytes).tolist()
            for name, sizes, part in zip(_PARTS[: len(parts)], documents, parts, strict=True)
        }
        write_atomically(path, json.dumps(found) + "\n")

    _made_once(path, make)
    with reading("the file of documents", path):
        said = json.loads(path.read_text(encoding="utf-8"))
        begins = [np.asarray(said[name], np.int64) for name in _PARTS[: len(parts)]]
        for each, part in zip(begins, parts, strict=True):
            inside = len(each) > 0 and each[0] == 0 and each[-1] < len(part)
            if not inside or not (np.diff(each) > 0).all():
                raise ValueError("these are no borders of its documents")
    return Documents(*begins)


def _made_once(path: Path, make: Callable[[], None]) -> None:
    """Make a file where it is missing: one of several processes does, the others wait for it."""
    if path.exists():
        return
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            make()


def _write(text: corpus.Corpus, chosen: Tokenizer, binary: Path, sidecar: Path) -> None:
    prepared = dict(zip(_PARTS, text.prepared(), strict=False))  # one may be for tuning
    parts = {name: chosen.encode(each.text) for name, each in prepared.items()}
    digest = hashlib.sha256()
    with replacing(binary) as temporary, temporary.open("wb") as file:
        for part in parts.values():
            file.write(part.data)
            digest.update(part.data)
    said = {
        "dtype": chosen.dtype.name,
        **{f"{name}_tokens": len(part) for name, part in parts.items()},
        **{f"{name}_bytes": len(each.text) for name, each in prepared.items()},
        **{f"{name}_words": each.words for name, each in prepared.items()},
        "sha256": digest.hexdigest(),
    }
    write_atomically(sidecar, json.dumps(said, indent=1) + "\n")


def _open(binary: Path, sidecar: Path) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return what the sidecar says, and the tokens of each part."""
    with reading("the token cache", binary, sidecar):
        said = json.loads(sidecar.read_text(encoding="utf-8"))
        tokens: NDArray[Any] = np.memmap(binary, np.dtype(said["dtype"]), mode="r")
        sizes = [said[f"{name}_tokens"] for name in _PARTS if f"{name}_tokens" in said]
        if missing := [name for name in _COUNTS if name not in said]:
            raise KeyError(missing[0])
        whole = len(tokens) == sum(sizes)
        if not whole or hashlib.sha256(tokens.data).hexdigest() != said["sha256"]:
            raise ValueError(_OTHER_CHECKSUM)
    return said, np.split(tokens, np.cumsum(sizes)[:-1])
