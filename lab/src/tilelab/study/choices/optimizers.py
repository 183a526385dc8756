"""Optimizers: how weights follow gradients. All of them decay weights decoupled from the gradient.

Every one is a ``torch.optim.Optimizer``; ``build`` makes it, ``set_lr`` sets the rate of a step,
``training_mode`` and ``evaluation_mode`` switch those that evaluate an average of their weights. To
go on later with the same bits, save ``state_dict()`` and the weights in training mode.

In the rules ``g`` is the gradient, ``p`` the weight, ``eta`` the learning rate and ``lambda`` the
weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from tilelab.models.layers import Unembedding, products
from tilelab.study.ask.values import ADDED, NotNegative, Positive, Share, find, register
from tilewise.errors import InvalidArgument

if TYPE_CHECKING:  # config imports this module, through values
    from tilelab.study.ask.config import Optimizer

# Those that work on parts of weights (``--strategy fsdp``). Adafactor keeps a matrix's rows and
# columns, which are no parts of the matrix. Muon multiplies whole matrices; schedule-free moves
# weights in place outside of a step.
SHARDED = ("adamw", "lion", "sgd")


# The rate of embeddings and of a head over tokens, over the one that they would have else.
EmbeddingShare = Annotated[Positive, ADDED]
# The rate of a layer over that of the layer after it.
LayerDecay = Annotated[float, Field(gt=0, le=1), ADDED]


class Group(NamedTuple):
    """Parameters that are treated alike."""

    name: str
    parameters: Mapping[str, nn.Parameter]  # by name
    decays: bool
    embeds: bool = False  # embeddings and a head over tokens alone
    above: int = 0  # layers between it and the head: its rate is lr * layer_lr_decay^above


def parameter_groups(model: nn.Module, apart: bool = False, by_layer: bool = False) -> list[Group]:
    """Return the parameters of a model in two groups, in three with embeddings ``apart``.

    ``decay``: weights of two dimensions or more that are multiplied with activations.
    ``no-decay``: biases, norms, and embeddings, whose rows are looked up; a head over tokens too,
    whether it is that embedding or a matrix of its own. With ``apart`` these two are a group of
    their own, ``embedding``. A parameter without gradient is in none, and a group without
    parameters is left out.

    With ``by_layer`` each is cut by the layer of its parameters and named after it: ``decay.3`` is
    of the third of ``model.layers``. Layer 0 is what a model has before its layers. What comes
    after the last one, such as a head, counts as part of it.

    Raises:
        InvalidArgument: ``by_layer`` of a model without ``layers``.
    """
    tables = (each for each in model.modules() if isinstance(each, nn.Embedding | Unembedding))
    embeddings = {id(each.weight) for each in tables}
    decayed, kept, embedded = (dict[str, nn.Parameter]() for _ in range(3))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings:
            (embedded if apart else kept)[name] = parameter
        else:
            (decayed if parameter.dim() >= 2 else kept)[name] = parameter
    groups = [Group("decay", decayed, True), Group("no-decay", kept, False)]
    groups.append(Group("embedding", embedded, False, embeds=True))
    if by_layer:
        groups = [part for each in groups for part in _by_layer(each, _layers(model))]
    return [each for each in groups if each.parameters]


def _layers(model: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter by its name, 1 for the first; see ``parameter_groups``."""
    count = len(getattr(model, "layers", ()))
    if not count:
        came = f"a {type(model).__name__} without layers"
        required = "a model with layers, or 1"
        raise InvalidArgument("optimizer.layer_lr_decay", came, required)
    found, here = {}, 0
    for name, _ in model.named_parameters():  # in the order in which a model has them
        part, _, inside = name.partition(".")
        if part == "layers":
            here = 1 + int(inside.partition(".")[0])
        elif here:
            here = count
        found[name] = here
    return found


def _by_layer(group: Group, layers: Mapping[str, int]) -> list[Group]:
    last = max(layers.values())
    parts: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in group.parameters.items():
        parts.setdefault(layers[name], {})[name] = parameter
    return [
        group._replace(name=f"{group.name}.{layer}", parameters=each, above=last - layer)
        for layer, each in sorted(parts.items())
    ]


class Built(NamedTuple):
    """An optimizer, and the names of the parameters in each of its groups."""

    optimizer: torch.optim.Optimizer
    groups: dict[str, list[str]]


def build(optimizer: Optimizer, model: nn.Module) -> Built:
    """Return the optimizer of a model, in training mode, at the full learning rate."""
    groups = parameter_groups(
        model,
        apart=optimizer.options.get("embedding_lr_share", 1.0) != 1.0,
        by_layer=optimizer.options.get("layer_lr_decay", 1.0) != 1.0,
    )
    made = find("optimizer", optimizer.name).function(groups, **optimizer.options)
    assert isinstance(made, torch.optim.Optimizer)
    for group in made.param_groups:
        group["initial_lr"] = group["lr"]
    training_mode(made)
    return Built(made, {each.name: list(each.parameters) for each in groups})


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group that share of its own full learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def training_mode(optimizer: torch.optim.Optimizer) -> None:
    """Before steps: the weights are those that gradients are taken at, to the bit."""
    if hasattr(optimizer, "train"):
        optimizer.train()


def evaluation_mode(optimizer: torch.optim.Optimizer) -> None:
    """Before an evaluation: the weights are those that count. ``training_mode`` goes back."""
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether evaluations see an average, which takes more than the weights to find."""
    return hasattr(optimizer, "eval")


@register("optimizer")
def adamw(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.003,
    weight_decay: NotNegative = 0.1,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
    embedding_lr_share: EmbeddingShare = 1.0,
    layer_lr_decay: LayerDecay = 1.0,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay.

    Embeddings, and a head over tokens, train at ``embedding_lr_share * lr``. Layer l of L
    trains at ``layer_lr_decay^(L - l)`` of that, embeddings as layer 0 and a head in full.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
    """
    rates = _for_torch(groups, lr, weight_decay, embedding_lr_share, layer_lr_decay)
    return _torch_adamw(rates, betas, eps)


@register("optimizer")
def lion(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.001,
    weight_decay: NotNegative = 0.3,
    betas: tuple[Share, Share] = (0.9, 0.99),
    embedding_lr_share: EmbeddingShare = 1.0,
    layer_lr_decay: LayerDecay = 1.0,
) -> torch.optim.Optimizer:
    """The sign of a momentum: every weight moves by the learning rate.

    Wants a smaller rate and more decay than AdamW, some 3 to 10 times each. Embeddings, and a head
    over tokens, train at ``embedding_lr_share * lr``. ``layer_lr_decay`` is as in ``adamw``.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
    """
    rates = _for_torch(groups, lr, weight_decay, embedding_lr_share, layer_lr_decay)
    return Lion(rates, betas=betas)


@register("optimizer")
def muon(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.003,
    weight_decay: NotNegative = 0.1,
    momentum: Share = 0.95,
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    adamw_lr_share: Positive = 1.0,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
    embedding_lr_share: EmbeddingShare = 1.0,
) -> torch.optim.Optimizer:
    """Orthogonalised momentum for hidden matrices, and AdamW for all other weights.

    The matrices are the decaying weights of two dimensions. The rest trains at
    ``adamw_lr_share * lr``, and the embeddings among it, with a head over tokens, at
    ``embedding_lr_share`` times that. With ``adjust="match_rms_adamw"`` a matrix [A, B] moves by
    0.2 sqrt(max(A, B)) lr times an orthogonal matrix. That has the root mean square of a step of
    AdamW, so one rate serves both. With ``"original"`` it moves by sqrt(max(1, A / B)) lr.

    Sources: Jordan et al., Muon (2024); the adjustment: Liu et al., Muon is Scalable (2025), eq. 4.
    """
    matrices = _for_torch([each for each in groups if each.decays], lr, weight_decay)
    hidden = torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn=adjust)
    others = [each for each in groups if not each.decays]
    rest = _for_torch(others, lr * adamw_lr_share, weight_decay, embedding_lr_share)
    return MuonAdamW(hidden, _torch_adamw(rest, betas, eps) if rest else None)


@register("optimizer")
def adafactor(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.03,
    weight_decay: NotNegative = 0.1,
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8,
    clip: Annotated[float, Field(ge=1)] = 1.0,
) -> torch.optim.Optimizer:
    """Second moments as rows and columns, so that the state is small; steps relative to weights.

    A step is min(lr, 1 / sqrt(t)) times the root mean square of the weight (at least 1e-3) times
    an update clipped to a root mean square of ``clip``. No first moment.

    Source: Shazeer and Stern, Adafactor (2018), algorithms 4 and 5.
    """
    torch_groups = _for_torch(groups, lr, weight_decay)
    return torch.optim.Adafactor(torch_groups, beta2_decay=beta2_decay, d=clip)


@register("optimizer")
def sgd(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.3,
    weight_decay: NotNegative = 0.001,
    momentum: Share = 0.9,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum, and decay that does not pass through it.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 1.
    """
    return Sgd(_for_torch(groups, lr, weight_decay), momentum=momentum, nesterov=nesterov)


@register("optimizer")
def schedule_free(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.003,
    weight_decay: NotNegative = 0.1,
    betas: tuple[Share, Share] = (0.95, 0.95),
    eps: Positive = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW whose average of weights takes the place of a schedule; use it with ``constant``.

    Source: Defazio et al., The Road Less Scheduled (2024), algorithm 1.
    """
    # Imported by the runs that use it alone: it takes time.
    from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

    class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
        """Schedule-free AdamW: trains at y, and is evaluated at the average x.

        The package goes from y to x and back by interpolation, which rounds. Here ``train`` after
        ``eval`` puts back the very bits of y, so that how often a run is evaluated does not matter.
        """

        _kept: list[list[Tensor]] | None = None

        def eval(self) -> None:
            """Put the average x into the weights."""
            if self.param_groups[0]["train_mode"]:
                self._kept = [
                    [each.detach().clone() for each in g["params"]] for g in self.param_groups
                ]
            super().eval()

        def train(self) -> None:
            """Put y, where gradients are taken, into the weights."""
            super().train()
            if self._kept is not None:
                for group, kept in zip(self.param_groups, self._kept, strict=True):
                    for parameter, bits in zip(group["params"], kept, strict=True):
                        parameter.detach().copy_(bits)
                self._kept = None

    made: torch.optim.Optimizer
    made = ScheduleFree(_for_torch(groups, lr, weight_decay), betas=betas, eps=eps)
    return made


def _for_torch(
    groups: Sequence[Group],
    lr: float,
    weight_decay: float,
    embedding_lr_share: float = 1.0,
    layer_lr_decay: float = 1.0,
) -> list[dict[str, Any]]:
    return [
        {
            "params": list(each.parameters.values()),
            "lr": lr * (embedding_lr_share if each.embeds else 1.0) * layer_lr_decay**each.above,
            "weight_decay": weight_decay if each.decays else 0.0,
        }
        for each in groups
    ]


def _torch_adamw(
    groups: Sequence[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """One pass over the weights: torch's default makes one for every operation of the rule."""
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)


class _Momentum(torch.optim.Optimizer):
    """p <- p (1 - eta lambda) - eta u, where ``update`` makes u of the momentum and gradient."""

    def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
        super().__init__([dict(each) for each in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not taken."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = self.update(group, state["momentum"], parameter.grad)
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])

    def update(self, group: dict[str, Any], momentum: Tensor, gradient: Tensor) -> Tensor:
        """Return u, and change the momentum to the next one."""
        raise NotImplementedError


class Lion(_Momentum):
    """Sign of an interpolated momentum: u = sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
    """

    def update(self, group: dict[str, Any], momentum: Tensor, gradient: Tensor) -> Tensor:
        """See above."""
        first, second = group["betas"]
        found = momentum.mul(first).add_(gradient, alpha=1.0 - first).sign_()
        momentum.mul_(second).add_(gradient, alpha=1.0 - second)
        return found


class Sgd(_Momentum):
    """Momentum, with decay beside it: m <- mu m + g;  u = m, with Nesterov u = g + mu m.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 1.
    """

    def update(self, group: dict[str, Any], momentum: Tensor, gradient: Tensor) -> Tensor:
        """See above."""
        momentum.mul_(group["momentum"]).add_(gradient)
        nesterov = group["nesterov"]
        return gradient.add(momentum, alpha=group["momentum"]) if nesterov else momentum


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for some groups and its AdamW for the others, as one optimizer.

    Both rules work on this optimizer's own groups and state, so that there is one list of groups
    and one ``state_dict``.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None) -> None:
        self._rules: list[torch.optim.Optimizer] = [muon, *([adamw] if adamw else [])]
        super().__init__([group for rule in self._rules for group in rule.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not taken."""
        assert closure is None
        device = self.param_groups[0]["params"][0].device
        first = 0
        with products(device, torch.bfloat16):
            for rule in self._rules:
                # Loading a state replaces groups and state, so the rules get them anew every time.
                last = first + len(rule.param_groups)
                rule.param_groups, rule.state = self.param_groups[first:last], self.state
                rule.step()
                first = last
