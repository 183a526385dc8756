"""Comparing a module of tilewise.nn with torch's: outputs, weights and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract import assert_exact

Found = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, float64."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def spread(module: nn.Module) -> None:
    """Give every parameter values that show where it went: biases begin at 0, norms at 1."""
    for index, parameter in enumerate(module.parameters()):
        noise = drawn(*parameter.shape, seed=index).to(parameter.dtype)
        with torch.no_grad():
            parameter.add_(0.3 * noise)


def outcome(
    module: nn.Module, inputs: dict[str, Tensor | None], dtype: torch.dtype, **call: Any
) -> Found:
    """What a call returns, and the gradients of a weighted sum of it, by name.

    Floating inputs are leaves; inputs that are one tensor stay one.
    """
    module = copy.deepcopy(module).to(dtype)
    leaves: dict[int, Tensor] = {}
    for x in inputs.values():
        if x is not None and x.is_floating_point() and id(x) not in leaves:
            leaves[id(x)] = x.detach().to(dtype).requires_grad_()
    given = {name: leaves.get(id(x), x) for name, x in inputs.items()}
    returned = module(**given, **call)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs = tuple(out for out in outputs if out is not None)
    total = sum((out * drawn(*out.shape, seed=9).to(dtype)).sum() for out in outputs)
    assert isinstance(total, Tensor)
    total.backward()
    found = {f"output {index}": out.detach() for index, out in enumerate(outputs)}
    for name, x in inputs.items():
        leaf = leaves.get(id(x))
        if leaf is not None and leaf.grad is not None:
            found[f"gradient of {name}"] = leaf.grad
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[f"gradient of {name}"] = parameter.grad
    return found


def assert_like_torch(
    ours: Callable[[torch.dtype], Found], torchs: Callable[[torch.dtype], Found]
) -> None:
    """The exactness contract in float32, with torch's float64 as the truth; and float64 alike."""
    truth = torchs(torch.float64)
    got, plain = ours(torch.float32), torchs(torch.float32)
    assert got.keys() == truth.keys() == plain.keys()
    for name, exact in truth.items():
        assert_exact(got[name], plain[name], exact, name)
    got = ours(torch.float64)
    assert got.keys() == truth.keys()
    for name, exact in truth.items():
        error = (got[name] - exact).abs().max().item()
        assert error <= 1e-12 * (1.0 + exact.abs().max().item()), f"{name} is off by {error}"
