"""GPT-2: equal to the reference outputs, the same weights for every attention, files to the bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.contract import assert_exact, assert_same_bits
from tilelab.models.gpt2 import GPT2, PRESETS, Shape, load
from tilewise import masks, scores
from tilewise.errors import InvalidArgument
from tilewise.nn import Attention, Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ("plain", "sdpa", "tilewise")
MODELS = ("random-gpt2", "tiny-gpt2-bytes-wikitext")
SMALL = Shape(layers=2, heads=2, width=16, context=12, vocabulary=31)


def _tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(
    shared_data: Path, name: str, implementation: Implementation
) -> None:
    folder = shared_data / "models" / name
    reference = np.load(folder / "reference.npz")
    tokens = torch.from_numpy(reference["input_ids"])
    with torch.no_grad():
        actual = load(folder, implementation=implementation)(tokens)
        plain = load(folder, implementation="plain")(tokens)
    assert_exact(actual, plain, reference["output"], "logits")


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_the_loaded_one_to_the_bit(
    shared_data: Path, tmp_path: Path, name: str
) -> None:
    folder = shared_data / "models" / name
    load(folder).save(tmp_path / "new" / "folder")
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "new" / "folder" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert_same_bits(after[key], tensor, key)
    config = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text()) == config
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_half_precision_files_and_files_without_prefix_are_read(tmp_path: Path) -> None:
    model = GPT2(SMALL, seed=3).bfloat16()
    model.save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)  # what the oldest files have
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    for name, tensor in load(tmp_path).state_dict().items():
        assert_same_bits(tensor, model.state_dict()[name].float(), name)


def test_the_initial_distribution() -> None:
    model = GPT2(Shape(layers=8, heads=4, width=64, context=512, vocabulary=512))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
            continue
        ends = name.endswith(("attention.output.weight", "contract.weight"))
        expected = 0.02 / math.sqrt(16) if ends else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(parameter.mean().item()) < 0.05 * expected, name
    targets = _tokens().roll(5).flatten()  # a tied head favours the token it has just read
    loss = functional.cross_entropy(model(_tokens()).flatten(0, 1), targets)
    assert loss.item() == pytest.approx(math.log(512), abs=0.1)


def test_the_presets_have_the_published_sizes() -> None:
    millions = {"tiny": 0.86, "small": 124.4, "medium": 354.8, "large": 774.0, "xl": 1557.6}
    assert PRESETS.keys() == millions.keys()
    for name, shape in PRESETS.items():
        w = shape.width
        count = (
            w * (shape.vocabulary + shape.context) + shape.layers * (12 * w * w + 13 * w) + 2 * w
        )
        assert count / 1e6 == pytest.approx(millions[name], abs=0.06), name
    assert sum(each.numel() for each in GPT2(PRESETS["tiny"]).parameters()) == 858_880


def test_mask_and_score_reach_every_layer() -> None:
    slopes = torch.tensor([0.5, 0.25])
    for change in ({"mask": masks.window(2, 0)}, {"score": scores.alibi(slopes)}):
        by = {
            each: GPT2(SMALL, implementation=each, **change)(_tokens()) for each in IMPLEMENTATIONS
        }
        oracle = GPT2(SMALL, implementation="plain", **change).double()(_tokens())
        assert not torch.allclose(by["plain"], GPT2(SMALL)(_tokens()), atol=1e-6)
        for actual in by.values():
            assert_exact(actual, by["plain"], oracle.detach(), "logits")


def test_each_dropout_is_where_it_says() -> None:
    tokens = _tokens()
    still = GPT2(SMALL)(tokens)
    for field in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        model = GPT2(replace(SMALL, **{field: 0.5}))  # type: ignore[arg-type]
        assert not torch.equal(model(tokens), still), field
        assert_same_bits(model.eval()(tokens), still, field)
    layers = GPT2(Shape(1, 2, 16, 12, 31, attention_dropout=0.25)).modules()
    assert [each.dropout_p for each in layers if isinstance(each, Attention)] == [0.25]


def test_residual_dropout_is_on_both_branches() -> None:
    torch.manual_seed(2)
    model = GPT2(Shape(2, 2, 16, 12, 31, residual_dropout=0.999999))  # next to nothing is left
    assert model.positions is not None
    x = model.tokens(_tokens()) + model.positions(torch.arange(12))
    expected = functional.linear(model.norm(x), model.tokens.weight)
    assert_same_bits(model(_tokens()), expected, "logits")


def test_wrong_calls_are_clear_errors() -> None:
    model = GPT2(SMALL)
    with pytest.raises(InvalidArgument, match=r"tokens: got shape \[1, 13\].*context 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match=r"tokens: got shape \[3\]"):
        model(torch.zeros(3, dtype=torch.int64))


def test_a_config_without_dropout_has_hugging_faces_standard(tmp_path: Path) -> None:
    GPT2(SMALL).save(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: values[key] for key in values if "pdrop" not in key}))
    shape = load(tmp_path).shape
    assert shape == replace(
        SMALL, embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1
    )


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_is_saved(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = GPT2(replace(SMALL, tied=tied), seed=2)
    model.save(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.allclose(theirs(_tokens()).logits, model(_tokens()), atol=1e-5)
