"""Text to numbers and back, GPT-2's numbers where they are known, pieces like the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilelab.study.data import tokenizers as module
from tilelab.study.data.tokenizers import Tokenizer, of_vocabulary, tokenizer, train_vocabulary
from tilewise.errors import InvalidArgument, Unsupported

KNOWN = {
    "Hello world": [15496, 995],
    "Hello, I'm 42!": [15496, 11, 314, 1101, 5433, 0],
    "\n\n  x": [628, 220, 2124],
}
ODD = "naïve 戦場 😀\r\n\t  two  \n\n \n x\n\n\ny \n<|endoftext|> \u00a0\u3000z"


def test_bytes_are_bytes() -> None:
    made = tokenizer("bytes")
    assert made.encode(ODD.encode()).tobytes() == ODD.encode()
    assert made.dtype == np.uint8
    assert made.token_bytes.tolist() == [1] * 256


@pytest.fixture
def gpt2(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    return tokenizer("gpt2")


def test_gpt2_gives_the_known_tokens(gpt2: Tokenizer) -> None:
    for text, expected in KNOWN.items():
        assert gpt2.encode(text.encode()).tolist() == expected
    assert gpt2.encode(b"").tolist() == []
    assert gpt2.dtype == gpt2.encode(b"x").dtype == np.uint16
    assert len(gpt2.token_bytes) == 50257
    assert gpt2.token_bytes[[15496, 995, 50256]].tolist() == [5, 6, 0]


def test_gpt2_loses_nothing(gpt2: Tokenizer) -> None:
    tokens = gpt2.encode(ODD.encode())
    assert gpt2.token_bytes[tokens].sum() == len(ODD.encode())
    assert 50256 not in tokens  # text cannot say the special token
    assert gpt2.sha256 != tokenizer("bytes").sha256
    with pytest.raises(InvalidArgument, match=r"not UTF-8 \(byte 3\).*data.tokenizer=bytes"):
        gpt2.encode(b"caf\xe9")


def test_pieces_give_the_tokens_of_the_whole(
    gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(module.__file__).read_text()
    text = (source + ODD + "a\n \nb\n\nc\n\td\r\ne\nf\n" * 20 + ODD).encode()
    whole = gpt2.encode(text)
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr(module, "_CHUNK_LENGTH", size)
        chunks = list(module._chunks(text.decode()))
        assert "".join(chunks).encode() == text
        assert len(chunks) > len(text) / (size + 50)
        assert np.array_equal(gpt2.encode(text), whole)


@given(st.text("ab1 \n\t\r.'s\u00a0é", max_size=60))
def test_pieces_of_any_text_give_the_tokens_of_the_whole(gpt2: Tokenizer, text: str) -> None:
    whole = gpt2.encode(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_LENGTH", 1)
        assert np.array_equal(gpt2.encode(text.encode()), whole)


def test_an_encoding_of_a_long_text_is_learnt_from_pieces_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK_LENGTH", 100)
    text = b"".join(b"alpha beta gamma " * 8 + b"delta zeta theta " * 8 for _ in range(20))
    whole = train_vocabulary(text, 270)
    assert train_vocabulary(text, 270, len(text)) == whole
    few = [each.encode() for each in list(module._chunks(text.decode()))[::4]]
    assert len(b"".join(few)) == pytest.approx(len(text) / 4, rel=0.1)
    assert train_vocabulary(text, 270, len(text) // 4) == train_vocabulary(b"".join(few), 270)


def test_a_trained_encoding_loses_no_byte() -> None:
    text = Path(module.__file__).read_bytes()
    vocabulary = train_vocabulary(text, 400)
    made = of_vocabulary(vocabulary)
    assert len(made.token_bytes) == len(vocabulary.tokens) == 400
    assert len(vocabulary.merges) == 400 - 256
    assert made.dtype == made.encode(b"x").dtype == np.uint16
    for each in (text, ODD.encode()):  # the second has bytes that the first lacks
        tokens = made.encode(each)
        assert made.token_bytes[tokens].sum() == len(each)
        assert made.decode(tokens.tolist()) == each.decode()
    assert len(made.encode(text)) < 0.6 * len(text)
    assert made.sha256 != of_vocabulary(train_vocabulary(text, 401)).sha256
    with pytest.raises(InvalidArgument, match=r"UTF-8 for data.tokenizer=bpe"):
        train_vocabulary(b"caf\xe9", 300)
    with pytest.raises(InvalidArgument, match=r"data.vocabulary: got 300; required: at most 258"):
        train_vocabulary(b"abab", 300)


@pytest.mark.parametrize("parallel", ["false", "true"])
def test_training_is_the_same_whoever_counts(
    parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties between pairs, too: the text has many pairs that are equally frequent."""
    text = b"".join(path.read_bytes() for path in sorted(Path(module.__file__).parent.glob("*.py")))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    first = train_vocabulary(text, 2000)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    for size in (100, 1 << 18):  # of the pieces that are counted apart
        monkeypatch.setattr(module, "_CHUNK_LENGTH", size)
        assert train_vocabulary(text, 2000) == first


def test_a_missing_vocabulary_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, came in ((None, "no TILEWISE_DATA"), (str(tmp_path), "without it")):
        if value is None:
            monkeypatch.delenv("TILEWISE_DATA", raising=False)
        else:
            monkeypatch.setenv("TILEWISE_DATA", value)
        with pytest.raises(InvalidArgument, match=f"data.tokenizer: got .*{came}") as caught:
            tokenizer("gpt2")
        for step in ("curl -LO https://", "vocab.json", "merges.txt", "export TILEWISE_DATA="):
            assert step in str(caught.value)


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text('{"H": 0, "e": 1, "He": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\nH e\n")
    monkeypatch.setenv("TILEWISE_DATA", str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"vocabulary of 3.*GPT-2's own"):
        tokenizer("gpt2")


def test_without_the_package_the_error_says_what_to_install(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilewise\[data\]'"):
        tokenizer("gpt2")
