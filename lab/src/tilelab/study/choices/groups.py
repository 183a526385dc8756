"""The groups of parameters that every optimizer sees: weights that decay, and the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Group", "parameter_groups"]


class Group(NamedTuple):
    """Parameters that are treated alike.

    Args:
        name: ``"decay"`` or ``"no-decay"``.
        parameters: by their names in the model.
        decays: whether weight decay acts on them.
    """

    name: str
    parameters: Mapping[str, nn.Parameter]
    decays: bool

    def for_torch(self, lr: float, weight_decay: float, **options: Any) -> dict[str, Any]:
        """Return the group as ``torch.optim`` takes it.

        Args:
            lr: learning rate.
            weight_decay: of a group that decays; the others get 0.
            options: any further ones of the optimizer.
        """
        decay = weight_decay if self.decays else 0.0
        return {
            "params": list(self.parameters.values()),
            "lr": lr,
            "weight_decay": decay,
            **options,
        }


def parameter_groups(model: nn.Module) -> list[Group]:
    """Return the parameters of a model in two groups.

    ``decay``: weights of two dimensions or more that are multiplied with activations.
    ``no-decay``: biases, norms, and embeddings, whose rows are looked up (a head that is tied to
    an embedding is that embedding). A parameter without gradient is in none, and so is a group
    without parameters.

    Args:
        model: its parameters are not changed.
    """
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    decayed: dict[str, nn.Parameter] = {}
    kept: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            multiplied = parameter.dim() >= 2 and id(parameter) not in embeddings
            (decayed if multiplied else kept)[name] = parameter
    groups = [Group("decay", decayed, True), Group("no-decay", kept, False)]
    return [each for each in groups if each.parameters]
