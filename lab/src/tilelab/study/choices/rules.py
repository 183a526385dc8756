"""Update rules that torch has not: Lion, SGD with decoupled decay, and Muon beside AdamW.

``g`` is the gradient, ``p`` the weight, ``eta`` the learning rate, ``lambda`` the weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Lion", "MuonAdamW", "Sgd"]

TorchGroup = Mapping[str, Any]


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum.

    p <- p (1 - eta lambda) - eta sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g.

    Args:
        groups: torch's parameter groups, each with its ``lr`` and ``weight_decay``.
        betas: b1 and b2.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
    """

    def __init__(self, groups: Sequence[TorchGroup], betas: tuple[float, float]) -> None:
        super().__init__([dict(each) for each in groups], {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not taken."""
        assert closure is None
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter, gradient in _with_gradient(group):
                momentum = _buffer(self.state[parameter], parameter)
                update = momentum.mul(first).add_(gradient, alpha=1.0 - first).sign_()
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(gradient, alpha=1.0 - second)


class Sgd(torch.optim.Optimizer):
    """Momentum, with decay that does not pass through it.

    m <- mu m + g;  p <- p (1 - eta lambda) - eta m, or with Nesterov - eta (g + mu m).

    Args:
        groups: torch's parameter groups, each with its ``lr`` and ``weight_decay``.
        momentum: mu.
        nesterov: look ahead.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 1.
    """

    def __init__(self, groups: Sequence[TorchGroup], momentum: float, nesterov: bool) -> None:
        defaults = {"momentum": momentum, "nesterov": nesterov}
        super().__init__([dict(each) for each in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not taken."""
        assert closure is None
        for group in self.param_groups:
            mu = group["momentum"]
            for parameter, gradient in _with_gradient(group):
                momentum = _buffer(self.state[parameter], parameter).mul_(mu).add_(gradient)
                update = gradient.add(momentum, alpha=mu) if group["nesterov"] else momentum
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"])


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for some groups and its AdamW for the others, as one optimizer.

    Both rules work on this optimizer's own groups and state, so that there is one list of groups
    and one ``state_dict``.

    Args:
        muon: made for its parameters, two-dimensional ones.
        adamw: made for all others; None where there are none.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None) -> None:
        self._rules: list[torch.optim.Optimizer] = [muon, *([adamw] if adamw else [])]
        super().__init__([group for rule in self._rules for group in rule.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; ``closure`` is not taken."""
        assert closure is None
        first = 0
        for rule in self._rules:
            # Loading a state replaces groups and state, so the rules get them anew every time.
            last = first + len(rule.param_groups)
            rule.param_groups, rule.state = self.param_groups[first:last], self.state
            rule.step()
            first = last


def _with_gradient(group: TorchGroup) -> list[tuple[nn.Parameter, Tensor]]:
    return [(each, each.grad) for each in group["params"] if each.grad is not None]


def _buffer(state: dict[str, Tensor], parameter: nn.Parameter) -> Tensor:
    if "momentum" not in state:
        state["momentum"] = torch.zeros_like(parameter)
    return state["momentum"]
