"""ViT: against the plain formula and another implementation, its files, its attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.contract import assert_exact
from tilelab.models.vit import PRESETS, Pooling, Shape, ViT, load
from tilewise import masks
from tilewise.errors import InvalidArgument

POOLINGS: tuple[Pooling, ...] = ("first", "mean")
TINY = Shape(layers=2, heads=2, width=16, image=8, patch=2, channels=3, classes=5, feed_forward=24)


def images_of(shape: Shape, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = (count, shape.channels, shape.image, shape.image)
    return torch.rand(size, generator=generator) * 2 - 1


def lively(shape: Shape, **keywords: Any) -> ViT:
    """A model whose weights are large enough for every part to count."""
    model = ViT(shape, seed=3, **keywords).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=generator) * 0.3)
    return model


def formula(weights: Mapping[str, Tensor], images: Tensor, shape: Shape, seen: Tensor) -> Tensor:
    """The logits by the formulas of the paper (equations 1 to 4), the class token first."""
    w = {name: each.double() for name, each in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    kernel = w["embed.weight"].reshape(shape.width, shape.channels, shape.patch, shape.patch)
    cut = functional.conv2d(images.double(), kernel, w["embed.bias"], stride=shape.patch)
    x = cut.flatten(2).transpose(1, 2)
    if shape.pooling == "first":
        x = torch.cat([w["class_token"].expand(len(x), 1, -1), x], 1)
    x = x + w["positions.weight"]
    wide = shape.width // shape.heads
    for layer in range(shape.layers):
        at = f"layers.{layer}."
        y = norm(x, at + "attention_norm")
        q, k, v = (
            linear(y, f"{at}attention.{name}").unflatten(-1, (shape.heads, wide))
            for name in ("query", "key", "value")
        )
        scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / wide**0.5
        weight = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("bhmn,bnhd->bmhd", weight, v).flatten(2)
        x = x + linear(out, at + "attention.output")
        y = linear(norm(x, at + "mlp_norm"), at + "expand")
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
        x = x + linear(y, at + "contract")
    x = norm(x, "norm")
    return linear(x[:, 0] if shape.pooling == "first" else x.mean(1), "classifier")


def everybody(shape: Shape) -> Tensor:
    return torch.ones(shape.tokens, shape.tokens, dtype=torch.bool)


def near(shape: Shape, width: int) -> Tensor:
    """Who sees whom with a window, the class token first: it sees and is seen by all."""
    place = torch.arange(shape.patches)
    window = (place[:, None] - place).abs() < width
    if shape.pooling == "mean":
        return window
    seen = everybody(shape)
    seen[1:, 1:] = window
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch", [1, 4])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_logits_and_gradients_are_those_of_the_formula(
    pooling: Pooling, patch: int, dtype: torch.dtype
) -> None:
    shape = replace(TINY, pooling=pooling, patch=patch)
    ours, plain = (lively(shape, implementation=which) for which in ("tilewise", "plain"))
    ours, plain, images = ours.to(dtype), plain.to(dtype), images_of(shape).to(dtype)
    weights = {
        name: each.detach().double().requires_grad_() for name, each in ours.named_parameters()
    }
    truth = formula(weights, images, shape, everybody(shape))
    found, other = ours(images), plain(images)
    assert_exact(found.detach(), other.detach(), truth.detach(), "logits")
    for each in (truth, found, other):
        each.double().sin().sum().backward()
    for (name, one), two in zip(ours.named_parameters(), plain.parameters(), strict=True):
        wanted = weights[name].grad
        assert one.grad is not None and two.grad is not None and wanted is not None, name  # noqa: PT018
        if dtype is torch.float32:  # of bfloat16 the products before add up other roundings
            assert_exact(one.grad, two.grad, wanted, name)


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_mask_is_of_patches_and_the_class_token_sees_all(
    pooling: Pooling, implementation: Any
) -> None:
    shape = replace(TINY, pooling=pooling)
    model = lively(shape, implementation=implementation, mask=masks.window(2, 2)).double()
    images = images_of(shape).double()
    truth = formula(dict(model.named_parameters()), images, shape, near(shape, 3))
    assert (model(images) - truth).abs().max() < 1e-12


def test_patches_of_one_pixel_are_the_pixels() -> None:
    shape = replace(TINY, patch=1, channels=1)
    images = images_of(shape)
    assert torch.equal(ViT(shape).cut(images)[:, :, 0], images.flatten(1))


def test_autocast_leaves_the_class_token_whole() -> None:
    model, entered = lively(TINY), list[Tensor]()
    model.layers[0].register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        model(images_of(TINY))
    assert model.class_token is not None
    whole = model.class_token + model.positions.weight[0]
    assert torch.equal(entered[0][:, -1], whole.expand(3, -1))


def test_a_config_without_labels_has_two_classes_and_may_have_any_letters(tmp_path: Path) -> None:
    ViT(replace(TINY, classes=2)).save(tmp_path)
    path = tmp_path / "config.json"
    values = {**json.loads(path.read_text()), "id2label": None, "label2id": {"Käfer": 0}}
    path.write_bytes(json.dumps(values, ensure_ascii=False).encode())
    assert load(tmp_path).shape.classes == 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"got shape \[1, 1, 8, 8\].*\[B, 3, 8, 8\]"):
        ViT(TINY)(torch.zeros(1, 1, 8, 8))


def test_a_folder_of_other_numbers_is_refused(tmp_path: Path) -> None:
    ViT(TINY).save(tmp_path)
    with pytest.raises(InvalidArgument, match=r"shape: got width 32.*16, as in"):
        load(tmp_path, shape=replace(TINY, width=32))


def test_the_published_sizes() -> None:
    sizes = {name: _count(shape) for name, shape in PRESETS.items() if name in ("tiny", "small")}
    assert sizes == {"tiny": 5_717_416, "small": 22_050_664}  # as published
    base, large = PRESETS["base"], PRESETS["large"]
    assert (base.layers, base.heads, base.width, base.tokens) == (12, 12, 768, 197)
    assert (large.layers, large.heads, large.width, large.feed_forward) == (24, 16, 1024, 4096)


def _count(shape: Shape) -> int:
    """Weights of a whole model, from one with a single layer."""
    model = ViT(replace(shape, layers=1))
    layer = sum(each.numel() for each in model.layers.parameters())
    return sum(each.numel() for each in model.parameters()) + (shape.layers - 1) * layer


@pytest.mark.filterwarnings("ignore")  # of transformers, on import
def test_transformers_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = lively(TINY)
    model.save(tmp_path)
    theirs = transformers.ViTForImageClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    theirs = theirs.double().eval()
    images = images_of(TINY).double()
    with torch.no_grad():
        # Its softmax is in float32 always.
        assert (model.double()(images) - theirs(images).logits).abs().max() < 5e-7
    theirs.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(images), model(images))
