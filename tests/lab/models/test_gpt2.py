"""GPT-2: equal to the reference outputs, the same weights for every attention, files to the bit."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.contract import assert_exact, assert_same_bits
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Attention, Implementation

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from tilelab.models.gpt2 import GPT2, PRESETS, Shape, load

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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_loss_is_that_of_the_reference(
    shared_data: Path, implementation: Implementation
) -> None:
    folder = shared_data / "models" / "tiny-gpt2-bytes-wikitext"
    expected = json.loads((folder / "reference_loss.json").read_text())
    with gzip.open(shared_data / "wikitext" / "wikitext103.valid.tokens.txt.gz") as file:
        text = file.read(expected["windows"] * expected["window_bytes"])
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, 256)
    model = load(folder, implementation=implementation)
    nats = 0.0
    with torch.no_grad():
        for part in windows.split(50):
            logits = model(part[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum")
            nats += loss.item()
    assert nats / (400 * 255) == pytest.approx(expected["nats_per_byte_float64"], abs=2e-6)


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


def test_save_and_load_keep_every_bit_and_both_dtypes(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64):
        model = GPT2(SMALL, seed=3).to(dtype)
        model.save(tmp_path)  # the second time over the first
        again = load(tmp_path, implementation="plain")
        assert again.shape == SMALL
        for (name, mine), (other, theirs) in zip(
            model.state_dict().items(), again.state_dict().items(), strict=True
        ):
            assert name == other
            assert_same_bits(theirs, mine, name)


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


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    models = [
        GPT2(SMALL, implementation="plain", seed=7),
        GPT2(SMALL, implementation="tilewise", mask=masks.window(4, 0), seed=7, checkpointing=True),
        GPT2(SMALL, implementation="sdpa", seed=8),
    ]
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (model.state_dict() for model in models)
    for name, tensor in first.items():
        assert_same_bits(tensor, same[name], name)
        assert tensor.dim() < 2 or not torch.equal(tensor, other[name])


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_position_sees_the_future(implementation: Implementation) -> None:
    model = GPT2(SMALL, implementation=implementation)
    tokens = _tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    before, after = model(tokens), model(changed)
    assert_same_bits(after[:, :7], before[:, :7], "the past")
    assert not torch.equal(after[:, 7:], before[:, 7:])


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


def _gradients(model: GPT2) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(11)
    functional.cross_entropy(model(_tokens()).flatten(0, 1), _tokens().flatten()).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpointing_changes_no_bit_even_with_dropout(implementation: Implementation) -> None:
    shape = Shape(2, 2, 16, 12, 31, 0.1, 0.2, 0.3)
    kept = _gradients(GPT2(shape, implementation=implementation))
    model = GPT2(shape, implementation=implementation, checkpointing=True)
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    for name, gradient in _gradients(model).items():
        assert_same_bits(gradient, kept[name], name)
    assert len(calls) == 4  # each layer twice


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
    for change, message in (
        ({"layers": 0}, "layers: got 0"),
        ({"width": 15}, "width: got 15.*multiple of heads=2"),
        ({"residual_dropout": 1.0}, r"residual_dropout: got 1.0.*\[0, 1\)"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Shape(**{"layers": 2, "heads": 2, "width": 16, **change})  # type: ignore[arg-type]


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_config_without_dropout_has_hugging_faces_standard(tmp_path: Path) -> None:
    GPT2(SMALL).save(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: values[key] for key in values if "pdrop" not in key}))
    shape = load(tmp_path).shape
    assert shape == replace(
        SMALL, embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1
    )


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model_type": "llama"}, InvalidArgument, "type 'llama'.*required: type 'gpt2'"),
        ({"activation_function": "relu"}, Unsupported, "activation_function 'relu'.*'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, Unsupported, "scale_attn_by_inverse"),
        ({"tie_word_embeddings": False}, Unsupported, "tie_word_embeddings"),
        ({"layer_norm_epsilon": 1e-6}, Unsupported, "layer_norm_epsilon"),
        ({"n_inner": 20}, Unsupported, "n_inner 20"),
        ({"n_layer": None}, InvalidArgument, "no whole number for n_layer"),
        ({"n_layer": 3}, InvalidArgument, "no tensor 'h.2.attn.c_attn.bias'"),
        ({"n_layer": 1}, InvalidArgument, "an unknown tensor 'h.1.attn.c_attn.bias'"),
        ({"n_positions": 13}, InvalidArgument, r"wpe.weight of shape \[12, 16\].*\[13, 16\]"),
    ],
)
def test_a_wrong_config_is_a_clear_error(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    GPT2(SMALL).save(tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(kind, match=message):
        load(tmp_path)


def test_a_wrong_folder_is_a_clear_error(tmp_path: Path) -> None:
    required = "a folder with config.json and model.safetensors"
    with pytest.raises(InvalidArgument, match=f"No such file.*{required}"):
        load(tmp_path / "nowhere")
    folder = tmp_path / "model"
    GPT2(SMALL).save(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(31, 16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unsupported, match="lm_head.weight is not wte.weight"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidArgument, match=r"model.safetensors.*a file of safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"model.safetensors.*a file of safetensors"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="not JSON"):
        load(folder)


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = GPT2(SMALL, seed=2)
    model.save(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.allclose(theirs(_tokens()).logits, model(_tokens()), atol=1e-5)


def test_a_failed_save_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT2(SMALL, seed=1).save(tmp_path)
    old = tmp_path / "copy"
    shutil.copytree(tmp_path, old)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilelab.models.folders.save_file", full)
    with pytest.raises(OSError, match="No space"):
        GPT2(SMALL, seed=2).save(tmp_path)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == (old / name).read_bytes()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_whole_model_is_one_graph(implementation: Implementation) -> None:
    model = GPT2(SMALL, implementation=implementation)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same_bits(compiled(_tokens()), model(_tokens()), "logits")
