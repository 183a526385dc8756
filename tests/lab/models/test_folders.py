"""What holds of every family: weights from the seed, recomputed layers, shapes, files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.contract import assert_same_bits
from tilelab.models import bert, gpt2, vit
from tilelab.models.layers import pack
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Implementation

TOKENS = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(1))
ROWS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
IMAGES = torch.rand((3, 3, 8, 8), generator=torch.Generator().manual_seed(1)) * 2 - 1


class Family(NamedTuple):
    model: Callable[..., Any]
    load: Callable[..., Any]
    shape: Any
    inputs: Any


FAMILIES = {
    "gpt2": Family(gpt2.GPT2, gpt2.load, gpt2.Shape(2, 2, 16, 12, 31), TOKENS),
    "bert": Family(
        bert.BERT, bert.load, bert.Shape(2, 2, 16, 24, context=12, vocabulary=20), pack(ROWS)
    ),
    "vit": Family(vit.ViT, vit.load, vit.Shape(2, 2, 16, 8, 2, 3, 5), IMAGES),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def made(name: str, **keywords: Any) -> Any:
    return FAMILIES[name].model(FAMILIES[name].shape, **keywords)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@each_family
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    before = torch.get_rng_state()
    models = made(name, seed=4), made(name, seed=4, implementation="sdpa"), made(name, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    first, same, other = (model.state_dict() for model in models)
    for key, tensor in first.items():
        assert_same_bits(tensor, same[key], key)
        assert tensor.dim() < 2 or not torch.equal(tensor, other[key])
        if tensor.dim() == 2 and tensor.numel() > 300 and not key.endswith("contract.weight"):
            assert 0.017 < tensor.std() < 0.023, key


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
@each_family
def test_checkpointing_changes_no_bit_even_with_dropout(
    name: str, implementation: Implementation
) -> None:
    family, found = FAMILIES[name], []
    dropouts = {f"{place}_dropout": 0.2 for place in ("embedding", "attention", "residual")}
    for checkpointing in (False, True):
        shape, calls = replace(family.shape, **dropouts), list[nn.Module]()
        model = family.model(shape, checkpointing=checkpointing, implementation=implementation)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, _, calls=calls: calls.append(layer))
        torch.manual_seed(5)
        model(family.inputs).square().sum().backward()
        assert len(calls) == (4 if checkpointing else 2)
        found.append({key: each.grad for key, each in model.named_parameters()})
    for key, gradient in found[0].items():
        assert gradient is not None
        assert_same_bits(found[1][key], gradient, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_family
def test_save_and_load_keep_every_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family = FAMILIES[name]
    made(name, seed=1).save(tmp_path)
    shape = replace(family.shape, embedding_dropout=0.3)
    model = family.model(shape, seed=3).to(dtype)
    model.save(tmp_path)  # over the first one
    again = family.load(tmp_path, implementation="plain")
    assert again.shape == shape
    assert getattr(again, "drawn", ()) == ()
    for key, mine in model.state_dict().items():
        assert_same_bits(again.state_dict()[key], mine, key)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("gpt2", {"model_type": "llama"}, InvalidArgument, "'llama'.*required: type 'gpt2'"),
        ("gpt2", {"activation_function": "relu"}, Unsupported, "function 'relu'.*'gelu_new'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, Unsupported, "scale_attn_by_inverse"),
        ("gpt2", {"tie_word_embeddings": False}, InvalidArgument, "no tensor 'lm_head.weight'"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, Unsupported, "layer_norm_epsilon"),
        ("gpt2", {"n_inner": 20}, Unsupported, "n_inner 20"),
        ("gpt2", {"n_layer": None}, InvalidArgument, "no whole number for n_layer"),
        ("gpt2", {"n_layer": 3}, InvalidArgument, "no tensor 'h.2.attn.c_attn.bias'"),
        ("gpt2", {"n_layer": 1}, InvalidArgument, "an unknown tensor 'h.1.attn.c_attn.bias'"),
        ("gpt2", {"n_positions": 13}, InvalidArgument, r"wpe.weight of .*\[12, 16\].*\[13, 16\]"),
        ("bert", {"hidden_act": "relu"}, Unsupported, "relu"),
        ("bert", {"position_embedding_type": "relative_key"}, Unsupported, "relative_key"),
        ("bert", {"layer_norm_eps": 1e-5}, Unsupported, "1e-05"),
        ("bert", {"model_type": "gpt2"}, InvalidArgument, "required: type 'bert'"),
        ("bert", {"hidden_size": "wide"}, InvalidArgument, "hidden_size"),
        ("vit", {"hidden_act": "relu"}, Unsupported, "relu"),
        ("vit", {"layer_norm_eps": 1e-5}, Unsupported, "1e-05"),
        ("vit", {"qkv_bias": False}, Unsupported, "False"),
        ("vit", {"model_type": "gpt2"}, InvalidArgument, "required: type 'vit'"),
        ("vit", {"image_size": [8, 8]}, InvalidArgument, "image_size"),
        ("vit", {"id2label": 5}, InvalidArgument, "id2label"),
    ],
)
def test_a_wrong_config_is_a_clear_error(
    name: str, changes: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    made(name).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(kind, match=message):
        FAMILIES[name].load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "value", "words"),
    [
        ("bert", "extra", torch.zeros(1), "unknown tensor 'extra'"),
        ("bert", "embeddings.word_embeddings.weight", None, "no tensor 'embeddings.word"),
        ("vit", "vit.extra", torch.zeros(1), "unknown tensor 'extra'"),
        ("vit", "vit.embeddings.cls_token", None, "no tensor 'embeddings.cls_token'"),
        ("vit", "vit.embeddings.position_embeddings", torch.zeros(1), "of shape"),
    ],
)
def test_odd_tensors_are_refused(
    name: str, tensor: str, value: Tensor | None, words: str, tmp_path: Path
) -> None:
    made(name).save(tmp_path)
    edit(tmp_path, lambda all_: all_.pop(tensor, None))
    if value is not None:
        edit(tmp_path, lambda all_: all_.update({tensor: value}))
    with pytest.raises(InvalidArgument, match=words):
        FAMILIES[name].load(tmp_path)


def test_a_wrong_folder_is_a_clear_error(tmp_path: Path) -> None:
    required = "a folder with config.json and model.safetensors"
    with pytest.raises(InvalidArgument, match=f"folder: got .*No such file.*{required}"):
        gpt2.load(tmp_path / "nowhere")
    folder = tmp_path / "model"
    made("gpt2").save(folder)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(31, 16)}))
    with pytest.raises(Unsupported, match=r"lm_head\.weight is not wte\.weight"):
        gpt2.load(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidArgument, match=r"model.safetensors.*a file of safetensors"):
        gpt2.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"model.safetensors.*a file of safetensors"):
        gpt2.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="not JSON"):
        gpt2.load(folder)


def test_a_failed_save_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("gpt2", seed=1).save(tmp_path)
    old = tmp_path / "copy"
    shutil.copytree(tmp_path, old)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilelab.models.folders.save_file", full)
    with pytest.raises(OSError, match="No space"):
        made("gpt2", seed=2).save(tmp_path)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == (old / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2", {"layers": 0}, "layers: got 0"),
        ("gpt2", {"width": 15}, "width: got 15.*multiple of heads=2"),
        ("gpt2", {"residual_dropout": 1.0}, r"residual_dropout: got 1.0.*\[0, 1\)"),
        ("gpt2", {"kv_heads": 3}, "kv_heads: got 3.*a divisor of heads=2"),
        ("gpt2", {"kv_heads": 0}, "kv_heads: got 0"),
        ("gpt2", {"positions": "sine"}, "positions: got 'sine'.*learned, rotary, none"),
        ("gpt2", {"norm": "batch"}, "norm: got 'batch'.*layer, rms"),
        ("gpt2", {"positions": "rotary", "width": 6}, "head width of 3.*even"),
        ("bert", {"width": 15}, "multiple of heads=2"),
        ("bert", {"kinds": 0}, "kinds: got 0"),
        ("vit", {"patch": 3}, "divisor of image=8"),
        ("vit", {"width": 15}, "multiple of heads=2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(FAMILIES[name].shape, **changes)
