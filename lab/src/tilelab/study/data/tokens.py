"""Tokens of a corpus: made once, kept in a file with a checksum, mapped into memory.

A cache is two files: ``tokens-KEY.bin`` holds the training tokens and then the held-out ones,
``tokens-KEY.json`` says what they are and has the SHA-256 of the first. The key is made of the
text's hash, the tokenizer and the format, so that a cache is never stale. The JSON is written last:
a crash before it leaves nothing that would be read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilelab.common.files import replacing, write_atomically
from tilelab.study.ask.config import Data
from tilelab.study.data import corpus, documents
from tilelab.study.data.documents import Documents
from tilelab.study.data.tokenizers import Tokenizer, tokenizer
from tilewise.errors import InvalidArgument, TilewiseError

__all__ = ["CorruptCacheError", "Tokens", "prepare"]

FORMAT = 1


class CorruptCacheError(TilewiseError):
    """A file of a token cache is not what was written."""


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus.

    Args:
        name: of the text, in words.
        source: as the config says it.
        tokenizer: ``"bytes"`` or ``"gpt2"``.
        sha256: of the text and its split, before it was tokenized.
        vocabulary: token ids.
        train, held_out: uint8 or uint16, mapped from a file, read only.
        token_bytes: int64 [vocabulary]: bytes of text that each token stands for.
        train_bytes, held_out_bytes: of the text.
        train_words, held_out_words: of WikiText, before it was detokenised; None for other text.
        find_documents: where its documents begin; they are found when ``documents`` is asked for.
    """

    name: str
    source: str
    tokenizer: str
    sha256: str
    vocabulary: int
    train: NDArray[Any]
    held_out: NDArray[Any]
    token_bytes: NDArray[np.int64]
    train_bytes: int
    held_out_bytes: int
    train_words: int | None
    held_out_words: int | None
    find_documents: Callable[[], Documents] | None = field(default=None, compare=False)

    @cached_property
    def documents(self) -> Documents:
        """The beginnings of its documents; where none are known, each part is one document.

        Raises:
            CorruptCacheError: the file of borders is not what was written.
        """
        if self.find_documents is None:
            return Documents(np.zeros(1, np.int64), np.zeros(1, np.int64))
        return self.find_documents()

    def __str__(self) -> str:
        learnt, held_out = len(self.train), len(self.held_out)
        return f"Text: {self.name}, {learnt:,} tokens to learn from, {held_out:,} held out"

    def as_json(self) -> dict[str, Any]:
        """Return all but the tokens, for records."""
        return {
            "name": self.name,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "sha256": self.sha256,
            "vocabulary": self.vocabulary,
            "train_tokens": len(self.train),
            "held_out_tokens": len(self.held_out),
            "train_bytes": self.train_bytes,
            "held_out_bytes": self.held_out_bytes,
            "train_words": self.train_words,
            "held_out_words": self.held_out_words,
        }


@dataclass(frozen=True)
class _Sidecar:
    """The contents of ``tokens-KEY.json``; ``sha256`` is of the file of tokens."""

    dtype: str
    train_tokens: int
    held_out_tokens: int
    train_bytes: int
    held_out_bytes: int
    train_words: int | None
    held_out_words: int | None
    sha256: str


def prepare(data: Data, cache: Path) -> Tokens:
    """Return the tokens of a text, from the cache or made now.

    Several processes may ask at once: one makes them, the others wait for it.

    Args:
        data: the text and the tokenizer.
        cache: the folder of caches; made where it is missing.

    Raises:
        InvalidArgument: no such text or vocabulary (the message says how to get it), or a cache
            folder that cannot be made.
        CorruptCacheError: a cache that is not what was written; the message says what to delete.
        DiskFullError: there is no room for the cache.
    """
    text = corpus.load(data.source, data.held_out, data.size_cap_bytes)
    chosen = tokenizer(data.tokenizer)
    text_sha256 = text.sha256
    identity = f"{FORMAT} {text_sha256} {text.is_wikitext} {chosen.sha256}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    binary = cache / f"tokens-{key}.bin"
    sidecar = binary.with_suffix(".json")
    if not sidecar.exists():
        _make(cache)
        with _locked(binary.with_suffix(".lock")):
            if not sidecar.exists():  # another process may have made them while this one waited
                _write(text, chosen, binary, sidecar)
    found, tokens = _open(binary, sidecar)
    # The same text may come in other files.
    borders = hashlib.sha256(f"{key} {text.sizes}".encode()).hexdigest()[:16]
    train, held_out = tokens[: found.train_tokens], tokens[found.train_tokens :]

    def find_documents() -> Documents:
        return _documents(cache / f"documents-{borders}.json", data, train, held_out)

    return Tokens(
        name=text.name,
        source=data.source,
        tokenizer=data.tokenizer,
        sha256=text_sha256,
        vocabulary=len(chosen.token_bytes),
        train=train,
        held_out=held_out,
        token_bytes=chosen.token_bytes,
        train_bytes=found.train_bytes,
        held_out_bytes=found.held_out_bytes,
        train_words=found.train_words,
        held_out_words=found.held_out_words,
        find_documents=find_documents,
    )


def _documents(path: Path, data: Data, train: NDArray[Any], held_out: NDArray[Any]) -> Documents:
    """Return the borders of the documents, from their file or found now."""
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                text = corpus.load(data.source, data.held_out, data.size_cap_bytes)
                token_bytes = tokenizer(data.tokenizer).token_bytes
                parts = zip(text.documents(), (train, held_out), strict=True)
                found = [documents.begins(sizes, part, token_bytes) for sizes, part in parts]
                write_atomically(path, documents.written(Documents(*found)) + "\n")
    try:
        return documents.read(path, len(train), len(held_out))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCacheError(
            f"the file of documents {path} is damaged ({error}). Delete it, and run the same "
            "command again: it will be made anew."
        ) from None


def _make(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        came = f"{cache} ({error.strerror})"
        fix = "Name another in the environment variable TILEWISE_CACHE."
        raise InvalidArgument("cache folder", came, "a folder that can be made", fix) from None


def _write(text: corpus.Corpus, chosen: Tokenizer, binary: Path, sidecar: Path) -> None:
    prepared = text.prepared()
    train, held_out = chosen.encode(prepared.train), chosen.encode(prepared.held_out)
    digest = hashlib.sha256()
    with replacing(binary) as temporary, temporary.open("wb") as file:
        for part in (train, held_out):
            file.write(part.data)
            digest.update(part.data)
    said = _Sidecar(
        dtype=chosen.dtype.name,
        train_tokens=len(train),
        held_out_tokens=len(held_out),
        train_bytes=len(prepared.train),
        held_out_bytes=len(prepared.held_out),
        train_words=prepared.train_words,
        held_out_words=prepared.held_out_words,
        sha256=digest.hexdigest(),
    )
    write_atomically(sidecar, json.dumps(asdict(said), indent=1) + "\n")


def _open(binary: Path, sidecar: Path) -> tuple[_Sidecar, NDArray[Any]]:
    """Open the sidecar and the tokens, and check both."""
    try:
        said = _Sidecar(**json.loads(sidecar.read_text(encoding="utf-8")))
        tokens: NDArray[Any] = np.memmap(binary, np.dtype(said.dtype), mode="r")
        fits = len(tokens) == said.train_tokens + said.held_out_tokens
        whole = fits and hashlib.sha256(tokens.data).hexdigest() == said.sha256
    except (OSError, ValueError, TypeError) as error:
        raise _corrupt(binary, sidecar, str(error)) from None
    if not whole:
        raise _corrupt(binary, sidecar, "its checksum is another one")
    return said, tokens


def _corrupt(binary: Path, sidecar: Path, reason: str) -> CorruptCacheError:
    return CorruptCacheError(
        f"the token cache {binary} is damaged ({reason}). Delete {binary} and {sidecar}, "
        "and run the same command again: they will be made anew."
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
