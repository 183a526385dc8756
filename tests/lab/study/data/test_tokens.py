"""Token caches: made once, whole or not at all, never believed when they are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tilelab.common.files import DiskFullError
from tilelab.study.ask.config import Data
from tilelab.study.data import tokens as module
from tilelab.study.data.tokens import CorruptCacheError, Tokens, prepare
from tilewise.errors import InvalidArgument

TEXT = "".join(f"line {index} of a text\n" for index in range(200))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return Data(source=str(path), held_out=0.1)


def _same(a: Tokens, b: Tokens) -> bool:
    return (
        a.as_json() == b.as_json()
        and np.array_equal(a.train, b.train)
        and np.array_equal(a.held_out, b.held_out)
    )


def test_tokens_are_the_text(data: Data, tmp_path: Path) -> None:
    made = prepare(data, tmp_path / "cache" / "deep")
    assert made.train.tobytes() + made.held_out.tobytes() == TEXT.encode()
    assert made.train.dtype == made.held_out.dtype == np.uint8
    assert made.vocabulary == len(made.token_bytes) == 256
    assert not made.train.flags.writeable
    assert isinstance(made.train, np.memmap)
    assert made.as_json() == {
        "name": "text.txt",
        "source": data.source,
        "tokenizer": "bytes",
        "sha256": made.sha256,
        "vocabulary": 256,
        "train_tokens": len(made.train),
        "held_out_tokens": len(made.held_out),
        "train_bytes": len(made.train),
        "held_out_bytes": len(made.held_out),
        "train_words": None,
        "held_out_words": None,
    }
    assert json.loads(json.dumps(made.as_json())) == made.as_json()


def test_the_second_time_they_come_from_the_cache(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(data, tmp_path)
    monkeypatch.setattr(module, "_write", None)  # whoever calls it now fails
    assert _same(prepare(data, tmp_path), first)


def test_a_cache_folder_that_cannot_be_made(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidArgument, match=r"cache folder.*TILEWISE_CACHE"):
        prepare(data, tmp_path / "file" / "cache")


def test_another_text_or_split_is_another_cache(data: Data, tmp_path: Path) -> None:
    first = prepare(data, tmp_path)
    second = prepare(data.model_copy(update={"held_out": 0.5}), tmp_path)
    Path(data.source).write_text(TEXT.upper())
    third = prepare(data, tmp_path)
    assert len({each.sha256 for each in (first, second, third)}) == 3
    assert len(list(tmp_path.glob("tokens-*.bin"))) == 3
    assert first.train.tobytes().decode() in TEXT  # the mapped file was left alone
    assert third.train.tobytes().decode() in TEXT.upper()


def test_gpt2_tokens_and_words_of_wikitext(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" \n = T = \n \n One , two @-@ fold . \n")
    (folder / "wiki.valid.tokens").write_text(" \n = V = \n \n A 2 @,@ 500 m run ! \n")
    made = prepare(Data(source=str(folder), tokenizer="gpt2"), tmp_path)
    assert made.train.dtype == np.uint16
    assert made.vocabulary == 50257
    text = "\n= V =\n\nA 2,500 m run!\n"
    assert made.token_bytes[made.held_out].sum() == made.held_out_bytes == len(text)
    assert (made.train_words, made.held_out_words) == (11, 12)
    assert _same(prepare(Data(source=str(folder), tokenizer="gpt2"), tmp_path), made)
    plain = prepare(Data(source=str(folder)), tmp_path)
    assert plain.held_out.tobytes().decode() == text


def _flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[1234] ^= 1
    path.write_bytes(damaged)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit": (".bin", _flip),
    "a cut file": (".bin", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "an empty file": (".bin", lambda path: path.write_bytes(b"")),
    "a missing file": (".bin", Path.unlink),
    "no JSON": (".json", lambda path: path.write_text('{"dtype": ')),
    "other JSON": (".json", lambda path: path.write_text('{"dtype": "uint8"}')),
    "a list": (".json", lambda path: path.write_text("[]")),
    "another checksum": (
        ".json",
        lambda path: path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0')),
    ),
    "another border": (
        ".json",
        lambda path: path.write_text(
            path.read_text().replace('"train_tokens": ', '"train_tokens": 1')
        ),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_named_and_refused(data: Data, tmp_path: Path, damage: str) -> None:
    first = prepare(data, tmp_path)
    suffix, hurt = DAMAGES[damage]
    binary, sidecar = next(tmp_path.glob("tokens-*.bin")), next(tmp_path.glob("tokens-*.json"))
    hurt(binary if suffix == ".bin" else sidecar)
    with pytest.raises(CorruptCacheError, match="damaged") as caught:
        prepare(data, tmp_path)
    assert f"Delete {binary} and {sidecar}" in str(caught.value)
    for path in (binary, sidecar):  # what the message says helps
        path.unlink(missing_ok=True)
    again = prepare(data, tmp_path)
    assert again.train.tobytes() + again.held_out.tobytes() == TEXT.encode()
    assert again.as_json() == first.as_json()


def test_a_crash_before_the_sidecar_leaves_nothing_that_is_read(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, tmp_path)
    assert not list(tmp_path.glob("tokens-*.json"))
    _flip(next(tmp_path.glob("tokens-*.bin")))  # as if the crash had come in the middle
    assert prepare(data, tmp_path).train.tobytes().decode() in TEXT


def test_a_full_disk_is_said_and_leaves_nothing(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DiskFullError, match=r"no room to write .*tokens-.*free some space"):
            prepare(data, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert prepare(data, tmp_path / "cache").train.tobytes().decode() in TEXT


def test_many_at_once_make_it_once(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    write = module._write

    def counted(*arguments: object) -> None:
        calls.append(1)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write", counted)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: prepare(data, tmp_path), range(8)))
    assert len(calls) == 1
    assert all(_same(each, made[0]) for each in made)


@pytest.mark.slow
def test_processes_wait_for_the_one_that_makes_it(data: Data, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tilelab.study.ask.config import Data\n"
        "from tilelab.study.data import tokens\n"
        "write = tokens._write\n"
        "def slow(*arguments):\n"
        "    print('made', flush=True)\n"
        "    time.sleep(0.3)\n"
        "    write(*arguments)\n"
        "tokens._write = slow\n"
        "found = tokens.prepare(Data(source=sys.argv[1], held_out=0.1), Path(sys.argv[2]))\n"
        "print(found.sha256, len(found.train))\n"
    )
    command = [sys.executable, "-c", script, data.source, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum("made" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
