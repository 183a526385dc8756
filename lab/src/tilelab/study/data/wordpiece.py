"""WordPiece, the vocabulary of BERT (uncased): text to tokens, with the special ones by name."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["WordPiece", "wordpiece"]

_NAMES = ("vocab.txt", "vocab.txt.gz")
_FOLDERS = (".", "bert-base-uncased", "vocab/bert-base-uncased")
_SIZE = 30522
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_AT_ONCE = 4096  # texts that are encoded together


@dataclass(frozen=True)
class WordPiece:
    """BERT's tokenizer.

    Args:
        sha256: of all that decides the tokens.
        vocabulary: token ids.
        first, border, mask: ids of ``[CLS]``, ``[SEP]`` and ``[MASK]``.
        ordinary: the ids of words and their pieces, neither special nor unused.
        encoder: of the package tokenizers.
    """

    sha256: str
    vocabulary: int
    first: int
    border: int
    mask: int
    ordinary: tuple[int, ...]
    encoder: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special ones."""
        found: list[list[int]] = []
        for at in range(0, len(texts), _AT_ONCE):
            part = self.encoder.encode_batch(texts[at : at + _AT_ONCE], add_special_tokens=False)
            found += [list(each.ids) for each in part]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the words of tokens, special ones too."""
        return str(self.encoder.decode(list(tokens), skip_special_tokens=False))


def wordpiece(folder: Path | None) -> WordPiece:
    """Return the tokenizer whose vocabulary lies in a folder of data sets.

    Args:
        folder: with ``bert-base-uncased/vocab.txt``, ``vocab/bert-base-uncased/vocab.txt`` or
            ``vocab.txt``, packed (``.gz``) or not; None where the user named none.

    Raises:
        InvalidArgument: it is not there; the message says how to get it.
        Unsupported: the package tokenizers is not installed.
    """
    if folder is not None:
        for place in _FOLDERS:
            for name in _NAMES:
                if (folder / place / name).is_file():
                    return _read(folder / place / name)
    came = "no TILEWISE_DATA" if folder is None else f"TILEWISE_DATA={folder} without it"
    address = "https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt"
    fix = (
        "Get it with: mkdir -p data/bert-base-uncased && cd data/bert-base-uncased && "
        f"curl -LO {address} && export TILEWISE_DATA=$(dirname $PWD)"
    )
    required = "a folder with bert-base-uncased/vocab.txt (BERT's vocabulary, uncased)"
    raise InvalidArgument("data.tokenizer", came, required, fix)


@lru_cache(maxsize=2)
def _read(path: Path) -> WordPiece:
    try:
        import tokenizers
    except ImportError:
        fix = "pip install 'tilewise[data]'"
        raise Unsupported("WordPiece without the package tokenizers", fix=fix) from None
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    words = data.decode().splitlines()
    ids = {word: index for index, word in enumerate(words)}
    missing = [word for word in _SPECIAL if word not in ids]
    if missing or len(words) != _SIZE:
        came = f"{path}, {len(words):,} lines" + (f" without {missing[0]}" if missing else "")
        raise InvalidArgument("data.tokenizer", came, f"the {_SIZE:,} of bert-base-uncased")
    encoder = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    encoder.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    encoder.decoder = tokenizers.decoders.WordPiece()
    digest = hashlib.sha256(b"wordpiece uncased\n" + data).hexdigest()
    ordinary = tuple(index for word, index in ids.items() if not _is_special(word))
    first, border, mask = (ids[word] for word in ("[CLS]", "[SEP]", "[MASK]"))
    return WordPiece(digest, len(words), first, border, mask, ordinary, encoder)


def _is_special(word: str) -> bool:
    return word in _SPECIAL or word.startswith("[unused")
