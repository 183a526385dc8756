"""Optimizers: their rules against arithmetic by hand, their groups, and going on to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilelab.models import layers
from tilelab.models.bert import BERT, Head, Shape
from tilelab.study.ask.config import Optimizer
from tilelab.study.ask.values import names
from tilelab.study.choices import optimizers
from tilelab.study.choices.optimizers import parameter_groups
from tilewise.errors import InvalidArgument

NAMES = names("optimizer")
TOKENS = torch.arange(12) % 7
TARGETS = (TOKENS * 3 + 1) % 7
LR, DECAY = 0.02, 0.5


class Small(nn.Module):
    """An embedding, two layers, a norm and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.wide = nn.Linear(8, 24)
        self.narrow = nn.Linear(24, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        x = self.norm(x + self.narrow(self.wide(x).relu()))
        return x @ self.embedding.weight.T


def built(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = Optimizer.model_validate({"name": name, **options})
    return optimizers.build(optimizer, model).optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> float:
    """Steps with a learning rate of their own each; the loss of the last."""
    loss = torch.tensor(math.nan)
    for step in range(first, first + steps):
        optimizers.set_lr(optimizer, 1.0 / (1 + step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(TOKENS), TARGETS)
        loss.backward()
        optimizer.step()
    return loss.item()


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def one_weight(name: str, gradients: list[float], start: float = 2.0, **options: Any) -> float:
    """A single decaying weight after steps with these gradients."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, start)
    optimizer = built(name, model, lr=LR, weight_decay=DECAY, **options)
    for gradient in gradients:
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    return float(model.weight.detach())


GRADIENTS = [0.5, -0.25, 1.5, -3.0, 0.125]


def test_adamw_by_hand() -> None:
    weight, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate(GRADIENTS, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        move = first / (1 - 0.9**step) / (math.sqrt(second / (1 - 0.95**step)) + 1e-8)
        weight = weight * (1 - LR * DECAY) - LR * move
    assert one_weight("adamw", GRADIENTS) == pytest.approx(weight, rel=1e-12)


def test_lion_by_hand() -> None:
    weight, momentum = 2.0, 0.0
    for gradient in GRADIENTS:
        sign = math.copysign(1.0, 0.9 * momentum + 0.1 * gradient)
        weight = weight * (1 - LR * DECAY) - LR * sign
        momentum = 0.99 * momentum + 0.01 * gradient
    assert one_weight("lion", GRADIENTS) == pytest.approx(weight, rel=1e-12)
    assert one_weight("lion", [0.0]) == pytest.approx(2.0 * (1 - LR * DECAY), rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_by_hand(nesterov: bool) -> None:
    weight, momentum = 2.0, 0.0
    for gradient in GRADIENTS:
        momentum = 0.8 * momentum + gradient
        move = gradient + 0.8 * momentum if nesterov else momentum
        weight = weight * (1 - LR * DECAY) - LR * move
    result = one_weight("sgd", GRADIENTS, momentum=0.8, nesterov=nesterov)
    assert result == pytest.approx(weight, rel=1e-12)


def test_adafactor_by_hand_for_one_step() -> None:
    """The first update is the sign, and its length relative to the weight."""
    step = LR * 2.0  # min(lr, 1 / sqrt(1)) times the weight's root mean square
    expected = 2.0 * (1 - LR * DECAY) - step
    assert one_weight("adafactor", [0.5]) == pytest.approx(expected, rel=1e-6)


def test_muon_leaves_the_rest_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "fast_products", lambda _: True)
    ours, theirs = Small(), Small()
    optimizer = built("muon", ours, lr=LR, weight_decay=DECAY, adamw_lr_share=0.5)
    matrices = [theirs.wide.weight, theirs.narrow.weight]
    kept = {id(each) for each in matrices}
    others = [each for each in theirs.parameters() if id(each) not in kept]
    muon = torch.optim.Muon(
        matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw", momentum=0.95
    )
    # fused: torch's other forms round an update differently on some processors.
    adamw = torch.optim.AdamW(others, lr=0.5 * LR, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            nn.functional.cross_entropy(model(TOKENS), TARGETS).backward()
        optimizer.step()
        muon.step()
        adamw.step()
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (64, 64)])
def test_muon_multiplies_in_float32_where_16_bits_are_slow(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is torch's but for the order of the sums, which bfloat16's roundings enlarge."""
    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.update(each.dtype for each in args)
            return func(*args, **(kwargs or {}))

    def moved(fast: bool) -> Tensor:
        monkeypatch.setattr(layers, "fast_products", lambda _: fast)
        model = nn.Linear(shape[1], shape[0], bias=False)
        before = model.weight.detach().clone()
        model.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        optimizer = built("muon", model, lr=1.0, weight_decay=0.0, adjust="original")
        with Watch():
            optimizer.step()
        return before - model.weight.detach()

    theirs = moved(True)
    assert seen == {torch.bfloat16}
    seen.clear()
    ours = moved(False)
    assert seen == {torch.float32}
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_schedule_free_is_the_package_when_nobody_evaluates() -> None:
    ours, theirs = Small(), Small()
    optimizer = built("schedule-free", ours, lr=LR, weight_decay=0.0, betas=(0.9, 0.95))
    reference = AdamWScheduleFree(theirs.parameters(), lr=LR, betas=(0.9, 0.95))
    reference.train()
    for group in reference.param_groups:
        group["initial_lr"] = LR
    train(ours, optimizer, 4)
    train(theirs, reference, 4)
    assert same(weights(ours), weights(theirs))
    optimizers.evaluation_mode(optimizer)
    reference.eval()
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_do_not_change_a_bit_of_the_training(name: str) -> None:
    evaluated, left_alone = Small(), Small()
    first, second = built(name, evaluated), built(name, left_alone)
    for step in range(4):
        train(evaluated, first, 1, first=step)
        train(left_alone, second, 1, first=step)
        before = weights(evaluated)
        optimizers.evaluation_mode(first)
        optimizers.evaluation_mode(first)  # twice is once
        moved = not same(weights(evaluated), before)
        assert moved == (name == "schedule-free" and step > 0)
        optimizers.training_mode(first)
        optimizers.training_mode(first)
        assert same(weights(evaluated), before)
    assert same(weights(evaluated), weights(left_alone))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_learns_and_names_its_groups(name: str) -> None:
    model = Small()
    made = optimizers.build(Optimizer(name=name), model)
    assert made.groups["decay"] == ["wide.weight", "narrow.weight"]
    assert made.groups["no-decay"][0] == "embedding.weight"
    assert len(made.groups["no-decay"]) == 5
    before = train(model, made.optimizer, 1)
    assert train(model, made.optimizer, 25) < 0.97 * before


@pytest.mark.parametrize("name", NAMES)
def test_only_weights_that_decay_do(name: str) -> None:
    """Without gradients nothing moves but what decays, by lr times the decay."""
    model = Small()
    before = weights(model)
    optimizer = built(name, model, lr=LR, weight_decay=DECAY)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for (key, after), start in zip(model.named_parameters(), before, strict=True):
        kept = 1 - LR * DECAY if key in ("wide.weight", "narrow.weight") else 1.0
        assert torch.allclose(after, start * kept, rtol=1e-6, atol=0.0), key


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_of_every_group_is_a_share_of_its_own(name: str) -> None:
    options = {"adamw_lr_share": 0.25} if name == "muon" else {}
    optimizer = built(name, Small(), lr=LR, **options)
    full = [LR, LR * (0.25 if name == "muon" else 1.0)]
    assert [group["lr"] for group in optimizer.param_groups] == full
    for share in (0.5, 0.0, 1.0):
        optimizers.set_lr(optimizer, share)
        assert [group["lr"] for group in optimizer.param_groups] == [each * share for each in full]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_embeddings_have_a_rate_of_their_own(name: str) -> None:
    """A tied head is one of them."""
    model = Small()
    options = {"lr": LR, "embedding_lr_share": 3.0, "weight_decay": DECAY}
    made = optimizers.build(Optimizer.model_validate({"name": name, **options}), model)
    assert made.groups["embedding"] == ["embedding.weight"]
    assert made.groups["decay"] == ["wide.weight", "narrow.weight"]
    rates = [group["lr"] for group in made.optimizer.param_groups]
    assert rates == [LR, LR, 3 * LR]
    assert [group["weight_decay"] for group in made.optimizer.param_groups] == [DECAY, 0.0, 0.0]
    for parameter in model.parameters():  # the first step of AdamW and Lion is a sign
        parameter.grad = torch.ones_like(parameter)
    before = model.embedding.weight.detach().clone(), model.norm.weight.detach().clone()
    made.optimizer.step()
    moved = before[0] - model.embedding.weight, before[1] - model.norm.weight
    assert moved[0].detach().mean().item() == pytest.approx(3 * LR, rel=1e-4)
    assert moved[1].detach().mean().item() == pytest.approx(rates[1], rel=1e-4)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_layers_train_slower_the_deeper_they_are(name: str) -> None:
    """Layer l of L has lr * decay^(L - l): 0 are the embeddings, and a head trains in full."""
    model = BERT(Shape(layers=3, heads=1, width=4, vocabulary=11), head=Head("classes"))
    options = {"lr": LR, "layer_lr_decay": 0.5, "weight_decay": DECAY}
    made = optimizers.build(Optimizer.model_validate({"name": name, **options}), model)
    names = {id(each): key for key, each in model.named_parameters()}
    groups = made.optimizer.param_groups
    rates = {names[id(each)]: group["lr"] for group in groups for each in group["params"]}
    assert rates.keys() == set(names.values())
    share = {"layers.2": 1, "layers.1": 1 / 2, "layers.0": 1 / 4, "pooler": 1, "classifier": 1}
    for key, rate in rates.items():
        part = key if key.startswith("layers") else f"{key.partition('.')[0]}."
        expected = next((each for start, each in share.items() if part.startswith(start)), 1 / 8)
        assert rate == pytest.approx(LR * expected), key
    decays = {
        names[id(each)]: group["weight_decay"] for group in groups for each in group["params"]
    }
    assert {key for key, decay in decays.items() if decay} == set(
        optimizers.parameter_groups(model)[0].parameters
    )
    assert made.groups["decay.2"][0] == "layers.1.attention.query.weight"
    assert {"norm.weight", "tokens.weight"} < set(made.groups["no-decay.0"])
    with pytest.raises(InvalidArgument, match=r"layer_lr_decay: got a Small without layers"):
        optimizers.build(Optimizer.model_validate({"name": name, **options}), Small())


class Tied(nn.Module):
    """An embedding, a layer, a norm, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_decay_and_biases_norms_and_embeddings_do_not() -> None:
    model = Tied()
    decay, rest = parameter_groups(model)
    assert (decay.name, decay.decays, list(decay.parameters)) == ("decay", True, ["layer.weight"])
    assert (rest.name, rest.decays) == ("no-decay", False)
    assert list(rest.parameters) == ["embedding.weight", "layer.bias", "norm.weight", "norm.bias"]
    assert rest.parameters["norm.bias"] is model.norm.bias
    model.head.weight = nn.Parameter(torch.zeros(7, 4))  # a head of its own decays
    decay, _ = parameter_groups(model)
    assert list(decay.parameters) == ["layer.weight", "head.weight"]


def test_every_trained_parameter_is_in_one_group_and_a_frozen_one_in_none() -> None:
    model = Tied()
    assert len(built("muon", nn.Linear(3, 3, bias=False)).param_groups) == 1
    model.layer.weight.requires_grad_(False)
    (only,) = parameter_groups(model)  # nothing is left that decays
    assert only.name == "no-decay"
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    assert {id(each) for each in only.parameters.values()} == trained


def in_parts(name: str, parts: int) -> Tensor:
    """A matrix after three steps, as so many weights of an equal share of its rows."""
    generator = torch.Generator().manual_seed(1)
    matrix, *gradients = torch.randn(4, 16, 8, generator=generator).unbind()
    models = [nn.Linear(8, 16 // parts, bias=False) for _ in range(parts)]
    for model, rows in zip(models, matrix.chunk(parts), strict=True):
        model.weight.data.copy_(rows)
    made = [built(name, model) for model in models]
    for gradient in gradients:
        for model, optimizer, rows in zip(models, made, gradient.chunk(parts), strict=True):
            model.weight.grad = rows.clone()
            optimizer.step()
    return torch.cat([model.weight.detach() for model in models])


@pytest.mark.parametrize("name", sorted({*NAMES} - {"schedule-free"}))
def test_optimizers_that_treat_each_element_alone_are_sharded(name: str) -> None:
    """Schedule-free is one of them, and moves weights outside of a step: it is left out."""
    alone = torch.allclose(in_parts(name, 1), in_parts(name, 2), rtol=1e-6, atol=0)
    assert alone == (name in optimizers.SHARDED), (
        f"{name} {'belongs' if alone else 'does not belong'} in SHARDED"
    )
