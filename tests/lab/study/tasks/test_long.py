"""ListOps, texts with labels and long documents: their files, their splits, and that they learn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lab.study.tasks.small import tiny
from tests.lab.study.train.toys import CPU
from tilelab.models.bert import BERT, Head
from tilelab.study.ask.config import RunConfig, change
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import RunSpec
from tilelab.study.choices import variants
from tilelab.study.data.corpus import data_folder
from tilelab.study.need import VOCABULARY, parameters
from tilelab.study.tasks import scores
from tilelab.study.tasks.examples import Examples
from tilelab.study.tasks.long import tokens_of
from tilelab.study.train.trainer import Trainer
from tilewise.errors import InvalidArgument, Unsupported

EXPRESSIONS = [
    ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ("( ( ( [MIN 4 ) ( ( ( [SM 7 ) 8 ) ] ) ) ] )", 4),
    ("3", 3),
    ("( ( ( ( [MED 1 ) 5 ) 9 ) ] )", 5),
]
PRESIDENTS = (
    *("Adams", "Madison", "Monroe", "Adams", "Jackson", "Tyler", "Polk", "Pierce", "Grant"),
    *("Hayes", "Taft", "Ford", "Bush"),
)


def config_of(task: str, source: Path | str, **changes: Any) -> RunConfig:
    """A run of a tiny BERT."""
    tokenizer = "listops" if task == "listops" else "bytes"
    return tiny({"name": task}, source, tokenizer, changes)


def prepared(config: RunConfig) -> Examples:
    found = config.learning.prepare(config, Path())
    assert isinstance(found, Examples)
    return found


def write_listops(folder: Path, form: str, copies: int = 8) -> Path:
    """The files of a form; expressions differ in a digit that says nothing of the value."""
    folder.mkdir()
    rows = [
        (text.replace("2", str(at % 3)), value)
        for at in range(copies)
        for text, value in EXPRESSIONS
    ]
    if form == "nyu":
        text = "".join(f"{value}\t{expression}\n" for expression, value in rows)
        (folder / "test_d20s.tsv").write_text(text)
        return folder
    text = "Source\tTarget\n" + "".join(f"{source}\t{value}\n" for source, value in rows)
    (folder / "basic_train.tsv.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("val", "test"):
        (folder / f"basic_{name}.tsv").write_text(text)
    return folder


def write_objects(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train", "test"):
        rows = [{"text": "good é\x85" if at % 2 else "bad", "label": at % 2} for at in range(8)]
        write_objects(folder / f"{name}.jsonl.gz", rows)
    return folder


def write_addresses(folder: Path) -> Path:
    folder.mkdir()
    rows = [
        {
            "year": 1800 + 18 * at,
            "president": name,
            "party": ("Democratic", "Whig", "Republican")[at % 3],
            "text": f"{name} says " + "x" * (10 * at),
        }
        for at, name in enumerate(PRESIDENTS)
    ]
    write_objects(folder / "sotu.jsonl.gz", rows[::-1])  # dates sort them, not the file
    return folder


def test_listops_has_the_arenas_tokens(tmp_path: Path) -> None:
    data = prepared(config_of("listops", write_listops(tmp_path / "lra", "lra")))
    assert (len(data.train), len(data.held_out["held_out"])) == (32, 64)  # validation and test
    assert data.train.labels[:4].tolist() == [9, 4, 3, 5]
    assert data.train.first.lengths[:4].tolist() == [4, 7, 1, 5]  # no parentheses
    words = ("[MIN", "[MAX", "[MED", "[SM", "]", *"0123456789")
    assert tokens_of(" ( ".join(words)) == list(range(15))
    start = data.vocabulary - 1
    assert data.sequence(data.train, 2, 24)[0] == [start, tokens_of("3")[0]]
    assert data.vocabulary == VOCABULARY["listops"]
    short = prepared(config_of("listops", tmp_path / "lra", **{"task.longest": 4}))
    assert set(short.train.labels.tolist()) == {9, 3}
    assert short.sha256 != data.sha256


def test_the_floor_is_one_answer_for_all_examples(tmp_path: Path) -> None:
    """Of the held-out classes 9, 4, 3 and 5, once 9 more often: its share, and the entropy."""
    folder = write_listops(tmp_path / "lra", "lra", 2)
    for name in ("val", "test"):
        with (folder / f"basic_{name}.tsv").open("a") as file:
            file.write("( ( ( [MAX 2 ) 9 ) ] )\t9\n" * 4)
    config = config_of("listops", folder)
    data = prepared(config)
    labels = data.held_out["held_out"].labels
    assert np.bincount(labels)[[3, 4, 5, 9]].tolist() == [4, 4, 4, 12]
    floors = config.learning.floors(config, data, 0, tmp_path)
    found = {each.metric: each.value for each in floors}
    assert {each.name for each in floors} == {"majority answer"}
    assert found.keys() == set(config.learning.metrics)
    assert found["accuracy"] == 0.5
    entropy = -(0.5 * np.log(0.5) + 3 / 6 * np.log(1 / 6))
    assert found["cross_entropy"] == pytest.approx(entropy, rel=1e-12)


def test_the_split_of_short_expressions_is_theirs_alone(tmp_path: Path) -> None:
    """Who is held out depends on the expression, not on its place or on what else is there."""
    folder = write_listops(tmp_path / "nyu", "nyu", 0)
    texts = [f"{at % 10}\t[SM {' '.join(str(at))} ]" for at in range(200)]
    (folder / "test_d20s.tsv").write_text("\n".join(texts))
    config = config_of("listops", folder, **{"task.form": "nyu"})
    one = prepared(config)
    held = [one.held_out["held_out"].first[at] for at in range(len(one.held_out["held_out"]))]
    assert 8 <= len(held) <= 40
    assert one.name == "ListOps (NYU, of test_d20s.tsv alone)"
    assert not {tuple(row) for row in held} & {
        tuple(one.train.first[at]) for at in range(len(one.train))
    }
    (folder / "test_d20s.tsv").write_text("\n".join(texts[::-2]))
    other = prepared(config).held_out["held_out"]
    found = [other.first[at] for at in range(len(other))]
    assert found == [
        tokens_of(text.split("\t")[1])
        for text in texts[::-2]
        if tokens_of(text.split("\t")[1]) in held
    ]
    (folder / "train_d20s.tsv").write_text("\n".join(texts[:20]))  # then the files say who is
    assert len(prepared(config).train) == 20
    assert prepared(config).name == "ListOps (NYU)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Source\tTarget\n[MAX 1 ]\t10\n", r"line 2.*value from 0 to 9"),
        ("Source\tTarget\n[MAX 1 ]\n", r"line 2.*with a tab"),
        ("Source\tTarget\n[AVG 1 ]\t1\n", r"line 2: '\[AVG'.*one of \[MIN"),
    ],
)
def test_odd_expressions_are_refused(text: str, words: str, tmp_path: Path) -> None:
    folder = write_listops(tmp_path / "lra", "lra")
    (folder / "basic_test.tsv").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        prepared(config_of("listops", folder))
    (folder / "basic_val.tsv").unlink()
    with pytest.raises(InvalidArgument, match=r"without basic_val\.tsv.*long-range-arena"):
        prepared(config_of("listops", folder))
    with pytest.raises(InvalidArgument, match=r"without test_d20s\.tsv.*spinn"):
        prepared(config_of("listops", folder, **{"task.form": "nyu"}))


def test_an_expression_is_never_cut(tmp_path: Path) -> None:
    source = write_listops(tmp_path / "lra", "lra")
    config = config_of("listops", source, **{"model.context": 7})
    with pytest.raises(InvalidArgument, match=r"context: got 7.*8.*Or set task.longest to 6"):
        config.learning.examination(config, prepared(config))
    with pytest.raises(InvalidArgument, match=r"context: got 7"):  # the forecast asks it
        config.learning.evaluated(config, prepared(config), whole=True)
    with pytest.raises(InvalidArgument, match=r"context: got 7.*101"):
        change(config, {"task.longest": 100})
    with pytest.raises(InvalidArgument, match=r"basic_train\.tsv"):
        prepared(config_of("listops", tmp_path))


@pytest.mark.parametrize(
    "data",
    [b"no gzip", gzip.compress(b"{}\n" * 99)[:-9], gzip.compress(b"\xff\xfe")],
    ids=["other", "cut off", "no UTF-8"],
)
def test_damaged_files_are_refused(data: bytes, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts")
    (folder / "test.jsonl.gz").write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"test\.jsonl\.gz.*UTF-8, whole.*get it again"):
        prepared(config_of("text-classification", folder))
    body = bytearray(gzip.compress(b"{}\n" * 99))
    body[12:20] = b"\xff" * 8  # inside the stream
    (folder / "test.jsonl.gz").write_bytes(bytes(body))
    with pytest.raises(InvalidArgument, match="get it again"):
        prepared(config_of("text-classification", folder))


def test_bytes_of_texts_are_tokens(tmp_path: Path) -> None:
    config = config_of("text-classification", write_texts(tmp_path / "texts"))
    data = prepared(config)
    assert data.sequence(data.train, 1, 6)[0] == [256, *"good é".encode()[:5]]
    assert len(data.train) == len(data.held_out["held_out"]) == 8
    assert config.learning.metrics == ("accuracy", *scores.QUARTERS, "cross_entropy")
    shape = BERT(config.learning.model(config, data, 0, CPU).shape, head=Head("classes", 2))
    assert parameters(config) == pytest.approx(
        sum(each.numel() for each in shape.parameters()), abs=100
    )
    passages = change(config, {"task.passage": 8}).learning
    assert passages.metrics == ("accuracy", "cross_entropy")  # of one length: no quarters
    three = change(config, {"task.classes": 3})
    assert three.learning.classes == 3
    write_objects(tmp_path / "texts" / "test.jsonl.gz", [{"text": "x", "label": 2}] * 4)
    assert len(prepared(three).held_out["held_out"]) == 4
    with pytest.raises(InvalidArgument, match=r"row 1.*label 2.*0 to 1 \(task.classes\)"):
        prepared(config)
    write_objects(tmp_path / "texts" / "test.jsonl.gz", [{"text": "x", "label": 1}] * 3)
    with pytest.raises(InvalidArgument, match=r"with 3 held-out examples.*4 or more.*quarters"):
        prepared(config)
    (tmp_path / "texts" / "test.jsonl.gz").write_bytes(gzip.compress(b"{x}\n"))
    with pytest.raises(InvalidArgument, match=r"line 1: '\{x\}'.*an object in JSON"):
        prepared(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Cannot locate reference")  # of dill, inside datasets
def test_texts_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loading code, on a folder that is laid out like a data set of the Hub."""
    datasets = pytest.importorskip("datasets", reason="pip install 'tilewise[hub]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = write_texts(tmp_path / "texts")
    local = config_of("text-classification", source)
    hub = change(local, {"data.source": f"hub:{source}"})
    assert prepared(hub).sha256 == prepared(local).sha256
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(Unsupported, match=r"tilewise\[hub\].*train.jsonl and test.jsonl"):
        prepared(hub)


def test_addresses_have_eras_and_parties(tmp_path: Path) -> None:
    source = write_addresses(tmp_path / "longdoc")
    data = prepared(config_of("documents", source))
    # Years 1800, 1818, ..., 2016; every third is held out.
    assert data.held_out["held_out"].labels.tolist() == [0, 2, 3, 4]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    apart = prepared(config_of("documents", source, **{"task.split": "presidents"}))
    # Every third President by the first address: Monroe, Polk, Hayes and Bush.
    assert apart.held_out["held_out"].labels.tolist() == [0, 2, 3, 4]
    party = prepared(config_of("documents", source, **{"task.label": "party"}))
    assert party.train.labels.tolist() == [0] * 5
    assert party.held_out["held_out"].labels.tolist() == [1] * 4
    assert party.name == "State of the Union addresses"
    path = source / "sotu.jsonl.gz"
    row = {"year": 1700, "president": "x", "party": "y", "text": "z"}
    for changes, words in (({}, "line 1: 1700.*from 1790"), ({"text": None}, "text, a str")):
        write_objects(path, [{**row, **changes}])
        with pytest.raises(InvalidArgument, match=words):
            prepared(config_of("documents", path))
    path.unlink()
    with pytest.raises(InvalidArgument, match=r"sotu.jsonl or sotu.jsonl.gz"):
        prepared(config_of("documents", source))


def test_passages_cover_the_text_and_are_not_cut(tmp_path: Path) -> None:
    source = write_addresses(tmp_path / "longdoc")
    config = config_of("documents", source, **{"task.passage": 24})
    data, whole = prepared(config), prepared(config_of("documents", source))
    room = 23  # beside the start token
    kept = []
    for at in range(len(whole.train)):
        text = whole.train.first[at]
        pieces = [text[begin : begin + room] for begin in range(0, len(text), room)]
        kept += [row for row in pieces if 2 * len(row) >= room or len(pieces) == 1]
    assert [data.train.first[at] for at in range(len(data.train))] == kept
    assert len(kept) > len(whole.train)
    assert data.lengths(data.train).max() == 24
    assert not config.learning.quarters
    for changes, words in (
        ({"model.context": 20}, r"passage: got 24.*at most model.context=20"),
        ({"task.passage": 4}, r"passage: got 4.*8 or more"),
        ({"data.source": "hub:x"}, r"source: got 'hub:x'.*sotu"),
        ({"data.source": "stdlib"}, r"source: got 'stdlib'.*sotu"),
        ({"attention.variant": "strided"}, r"variant: got strided.*look both ways"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            change(config, changes)


@pytest.mark.parametrize("name", [name for name in variants.ENCODER if name != "full"])
def test_sparse_patterns_of_packed_sequences(name: str, tmp_path: Path) -> None:
    """Sequences of different lengths: tilewise as plain and sdpa, which pad and write the mask."""
    source = write_addresses(tmp_path / "longdoc")
    options = {"block": 8} if name in ("bigbird", "butterfly") else {"size": 5}
    variant = {"name": name, **options}
    changes = {"model.context": 96, "attention.variant": variant, "task.pooling": "mean"}
    config = config_of("documents", source, **changes)
    data = prepared(config)
    losses, gradients = {}, {}
    for implementation in ("plain", "sdpa", "tilewise"):
        asked = change(config, {"attention.implementation": implementation})
        trainer = Trainer(RunSpec("e", "a", 0, asked), data, CPU)
        trainer.model.double()
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight.mul_(20.0)  # so that it matters who is seen
        (batch,) = asked.learning.batches(asked, data, 0)(0)
        loss, _ = asked.learning.losses(trainer.model(*batch.inputs), batch.targets, asked.training)
        loss.backward()
        losses[implementation] = loss.item()
        gradients[implementation] = trainer.model.get_parameter(
            "layers.0.attention.key.weight"
        ).grad
        assert len(set(batch.inputs[0].borders.diff().tolist())) > 1
    everybody = change(config, {"attention.variant": "full"})
    full = everybody.learning.model(everybody, data, 0, CPU)(*batch.inputs)
    sparse = config.learning.model(config, data, 0, CPU)(*batch.inputs)
    assert not torch.equal(full, sparse), "the pattern leaves something out"
    for other in ("sdpa", "tilewise"):
        assert losses[other] == pytest.approx(losses["plain"], rel=1e-10)
        assert gradients["plain"].abs().max() > 1e-3
        assert torch.allclose(gradients[other], gradients["plain"], atol=1e-9, rtol=1e-6)


def test_it_learns(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"budget.steps": 40, "optimizer.lr": 0.01, "training.batch": 16}
    changes |= {"task.pooling": "mean"}
    config = config_of("listops", write_listops(tmp_path / "lra", "lra"), **changes)
    data = prepared(config)
    trainer = Trainer(RunSpec("e", "a", 0, config), data, CPU)
    first = trainer.step().loss
    for _ in range(39):
        last = trainer.step().loss
    assert last < 0.5 * first
    held = config.learning.examination(config, data).held_out(trainer.model, True, None)
    assert held.metrics["accuracy"] == 1.0
    assert list(held.metrics) == ["accuracy", *scores.QUARTERS, "cross_entropy"]


def test_accuracy_by_quarters_of_length() -> None:
    lengths = np.array([9, 1, 5, 5, 5, 2, 7, 8, 3])
    predicted = np.array([1, 0, 1, 0, 0, 0, 1, 1, 0])
    found = scores.by_length(predicted, np.zeros(9, np.int64), lengths)
    # By length: 1 2 3 | 5 5 | 5 7 | 8 9, of equal ones the first.
    assert list(found.values()) == [1.0, 0.5, 0.5, 0.0]
    assert set(scores.QUARTERS) <= set(METRICS)


@pytest.mark.slow
def test_the_real_files() -> None:
    folder = data_folder()
    if folder is None or not (folder / "listops").exists() or not (folder / "longdoc").exists():
        pytest.skip("no listops or longdoc in TILEWISE_DATA")
    long = prepared(config_of("listops", "listops", **{"model.context": 2001}))
    assert (len(long.train), len(long.held_out["held_out"])) == (2000, 600)
    short = config_of("listops", "listops", **{"task.form": "nyu", "model.context": 2001})
    data = prepared(short)
    assert len(data.train) + len(data.held_out["held_out"]) == 10000
    assert 900 < len(data.held_out["held_out"]) < 1100
    addresses = prepared(config_of("documents", "sotu"))
    assert (len(addresses.train), len(addresses.held_out["held_out"])) == (78, 39)
    assert np.bincount(addresses.held_out["held_out"].labels).min() >= 5
