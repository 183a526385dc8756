"""Groups: matrices that are multiplied decay, everything else does not."""

from __future__ import annotations

import torch
from torch import nn

from tilelab.study.choices.groups import parameter_groups


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


def test_a_head_of_its_own_decays() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(torch.zeros(7, 4))
    decay, _ = parameter_groups(model)
    assert list(decay.parameters) == ["layer.weight", "head.weight"]


def test_every_trained_parameter_is_in_one_group_and_a_frozen_one_in_none() -> None:
    model = Tied()
    model.layer.weight.requires_grad_(False)
    (only,) = parameter_groups(model)  # nothing is left that decays
    assert only.name == "no-decay"
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    assert {id(each) for each in only.parameters.values()} == trained


def test_only_a_group_that_decays_gets_the_decay() -> None:
    decay, rest = (each.for_torch(0.5, 0.1, momentum=0.9) for each in parameter_groups(Tied()))
    assert (decay["lr"], decay["weight_decay"], decay["momentum"]) == (0.5, 0.1, 0.9)
    assert (rest["lr"], rest["weight_decay"], len(rest["params"])) == (0.5, 0.0, 4)
