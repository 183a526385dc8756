"""What later models changed of GPT-2: exact in every implementation, in files and in decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.contract import assert_exact, assert_same_bits
from tilelab.models import decoding
from tilelab.models.gpt2 import GPT2, Shape, load
from tilewise import masks
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Implementation
from tilewise.serving import generate

IMPLEMENTATIONS: tuple[Implementation, ...] = ("plain", "sdpa", "tilewise")
STANDARD = Shape(layers=2, heads=4, width=32, context=12, vocabulary=31)
ALL: dict[str, Any] = {
    "positions": "rotary",
    "kv_heads": 2,
    "norm": "rms",
    "qk_norm": True,
    "bias": False,
    "tied": False,
}
FACTORS: list[dict[str, Any]] = [
    {"positions": "rotary"},
    {"positions": "none"},
    {"kv_heads": 1},
    {"kv_heads": 2},
    {"norm": "rms"},
    {"qk_norm": True},
    {"bias": False},
    {"tied": False},
    ALL,
]
each_factor = pytest.mark.parametrize("factor", FACTORS, ids=str)


def _tokens() -> Tensor:
    return torch.randint(0, 31, (2, 11), generator=torch.Generator().manual_seed(1))


def _apart(model: GPT2) -> GPT2:
    """The model with weights that matter: gains that are not 1, and scores that are not near 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def _results(model: GPT2) -> dict[str, Tensor]:
    logits = model(_tokens())
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), _tokens()[:, 1:].flatten()).backward()
    found = {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    return {"logits": logits.detach(), **found}


@each_factor
def test_the_three_implementations_agree(factor: dict[str, Any]) -> None:
    shape = replace(STANDARD, **factor)
    by = {each: _results(_apart(GPT2(shape, implementation=each))) for each in IMPLEMENTATIONS}
    oracle = _results(_apart(GPT2(shape, implementation="plain")).double())
    for found in by.values():
        for name, actual in found.items():
            assert_exact(actual, by["plain"][name], oracle[name], name)
    standard = _apart(GPT2(STANDARD))(_tokens())
    assert not torch.allclose(by["plain"]["logits"], standard, atol=1e-3)


@each_factor
def test_the_other_weights_are_those_of_a_gpt2_of_the_same_seed(factor: dict[str, Any]) -> None:
    standard = GPT2(STANDARD, seed=3).state_dict()
    for name, mine in GPT2(replace(STANDARD, **factor), seed=3).state_dict().items():
        if name.endswith(("query_norm.weight", "key_norm.weight")):
            assert (mine == 1.0).all()
        elif name == "head.weight":  # drawn last, from the same numbers
            assert mine.std().item() == pytest.approx(0.02, rel=0.1)
            assert not torch.equal(mine, standard["tokens.weight"])
        else:
            assert_same_bits(mine, standard[name][: len(mine)], name)


def test_what_each_factor_is_made_of() -> None:
    model = GPT2(replace(STANDARD, **ALL))
    names = dict(model.named_parameters())
    assert "positions.weight" not in names
    assert not any(name.endswith("bias") for name in names)
    assert names["head.weight"] is not names["tokens.weight"]
    kept = {name for name, _ in GPT2(replace(STANDARD, bias=False)).named_parameters()}
    assert {name for name in kept if name.endswith("bias")} == {
        "norm.bias",
        *(f"layers.{n}.{part}_norm.bias" for n in (0, 1) for part in ("attention", "mlp")),
    }
    assert names["layers.0.attention.key.weight"].shape == (16, 32)
    assert names["layers.1.attention.query_norm.weight"].shape == (8,)
    # Without positions a causal layer sees a set: in a model of one, the order of the past is lost.
    model = _apart(GPT2(replace(STANDARD, positions="none", layers=1)))
    tokens = _tokens()
    mixed = torch.cat([tokens[:, :-1].flip(1), tokens[:, -1:]], dim=1)
    assert torch.allclose(model(mixed)[:, -1], model(tokens)[:, -1], atol=1e-4)
    for positions in ("rotary", "learned"):
        model = _apart(GPT2(replace(STANDARD, positions=positions, layers=1)))
        assert not torch.allclose(model(mixed)[:, -1], model(tokens)[:, -1], atol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("factor", [{}, ALL], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_whole_model_is_one_graph(
    factor: dict[str, Any], packed: bool, implementation: Implementation
) -> None:
    model = GPT2(replace(STANDARD, **factor), implementation=implementation)
    documents = torch.tensor([[0] * 4 + [1] * 7, [3] * 10 + [5]]) if packed else None
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(_tokens(), documents)
    assert_same_bits(compiled(_tokens(), documents), expected, "logits")


def test_the_first_weights_are_as_wide_as_the_shape_says() -> None:
    wide, standard = (GPT2(replace(STANDARD, tied=False, std=std), seed=3) for std in (0.08, 0.02))
    for (name, mine), theirs in zip(wide.named_parameters(), standard.parameters(), strict=True):
        factor = 4.0 if mine.dim() == 2 else 1.0
        assert torch.allclose(mine, factor * theirs, rtol=1e-6), name
    for std in (0.0, float("nan")):
        with pytest.raises(InvalidArgument, match="std"):
            replace(STANDARD, std=std)


@each_factor
def test_decoding_over_pages_is_the_whole_model(factor: dict[str, Any]) -> None:
    model = _apart(GPT2(replace(STANDARD, context=48, **factor))).double().eval()
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [30]]
    caches = decoding.caches(model, pages=60, page_size=4)
    found = generate(decoding.step(model), caches, prompts, new_tokens=20)
    for prompt, mine in zip(prompts, found, strict=True):
        alone: list[int] = []
        with torch.no_grad():
            while len(alone) < 20:
                alone.append(int(model(torch.tensor([prompt + alone]))[0, -1].argmax()))
        assert mine == alone
    assert len({token for each in found for token in each}) > 2


@each_factor
def test_files_keep_every_bit_and_are_not_called_a_gpt2(
    factor: dict[str, Any], tmp_path: Path
) -> None:
    model = _apart(GPT2(replace(STANDARD, **factor)))
    model.save(tmp_path)
    again = load(tmp_path, implementation="plain")
    assert again.shape == model.shape
    for name, tensor in model.state_dict().items():
        assert_same_bits(again.state_dict()[name], tensor, name)
    config = json.loads((tmp_path / "config.json").read_text())
    if factor == {"tied": False}:  # which Hugging Face's GPT-2 has too
        assert (config["model_type"], config["tie_word_embeddings"]) == ("gpt2", False)
    else:
        assert (config["model_type"], config["architectures"]) == ("tilewise-gpt2", [])
    GPT2(STANDARD).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    assert not config.keys() & ALL.keys()
    assert config["tie_word_embeddings"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_documents_are_what_each_is_alone(
    positions: Any, implementation: Implementation, checkpointing: bool
) -> None:
    """Logits and gradients of two rows with documents of lengths 4, 1, 6 and 8, 3."""
    shape, lengths = replace(STANDARD, positions=positions), [(4, 1, 6), (8, 3)]
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    tokens, documents = _tokens(), torch.stack(numbers) + 7

    def packed(model: GPT2) -> Tensor:
        return model(tokens, documents)

    def alone(model: GPT2) -> Tensor:
        rows = zip(tokens, lengths, strict=True)
        parts = [[model(each[None])[0] for each in row.split(each)] for row, each in rows]
        return torch.stack([torch.cat(row) for row in parts])

    def results(run: Any, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
        model = _apart(GPT2(shape, **options)).to(dtype)
        logits = run(model)
        functional.cross_entropy(logits.flatten(0, 1), tokens.roll(3).flatten()).backward()
        found = {name: each.grad for name, each in model.named_parameters()}
        return {"logits": logits.detach(), **found}

    options: dict[str, Any] = {"implementation": implementation, "checkpointing": checkpointing}
    actual, plain = results(packed, **options), results(alone, implementation="plain")
    oracle = results(alone, torch.float64, implementation="plain")
    for name, each in actual.items():
        assert_exact(each, plain[name], oracle[name], name)


def test_a_pattern_is_asked_for_the_length_of_the_call() -> None:
    asked: list[int] = []

    def pattern(length: int) -> masks.Mask:
        asked.append(length)
        return masks.window(1, 0)

    model = GPT2(STANDARD, pattern=pattern)
    expected = GPT2(STANDARD, mask=masks.window(1, 0))
    assert torch.allclose(model(_tokens()), expected(_tokens()), atol=1e-6)
    assert torch.allclose(model(_tokens()[:, :3]), expected(_tokens()[:, :3]), atol=1e-6)
    assert asked == [11, 3]
    with pytest.raises(Unsupported, match="a pattern of blocks"):
        decoding.step(model.eval())
