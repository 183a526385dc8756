"""Files of images: their hash, what is damaged, what is missing."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tilelab.study.ask.config import Data
from tilelab.study.tasks.images_files import read
from tilewise.errors import InvalidArgument


def write(path: Path, count: int, side: int) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, side, side)).astype(np.uint8)
    np.savez_compressed(path, images=images, labels=np.arange(count) % 3)


def test_the_hash_copies_nothing(tmp_path: Path) -> None:
    """A run's memory is measured while it is taken."""
    path = tmp_path / "all.npz"
    write(path, 400, 32)
    data = read(Data(source=str(path)), 0)
    tracemalloc.start()
    try:
        found = data.sha256
        assert tracemalloc.get_traced_memory()[1] < data.train.pixels.nbytes / 10
    finally:
        tracemalloc.stop()
    digest = hashlib.sha256()
    for part in (data.train, data.held_out):
        digest.update(f"{part.pixels.shape} 3\n".encode())
        digest.update(part.pixels.tobytes() + part.labels.tobytes())
    assert found == digest.hexdigest()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "damaged.npz"
    write(whole, 60, 8)
    data = whole.read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    middle = bytearray(data)
    middle[200:260] = bytes(60)
    for content in (data[:-40], bytes(middle), (tmp_path / "one.npy").read_bytes(), b""):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"format .npz with images and labels"):
            read(Data(source=str(path)), 0)


def test_a_named_data_set_that_is_missing_says_what_it_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (str(tmp_path), ""):
        monkeypatch.setenv("TILEWISE_DATA", folder)
        with pytest.raises(InvalidArgument, match=r"Write train_gray\.npz .*kriz/cifar"):
            read(Data(source="cifar10-gray"), 0)
        with pytest.raises(InvalidArgument, match=r"pathfinder128\.npz .*drewlinsley"):
            read(Data(source="pathfinder128"), 0)
