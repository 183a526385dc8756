"""Text to numbers: bytes, byte-pair encodings (of GPT-2, or trained), and BERT's WordPiece."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilelab.common.files import first_of, unpacked
from tilelab.study.data.corpus import data_folder
from tilewise.errors import InvalidArgument, Unsupported

_CHUNK_LENGTH = 1 << 18  # text is encoded in pieces: the encoder's own record of a piece is large
_CHUNKS_AT_ONCE = 16
_WORD_END = re.compile(r"(?<=\S)[ \n]")
# Vocabulary -> its page at huggingface.co, and the names that each of its files may have.
_VOCABULARIES: Mapping[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "gpt2": (
        "openai-community/gpt2",
        (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")),
    ),
    "bert-base-uncased": ("google-bert/bert-base-uncased", (("vocab.txt",),)),
}
_GPT2_SIZE = 50257


@dataclass(frozen=True)
class Tokenizer:
    """A way to turn text into tokens, without losing a byte (but for WordPiece)."""

    sha256: str  # of all that decides the tokens; part of a cache's key
    dtype: np.dtype[Any]  # of tokens in a file
    token_bytes: NDArray[np.int64]  # int64 [vocabulary]; 0: of no text, and all of WordPiece
    encode: Callable[[bytes], NDArray[Any]]  # UTF-8 to ``dtype``; raises InvalidArgument
    decode: Callable[[Sequence[int]], str]  # tokens to text; bytes that are not UTF-8 become U+FFFD


def tokenizer(name: str) -> Tokenizer:
    """Find the tokenizer of that name: ``"bytes"``, ``"gpt2"`` or ``"wordpiece"``, with its files.

    ``"bpe"`` has no files: see ``train_vocabulary`` and ``of_vocabulary``.

    Raises:
        InvalidArgument: the files of the vocabulary are not there; the message says how to get
            them.
        Unsupported: the package ``tokenizers`` is not installed.
    """
    if name == "wordpiece":
        return _wordpiece(wordpiece(data_folder()))
    return _bytes() if name == "bytes" else _gpt2(*_files(data_folder(), "gpt2"))


def _bytes() -> Tokenizer:
    digest = hashlib.sha256(b"bytes").hexdigest()
    dtype = np.dtype(np.uint8)
    return Tokenizer(
        digest,
        dtype,
        np.ones(256, np.int64),
        lambda text: np.frombuffer(text, np.uint8),
        lambda tokens: bytes(tokens).decode(errors="replace"),
    )


def _wordpiece(pieces: WordPiece) -> Tokenizer:
    def encode(text: bytes) -> NDArray[Any]:
        rows = pieces.encode(_decoded(text, "wordpiece").split("\n"))
        return np.array([token for row in rows for token in row], np.uint16)

    none = np.zeros(pieces.vocabulary, np.int64)
    return Tokenizer(pieces.sha256, np.dtype(np.uint16), none, encode, pieces.decode)


def _files(folder: Path | None, name: str) -> list[Path]:
    page, files = _VOCABULARIES[name]
    for place in () if folder is None else (folder, folder / name, folder / "vocab" / name):
        found = [path for names in files if (path := first_of(place, *names)) is not None]
        if len(found) == len(files):
            return found
    came = "no TILEWISE_DATA" if folder is None else f"TILEWISE_DATA={folder} without it"
    names = [first for first, *_ in files]
    get = [f"curl -LO https://huggingface.co/{page}/resolve/main/{each}" for each in names]
    make = f"mkdir -p data/{name} && cd data/{name}"
    fix = f"Get it with: {' && '.join([make, *get])} && export TILEWISE_DATA=$(dirname $PWD)"
    required = f"a folder with {' and '.join(f'{name}/{each}' for each in names)}"
    raise InvalidArgument("data.tokenizer", came, f"{required} (the vocabulary)", fix)


def _package(what: str, instead: str = "") -> Any:
    """Import the package tokenizers; raise ``Unsupported`` where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        fix = f"pip install 'tilewise[data]'{instead}"
        raise Unsupported(f"{what} without the package tokenizers", fix=fix) from None
    return tokenizers


def _gpt2(*files: Path) -> Tokenizer:
    words, pairs = (unpacked(each) for each in files)
    vocabulary = json.loads(words)
    lines = [line for line in pairs.decode().splitlines() if not line.startswith("#version")]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines if line)]
    encoder = _byte_level("GPT-2's encoding", vocabulary, merges)
    if len(vocabulary) != _GPT2_SIZE or encoder.encode("Hello world").ids != [15496, 995]:
        came = f"a vocabulary of {len(vocabulary):,}"
        raise InvalidArgument("data.tokenizer", came, "GPT-2's own vocab.json and merges.txt")
    digest = hashlib.sha256(b"gpt2\n" + words + pairs).hexdigest()
    return _of_encoder(encoder, vocabulary, digest, "gpt2", special="<|endoftext|>")


class Vocabulary(NamedTuple):
    """A byte-level byte-pair encoding; a character of a token stands for one byte."""

    tokens: tuple[str, ...]  # by number
    merges: tuple[tuple[str, str], ...]  # pairs that become one token, the first ones first

    @property
    def sha256(self) -> str:
        """The hash of all that decides the encoding."""
        return hashlib.sha256(b"bpe\n" + json.dumps(self).encode()).hexdigest()


def train_vocabulary(text: bytes, size: int, most_bytes: int = 0) -> Vocabulary:
    """Learn a byte-pair encoding from a text: the same text gives the same one.

    All 256 bytes are tokens, so it encodes any text. Text is first cut into words as GPT-2 cuts it;
    then the most frequent pair within words becomes a token, until there are ``size`` tokens.

    Args:
        text: UTF-8.
        size: the number of tokens, more than 256.
        most_bytes: of a longer text about so many are learnt from, in pieces at equal distances;
            0 for all.

    Raises:
        InvalidArgument: text that is not UTF-8, or that has not so many pairs.
        Unsupported: the package ``tokenizers`` is not installed.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units (2016);
    over bytes: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
    """
    encoder = _byte_level("data.tokenizer=bpe", {}, [])
    tokenizers = _package("data.tokenizer=bpe")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    chunks = list(_chunks(_decoded(text, "bpe")))
    every = max(1, len(text) // most_bytes) if most_bytes else 1
    encoder.train_from_iterator(chunks[::every], trainer)
    made = json.loads(encoder.to_str())["model"]
    if len(made["vocab"]) != size:
        required = f"at most {len(made['vocab']):,}: the training text has no more pairs"
        raise InvalidArgument("data.vocabulary", f"{size:,}", required, "Or give more text.")
    tokens = sorted(made["vocab"], key=made["vocab"].__getitem__)
    return Vocabulary(tuple(tokens), tuple((left, right) for left, right in made["merges"]))


def of_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary that ``train_vocabulary`` made."""
    numbers = {token: index for index, token in enumerate(vocabulary.tokens)}
    encoder = _byte_level("data.tokenizer=bpe", numbers, list(vocabulary.merges))
    return _of_encoder(encoder, numbers, vocabulary.sha256, "bpe")


def _byte_level(what: str, vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> Any:
    """Return an encoder that cuts text into words and looks at its bytes, as GPT-2 does."""
    tokenizers = _package(what, ", or take data.tokenizer=bytes")
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(dict(vocabulary), merges))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    return encoder


def _of_encoder(
    encoder: Any, vocabulary: Mapping[str, int], sha256: str, name: str, special: str = ""
) -> Tokenizer:
    # A character of a token's name stands for one byte; the special token stands for no text.
    token_bytes = np.zeros(len(vocabulary), np.int64)
    for word, index in vocabulary.items():
        token_bytes[index] = 0 if word == special else len(word)

    def encode(text: bytes) -> NDArray[Any]:
        pieces, chunks = [np.empty(0, np.uint16)], _chunks(_decoded(text, name))
        while part := list(islice(chunks, _CHUNKS_AT_ONCE)):
            found = encoder.encode_batch_fast(part, add_special_tokens=False)  # without places
            pieces += [np.array(each.ids, np.uint16) for each in found]
        tokens = np.concatenate(pieces)
        assert int(token_bytes[tokens].sum()) == len(text), "the encoding lost text"
        return tokens

    def decode(tokens: Sequence[int]) -> str:
        return str(encoder.decode(list(tokens), skip_special_tokens=False))

    return Tokenizer(sha256, np.dtype(np.uint16), token_bytes, encode, decode)


def _decoded(text: bytes, name: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        came = f"text that is not UTF-8 (byte {error.start:,})"
        fix = "Convert it, or take data.tokenizer=bytes."
        raise InvalidArgument(
            "data.source", came, f"UTF-8 for data.tokenizer={name}", fix
        ) from None


def _chunks(text: str) -> Iterator[str]:
    """Pieces of some size whose tokens, put together, are those of the whole."""
    # GPT-2 first cuts text into words, from left to right and never looking back. No word has a
    # space or newline after another character, so that text may be cut before these.
    start = 0
    while len(text) - start > _CHUNK_LENGTH:
        found = _WORD_END.search(text, start + _CHUNK_LENGTH)
        end = len(text) if found is None else found.start()
        yield text[start:end]
        start = end
    yield text[start:]


_SIZE = 30522
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_AT_ONCE = 4096  # texts that are encoded together


@dataclass(frozen=True)
class WordPiece:
    """BERT's tokenizer."""

    sha256: str  # of all that decides the tokens
    vocabulary: int  # token ids
    first: int  # [CLS]
    border: int  # [SEP]
    mask: int  # [MASK]
    ordinary: tuple[int, ...]  # the ids of words and their pieces, neither special nor unused
    encoder: Any  # of the package tokenizers

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

    It is ``bert-base-uncased/vocab.txt``, ``vocab/bert-base-uncased/vocab.txt`` or ``vocab.txt``,
    packed (``.gz``) or not.
    """
    return _read(*_files(folder, "bert-base-uncased"))


@lru_cache(maxsize=2)
def _read(path: Path) -> WordPiece:
    tokenizers, data = _package("WordPiece"), unpacked(path)
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
    ordinary = tuple(
        index
        for word, index in ids.items()
        if word not in _SPECIAL and not word.startswith("[unused")
    )
    first, border, mask = (ids[word] for word in ("[CLS]", "[SEP]", "[MASK]"))
    return WordPiece(digest, len(words), first, border, mask, ordinary, encoder)
