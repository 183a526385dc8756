"""Optimizers: how weights follow gradients. All of them decay weights decoupled from the gradient.

Every one is a ``torch.optim.Optimizer``; ``build`` makes it, ``set_lr`` sets the rate of a step,
``training_mode`` and ``evaluation_mode`` switch those that evaluate an average of their weights. To
go on later with the same bits, save ``state_dict()`` and the weights in training mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import nn

from tilelab.study.ask.registry import NotNegative, Positive, Share, find, register
from tilelab.study.choices.groups import Group, parameter_groups
from tilelab.study.choices.rules import Lion, MuonAdamW, Sgd

if TYPE_CHECKING:  # config imports this module, through the registry
    from tilelab.study.ask.config import Optimizer

__all__ = [
    "Built",
    "adafactor",
    "adamw",
    "build",
    "evaluation_mode",
    "lion",
    "muon",
    "schedule_free",
    "set_lr",
    "sgd",
    "training_mode",
]


class Built(NamedTuple):
    """An optimizer, and the names of the parameters in each of its groups."""

    optimizer: torch.optim.Optimizer
    groups: dict[str, list[str]]


def build(optimizer: Optimizer, model: nn.Module) -> Built:
    """Return the optimizer of a model, in training mode, at the full learning rate.

    Args:
        optimizer: which, with its options.
        model: whose parameters it changes.
    """
    groups = parameter_groups(model)
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


@register("optimizer")
def adamw(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.003,
    weight_decay: NotNegative = 0.1,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
    """
    return _torch_adamw([each.for_torch(lr, weight_decay) for each in groups], betas, eps)


@register("optimizer")
def lion(
    groups: Sequence[Group],
    *,
    lr: Positive = 0.001,
    weight_decay: NotNegative = 0.3,
    betas: tuple[Share, Share] = (0.9, 0.99),
) -> torch.optim.Optimizer:
    """The sign of a momentum: every weight moves by the learning rate.

    Wants a smaller rate and more decay than AdamW, some 3 to 10 times each.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
    """
    return Lion([each.for_torch(lr, weight_decay) for each in groups], betas)


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
) -> torch.optim.Optimizer:
    """Orthogonalised momentum for hidden matrices, and AdamW for all other weights.

    The matrices are the decaying weights of two dimensions; the rest trains at
    ``adamw_lr_share * lr``. With ``adjust="match_rms_adamw"`` a matrix [A, B] moves by 0.2
    sqrt(max(A, B)) lr times an orthogonal matrix. That has the root mean square of a step of AdamW,
    so one rate serves both. With ``"original"`` it moves by sqrt(max(1, A / B)) lr.

    Sources: Jordan et al., Muon (2024); the adjustment: Liu et al., Muon is Scalable (2025), eq. 4.
    """
    matrices = [each for each in groups if each.decays]
    others = [each for each in groups if not each.decays]
    hidden = torch.optim.Muon(
        [each.for_torch(lr, weight_decay) for each in matrices],
        momentum=momentum,
        adjust_lr_fn=adjust,
    )
    rest = [each.for_torch(lr * adamw_lr_share, weight_decay) for each in others]
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
    torch_groups = [each.for_torch(lr, weight_decay) for each in groups]
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
    return Sgd([each.for_torch(lr, weight_decay) for each in groups], momentum, nesterov)


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
    from tilelab.study.choices.averaging import ScheduleFree

    torch_groups = [each.for_torch(lr, weight_decay) for each in groups]
    made: torch.optim.Optimizer = ScheduleFree(torch_groups, betas=betas, eps=eps)
    return made


def _torch_adamw(
    groups: Sequence[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """One pass over the weights: torch's default makes one for every operation of the rule."""
    return torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
