"""Images: their files and splits, their batches, what is refused, and that a ViT learns them."""

from __future__ import annotations

import hashlib
import math
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lab.study.records_of import known
from tests.lab.study.tasks.small import tiny
from tests.lab.study.train.toys import CPU, record_of, session_for
from tilelab.models.vit import Shape, ViT
from tilelab.study.ask.config import Data, RunConfig, Task, change
from tilelab.study.ask.run import RunSpec
from tilelab.study.data.corpus import data_folder
from tilelab.study.need import need, parameters
from tilelab.study.tasks.images import NAMED, VARIANTS, Images, read
from tilelab.study.train.child import _warm
from tilelab.study.train.trainer import Trainer
from tilewise.errors import InvalidArgument, Unsupported

SIDE = 8


def arrays(count: int, side: int = SIDE, seed: int = 0, *sizes: int) -> dict[str, Any]:
    """Images of three classes: what is bright is the upper half, the lower one, or neither."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    images = generator.integers(0, 60, (count, side, side, *sizes))
    for image, label in zip(images, labels, strict=True):
        if label < 2:
            image[label * side // 2 : (label + 1) * side // 2] += 150
    return {"images": images.astype(np.uint8), "labels": labels}


def folder_of(root: Path, train: int = 40, test: int = 12) -> Path:
    """A folder with a held-out part of its own."""
    for seed, (name, count) in enumerate((("train", train), ("test", test))):
        np.savez(root / f"{name}.npz", **arrays(count, SIDE, seed))
    return root


def config_of(source: Path | str, **changes: Any) -> RunConfig:
    """A run of a tiny ViT on 8 x 8 pixels in patches of 2 x 2."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    vit = {"model.family": "vit", "model.context": 17, "training.accumulation": 2}
    return tiny({"name": "images", "patch": 2}, source, "bytes", {**vit, **changes})


def test_images_are_read_learnt_and_measured(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path))
    data = config.learning.prepare(config, tmp_path)
    assert isinstance(data, Images)
    assert (len(data.train), len(data.held_out["held_out"]), data.classes) == (40, 12, 3)
    assert (data.side, data.channels) == (SIDE, 1)
    assert data.as_json()["train_examples"] == 40
    _warm(config, data, CPU)
    session_for(config, tmp_path).work()
    record = record_of(tmp_path)
    assert known(record.end).status == "done"
    last = record.evaluations[-1]
    assert list(last.metrics) == ["accuracy", "cross_entropy"]
    assert last.metrics["cross_entropy"] == last.loss
    assert math.isfinite(known(last.loss))
    assert last.softmaxes is not None
    entropy = last.softmaxes[0].entropy
    assert 0 < known(entropy) < math.log(17)
    assert record.steps[0].tokens == 8 * 17


def test_batches_are_images_and_their_labels(tmp_path: Path) -> None:
    config = config_of(folder_of(tmp_path), training__accumulation=1)
    data = config.learning.prepare(config, tmp_path)
    batches = config.learning.batches(config, data, 3)
    epoch = [batches(step)[0] for step in range(10)]
    seen = np.concatenate([batch.inputs[0][:, 0].numpy() for batch in epoch])
    labels = np.concatenate([batch.targets.numpy() for batch in epoch])
    assert sorted(labels) == sorted(data.train.labels)
    assert seen.min() >= -1 and seen.max() <= 1  # noqa: PT018
    pixels = np.rint((seen + 1) * 127.5).astype(np.uint8)
    wanted = {
        (image.tobytes(), int(label))
        for image, label in zip(data.train.pixels[:, 0], data.train.labels, strict=True)
    }
    assert {(a.tobytes(), int(b)) for a, b in zip(pixels, labels, strict=True)} == wanted
    again = config.learning.batches(config, data, 3)(7)[0]
    assert torch.equal(again.inputs[0], epoch[7].inputs[0])


def test_a_file_is_split_the_same_way_always(tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    np.savez(path, **arrays(50))
    one, two = (read(Data(source=str(path), held_out=0.2), 0) for _ in range(2))
    assert (len(one.train), len(one.held_out["held_out"])) == (40, 10)
    assert one.sha256 == two.sha256
    both = [*one.train.pixels, *one.held_out["held_out"].pixels]
    assert len({each.tobytes() for each in both}) == 50, "an image on both sides"
    assert read(Data(source=str(path), held_out=0.1), 0).sha256 != one.sha256
    few = read(Data(source=str(path), held_out=0.2), 6)
    shapes = [each.held_out["held_out"].pixels.shape for each in (few, one)]
    assert (len(few.train), shapes[0]) == (6, shapes[1])
    folder = str(folder_of(tmp_path))
    with pytest.raises(InvalidArgument, match="says nothing here"):
        read(Data(source=folder, held_out=0.5), 0)
    with pytest.raises(InvalidArgument, match=r"train_examples: got 99.*at most 40"):
        read(Data(source=folder), 99)
    made = arrays(6, SIDE, 0, 3)  # in colour
    np.savez(tmp_path / "rgb.npz", **made)
    config = config_of(tmp_path / "rgb.npz", data__held_out=0.2)
    data = config.learning.prepare(config, tmp_path)
    stored = {each.transpose(2, 0, 1).tobytes() for each in made["images"]}
    assert {each.tobytes() for each in data.train.pixels} < stored
    model = config.learning.model(config, data, 0, CPU)
    assert model(config.learning.batches(config, data, 0)(0)[0].inputs[0]).shape == (4, 3)


def test_odd_files_are_refused(tmp_path: Path) -> None:
    good = arrays(6)
    odd: dict[str, dict[str, Any]] = {
        "objects": {**good, "images": np.array([{}, 1], dtype=object)},
        "no-labels": {"images": good["images"]},
        "oblong": {**good, "images": good["images"][:, :4]},
        "floats": {**good, "images": good["images"] / 255},
        "fewer": {**good, "labels": good["labels"][:5]},
        "negative": {**good, "labels": good["labels"] - 1},
    }
    words = ["allow_pickle", "labels is not a file", "squares", "float64", r"\[6\]", "from 0 on"]
    for (name, values), word in zip(odd.items(), words, strict=True):
        np.savez(tmp_path / f"{name}.npz", **values)
        with pytest.raises(InvalidArgument, match=rf"data.source.*{word}"):
            read(Data(source=str(tmp_path / f"{name}.npz")), 0)
    for source in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(InvalidArgument, match=r"format .npz with images and labels"):
            read(Data(source=str(source)), 0)
    path = tmp_path / "damaged.npz"
    write(path, 60, 8)
    whole = path.read_bytes()
    middle = whole[:200] + bytes(60) + whole[260:]
    np.save(tmp_path / "one.npy", np.zeros(3))
    other = (tmp_path / "one.npy").read_bytes()
    for content in (b"no archive", whole[:-40], middle, other, b""):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"format .npz with images and labels"):
            read(Data(source=str(path)), 0)
    with pytest.raises(InvalidArgument, match="cifar10-gray, pathfinder32"):
        read(Data(source="imagenet"), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.variant": "causal"}, "attention.variant: got causal.*no order"),
        ({"evaluation.windows": 64}, "evaluation.windows: got 64.*images is evaluated on all"),
        ({"attention.variant": "strided"}, "attention.variant: got strided"),
        ({"model.family": "gpt2"}, "model.family.*vit for task images"),
        ({"data.tokenizer": "gpt2"}, "data.tokenizer"),
        ({"data.source": "stdlib"}, "data.source.*cifar10-gray"),
        ({"data.size_cap_bytes": 9}, "task.train_examples takes a part"),
        ({"data.source": "cifar10-gray", "data.held_out": 0.1}, "held-out part of its own"),
        ({"data.source": "cifar10-gray"}, r"got 17.*257: 32 x 32.*Set model.context=257"),
        ({"data.source": "pathfinder32", "task.patch": 3}, "task.patch: got 3.*divisor of 32"),
        ({"model.qk_norm": True}, "model.qk_norm.*for family vit"),
        ({"data.packing": "padded"}, "data.packing.*for task images"),
        ({"budget.tokens": 1000}, "budget.*budget.steps: task images counts examples"),
    ],
)
def test_what_has_no_meaning_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        change(config_of("some.npz"), changes)


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_same_in_every_implementation(
    name: str, pooling: str, tmp_path: Path
) -> None:
    context = 65 if pooling == "first" else 64
    small = {"window": {"size": 5}, "blocks": {"size": 8}, "bigbird": {"block": 8, "random": 1}}
    small |= {"butterfly": {"block": 8}, "window-global": {"size": 5, "tokens": 1}}
    small |= {"dilated": {"size": 3, "dilation": 4}}
    variant = {"name": name, **small.get(name, {})}
    found = {}
    for implementation in ("plain", "tilewise", "sdpa"):
        if (name, implementation) == ("softcap", "sdpa"):
            continue
        config = config_of(
            folder_of(tmp_path),
            model__context=context,
            task={"name": "images", "patch": 1, "pooling": pooling},
            attention={"variant": variant, "implementation": implementation},
        )
        data = config.learning.prepare(config, tmp_path)
        model = config.learning.model(config, data, 5, CPU).double()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(5)
        (batch,) = config.learning.batches(config, data, 0)(0)[:1]
        found[implementation] = model(batch.inputs[0].double())
    first, *others = found.values()
    for other in others:
        assert (first - other).abs().max() < 1e-11


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "muon", "lr": 0.01}, "model.dropout.attention": 0.2},
        {"optimizer": {"name": "schedule-free"}, "schedule": "constant", "training.z_loss": 1e-4},
        {"training.precision": "bf16", "training.checkpointing": True, "model.nudge": True},
        {"schedule": "wsd", "training.label_smoothing": 0.1, "model.dropout.residual": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_factors_work(changes: dict[str, Any], tmp_path: Path) -> None:
    config = change(config_of(folder_of(tmp_path)), changes)
    session_for(config, tmp_path).work()
    record = record_of(tmp_path)
    assert known(record.end).status == "done"
    loss = record.evaluations[-1].loss
    assert math.isfinite(known(loss))


def test_fine_tuning_from_a_checkpoint(tmp_path: Path) -> None:
    shape = Shape(1, 2, 16, image=SIDE, patch=2, channels=1, classes=7)
    kept = ViT(shape, seed=9)
    kept.save(tmp_path / "vit")
    config = config_of(folder_of(tmp_path), model__checkpoint=str(tmp_path / "vit"))
    data = config.learning.prepare(config, tmp_path)
    model = config.learning.model(config, data, 0, CPU)
    assert torch.equal(model.embed.weight, kept.embed.weight)
    assert model.drawn == ("classifier.weight", "classifier.bias")
    for changes, words in (
        ({"model.width": 32}, "width 32"),
        ({"model.context": 16, "model.checkpoint": ""}, r"got 16.*Set model.context=17"),
    ):
        other = change(config, changes)
        with pytest.raises(InvalidArgument, match=words):
            other.learning.model(other, data, 0, CPU)
    found = sum(each.numel() for each in model.parameters())
    assert abs(parameters(config) - found) <= 16 * 12  # the channels, and the head
    assert need(change(config, {"attention.implementation": "plain"})).matrix > 0
    own = config.model_copy(update={"task": Task(name="language-modelling")})  # without patches
    assert parameters(own) - parameters(config) == 3 * (16**2 - 2**2) * config.model.width


@pytest.mark.filterwarnings("ignore:Cannot locate reference")  # of dill, inside datasets
@pytest.mark.parametrize("own_part", [True, False])
def test_by_a_name_of_the_hub(
    own_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loading code, on a folder that is laid out like a data set of the Hub."""
    datasets = pytest.importorskip("datasets", reason="pip install 'tilewise[hub]'")
    image = pytest.importorskip("PIL.Image")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["up", "down", "none"]
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    made = {}
    for seed, split in enumerate(("train", "test") if own_part else ("train",)):
        made[split] = arrays(12, SIDE, seed, 3)
        files = []
        for each in made[split]["images"]:
            image.fromarray(each).save(tmp_path / "one.png")
            files.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": None})
        rows = {"img": files, "label": made[split]["labels"].tolist()}
        path = tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.table(rows, schema=features.arrow_schema), path)
    share = {} if own_part else {"held_out": 0.25}
    found = read(Data(source=f"hub:{tmp_path / 'hub'}", **share), 0)
    assert (found.classes, found.channels, found.side) == (3, 3, SIDE)
    if own_part:
        wanted = made["test"]["images"].transpose(0, 3, 1, 2)
        assert np.array_equal(found.held_out["held_out"].pixels, wanted)
        assert np.array_equal(found.train.labels, made["train"]["labels"])
    else:
        assert (len(found.train), len(found.held_out["held_out"])) == (9, 3)


_FOLDER = data_folder()
needs_data = pytest.mark.skipif(
    _FOLDER is None or not (_FOLDER / NAMED["cifar10-gray"].train).exists(),
    reason="no cifar10 in TILEWISE_DATA",
)


@needs_data
@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("cifar10-gray", (4000, 1000, 10, 32)),
        ("pathfinder32", (950, 50, 2, 32)),
        ("pathfinder128", (95, 5, 2, 128)),
        ("pathfinder256", (57, 3, 2, 256)),
    ],
)
def test_the_named_data_sets(source: str, sizes: tuple[int, ...]) -> None:
    found = read(Data(source=source), 0)
    assert (len(found.train), len(found.held_out["held_out"]), found.classes, found.side) == sizes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports
def test_a_compiled_run_learns_the_same(tmp_path: Path) -> None:
    losses = []
    for compiled in (False, True):
        config = config_of(folder_of(tmp_path), training__compile=compiled)
        data = config.learning.prepare(config, tmp_path)
        trainer = Trainer(RunSpec("e", "a", 0, config), data, CPU)
        losses.append([trainer.step().loss for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


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
    for part in (data.train, data.held_out["held_out"]):
        digest.update(f"{part.pixels.shape} 3\n".encode())
        digest.update(part.pixels.tobytes() + part.labels.tobytes())
    assert found == digest.hexdigest()


def test_a_data_set_that_is_missing_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (str(tmp_path), ""):
        monkeypatch.setenv("TILEWISE_DATA", folder)
        with pytest.raises(InvalidArgument, match=r"Write train_gray\.npz .*kriz/cifar"):
            read(Data(source="cifar10-gray"), 0)
        with pytest.raises(InvalidArgument, match=r"pathfinder128\.npz .*drewlinsley"):
            read(Data(source="pathfinder128"), 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilewise\[hub\]'"):
        read(Data(source="hub:ylecun/mnist"), 0)


@needs_data
@pytest.mark.slow
def test_a_vit_learns_cifar(tmp_path: Path) -> None:
    config = change(
        config_of("any.npz"),
        {
            "data.source": "cifar10-gray",
            "task.patch": 4,
            "model.context": 65,
            "model.layers": 2,
            "model.heads": 4,
            "model.width": 64,
            "training.batch": 32,
            "training.accumulation": 1,
            "budget.steps": 300,
            "optimizer.lr": 0.001,
            "evaluation.every": 300,
        },
    )
    session_for(config, tmp_path).work()
    record = record_of(tmp_path)
    losses = np.array([step.loss for step in record.steps], np.float64)
    assert losses[-25:].mean() < losses[:25].mean() - 0.15
    accuracy = record.evaluations[-1].metrics["accuracy"]
    assert accuracy is not None
    assert accuracy > 0.18  # a tenth is chance, and 0.01 one deviation of it
