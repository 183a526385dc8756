"""What data takes in memory, told from its files; and that splitting images copies none."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.study.tasks.small import config_of as of_glue
from tests.lab.study.tasks.small import needs_wordpiece, sentence, write_glue
from tests.lab.study.tasks.test_images import config_of as of_images
from tests.lab.study.tasks.test_long import config_of, prepared, write_objects
from tilelab.study.ask.config import Data, change
from tilelab.study.data.order import shuffled
from tilelab.study.tasks import images
from tilelab.study.tasks.images import read


@pytest.mark.parametrize("examples", [0, 100])
@pytest.mark.parametrize("sizes", [(), (3,)], ids=["gray", "colour"])
def test_what_images_take_is_known_from_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], examples: int
) -> None:
    monkeypatch.setattr(images, "_AT_ONCE", 64)
    pixels = np.random.default_rng(0).integers(0, 256, (3000, 32, 32, *sizes), np.uint8)
    np.savez(tmp_path / "all.npz", images=pixels, labels=np.arange(3000))
    config = of_images(tmp_path / "all.npz", task__patch=8, task__train_examples=examples)
    told = config.learning.data_bytes(config)
    del pixels
    tracemalloc.start()
    data = config.learning.prepare(config, tmp_path)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data.train) == (examples or 2850)
    # Labels, orders and what is moved at once are beside the pixels.
    assert told.kept <= kept < told.kept + 300_000
    assert 0.99 * told.most <= most < told.most + 800_000
    missing = of_images(tmp_path / "none.npz")
    assert missing.learning.data_bytes(missing) == (0, 0)


def test_the_split_of_a_file_keeps_the_order_of_its_images(tmp_path: Path) -> None:
    count = 2500  # they are moved in parts
    pixels = np.arange(count, dtype=np.uint16).view(np.uint8).reshape(count, 1, 2).repeat(2, axis=1)
    np.savez(tmp_path / "all.npz", images=pixels, labels=np.arange(count))
    data = read(Data(source=str(tmp_path / "all.npz"), held_out=0.1), 0)
    order = shuffled(count, 0, 0)
    for part, wanted in ((data.held_out["held_out"], order[:250]), (data.train, order[250:])):
        assert part.labels.tolist() == sorted(wanted.tolist())
        assert np.array_equal(part.pixels[:, 0], pixels[np.sort(wanted)])


def write_long_texts(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train", "test"):
        rows = [{"text": "good and bad " * 100, "label": at % 2} for at in range(300)]
        write_objects(folder / f"{name}.jsonl.gz", rows)
    return folder


def write_long_listops(folder: Path) -> Path:
    folder.mkdir()
    expression = "[SM"
    for at in range(300):  # as the Arena's files have it: a parenthesis around every pair
        expression = f"( {expression} {at % 10} )"
    for name in ("train", "val", "test"):
        rows = f"( {expression} ] )\t0\n" * 100
        (folder / f"basic_{name}.tsv").write_text(f"Source\tTarget\n{rows}")
    return folder


@pytest.mark.parametrize(
    ("task", "write"),
    [("text-classification", write_long_texts), ("listops", write_long_listops)],
)
def test_what_examples_take_is_known_from_the_files(task: str, write: Any, tmp_path: Path) -> None:
    config = config_of(task, write(tmp_path / "files"))
    told = config.learning.data_bytes(config)
    tracemalloc.start()
    data = prepared(config)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    splits = [data.train, *data.held_out.values()]
    kept = sum(each.first.tokens.nbytes + each.first.borders.nbytes for each in splits)
    assert kept <= told.kept < 1.7 * kept
    assert most <= told.most < 2 * most
    absent = change(config, {"data.source": str(tmp_path / "absent")})
    assert absent.learning.data_bytes(absent) == (0, 0)


@needs_wordpiece
def test_what_tokens_take_is_known_from_the_files(tmp_path: Path) -> None:
    source = write_glue(tmp_path / "glue", "sst2")
    for each in (source / "SST-2").iterdir():
        each.write_text(
            "sentence\tlabel\n" + f"{sentence(1)} {sentence(2)} {sentence(3)}\t1\n" * 500
        )
    config = of_glue(source, "sst2")
    told = config.learning.data_bytes(config)
    data = config.learning.prepare(config, tmp_path)
    splits = [data.train, *data.held_out.values()]
    parts = [(each.first.tokens, each.first.borders, each.labels) for each in splits]
    kept = sum(array.nbytes for arrays in parts for array in arrays)
    assert kept < told.kept < 1.7 * kept
    assert told.most > 8 * kept  # texts, and tokens as numbers of Python
    hub = change(config, {"data.source": "hub:nyu-mll/glue"})
    assert hub.learning.data_bytes(hub) == (0, 0)
