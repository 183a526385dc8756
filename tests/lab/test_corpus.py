"""The demo's text: clear errors, a stable order, and held-out text that training never sees."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tilewise.errors import InvalidArgument
from tilewise.lab.demo import corpus
from tilewise.lab.demo.corpus import Windows, bytes_needed, load, standard_library


def test_the_default_text_is_the_standard_library_and_stable() -> None:
    first, second = load(None, 1000), load(None, 1000)
    assert first.sha256 == second.sha256 == hashlib.sha256(first.data).hexdigest()
    assert b"import" in first.data
    assert len(first.data) <= corpus.SIZE_CAP
    assert first.files > 100


def test_files_are_sorted_and_test_suites_and_packages_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "sub/c.py", "test/no.py", "site-packages/no.py", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"[{name}]")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    found = standard_library(tmp_path)
    assert found.data == b"[a.py][b.py][sub/c.py]"
    assert found.files == 3


def test_the_size_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SIZE_CAP", 25)
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(name * 10)
    assert standard_library(tmp_path).data == b"a" * 10 + b"b" * 10
    assert load(tmp_path / "a.py", 5).data == b"a" * 10


def test_a_wrong_text_is_a_clear_error(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty", tmp_path / "short"
    empty.touch()
    short.write_text("too short")
    for path, message in (
        (tmp_path / "missing", r"--text.*missing.*No such file"),
        (tmp_path, r"--text.*the folder .*one file"),
        (empty, r"--text.*empty"),
        (short, r"--text.*9 bytes.*at least 1,000 bytes.*--context"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            load(path, 1000)


def _data(size: int) -> bytes:
    return bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).tolist())


def test_windows_are_the_same_for_a_seed_and_others_for_another() -> None:
    data = _data(5000)
    draws = [Windows(data, 32, seed).draw(4)[0] for seed in (7, 7, 8)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_targets_are_the_inputs_moved_on_by_one() -> None:
    windows = Windows(_data(5000), 32, 0)
    for inputs, targets in (windows.draw(3), windows.evaluation(3)):
        assert inputs.shape == targets.shape == (3, 32)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_training_never_sees_the_held_out_text() -> None:
    context = 16
    size = bytes_needed(context)
    held_out = size - int(size * (1 - corpus.HELD_OUT_FRACTION))
    data = b"t" * (size - held_out + 1) + b"h" * (held_out - 1)
    windows = Windows(data, context, 0)
    for _ in range(200):
        assert all(bool((part == ord("t")).all()) for part in windows.draw(2))
    assert (windows.evaluation(4)[1] == ord("h")).all()


@pytest.mark.parametrize("context", [16, 100, 1024])
def test_the_smallest_text_that_is_accepted_is_enough(context: int) -> None:
    windows = Windows(_data(bytes_needed(context)), context, 0)
    assert windows.draw(2)[0].shape == windows.evaluation(2)[0].shape == (2, context)
