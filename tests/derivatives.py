"""Runs tangents and second derivatives of a case three ways, as ``oracle.py`` runs gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.cases import Case
from tests.contract import assert_exact
from tests.inputs import Inputs, build
from tests.oracle import call, problem_of
from tilelab.cases.dense import dense

# out and lse of inputs.
Attend = Callable[[Inputs], tuple[Tensor, Tensor]]


class Directions(NamedTuple):
    """Random tangents of the leaves, by name, and cotangents of out and lse."""

    tangents: dict[str, Tensor]
    grad_out: Tensor
    grad_lse: Tensor


def public(backend: str | None) -> Attend:
    """The public API on a backend."""

    def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = call(inputs, backend, return_lse=True)
        return out, lse

    return attend


def plain(dtype: torch.dtype) -> Attend:
    """The plain mathematics with every matrix in ``dtype``."""

    def attend(inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = dense(*problem_of(inputs), dtype=dtype)
        return out, lse

    return attend


def directions(inputs: Inputs, case: Case) -> Directions:
    """Random ones, always the same for a case."""
    generator = torch.Generator().manual_seed(11)

    def like(tensor: Tensor) -> Tensor:
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return values.to(tensor.dtype)

    with torch.no_grad():
        out, lse = plain(torch.float64)(inputs)
    tangents = {name: like(leaf) for name, leaf in inputs.leaves.items()}
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    return Directions(tangents, like(out).to(case.dtype), like(lse).to(wide))


def _dual(inputs: Inputs, toward: Directions) -> Inputs:
    """The inputs with their tangents; to be called in a forward-mode level."""
    return inputs.replaced(
        {
            name: forward_ad.make_dual(leaf.detach(), toward.tangents[name].to(leaf.dtype))
            for name, leaf in inputs.leaves.items()
        }
    )


def tangents(attend: Attend, inputs: Inputs, toward: Directions) -> dict[str, Tensor]:
    """The tangents of out and lse by forward mode."""
    found = {}
    with forward_ad.dual_level():
        moved = attend(_dual(inputs, toward))
        for name, dual in zip(("out", "lse"), moved, strict=True):
            primal, tangent = forward_ad.unpack_dual(dual)
            found[name] = torch.zeros_like(primal) if tangent is None else tangent.clone()
    return found


def seconds(attend: Attend, inputs: Inputs, toward: Directions) -> dict[str, Tensor]:
    """What a double backward gives for the leaves and for the cotangents, by name."""
    out, lse = attend(inputs)
    cotangents = [
        toward.grad_out.to(out.dtype).requires_grad_(),
        toward.grad_lse.to(lse.dtype).requires_grad_(),
    ]
    leaves = inputs.leaves
    grads = torch.autograd.grad([out, lse], [*leaves.values()], cotangents, create_graph=True)
    weights = [toward.tangents[name].to(leaf.dtype) for name, leaf in leaves.items()]
    wanted = dict(zip((*leaves, "out", "lse"), (*leaves.values(), *cotangents), strict=True))
    found = torch.autograd.grad(grads, [*wanted.values()], weights, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(wanted.items(), found, strict=True)
    }


Derivative = Callable[[Attend, Inputs, Directions], dict[str, Tensor]]


def check(derivative: Derivative, case: Case, backend: str | None) -> None:
    """Assert the contract for everything that a derivative of a case gives."""
    inputs = build(case)
    toward = directions(inputs, case)
    actual = derivative(public(backend), inputs, toward)
    if case.dtype == torch.float64:
        truth = derivative(plain(torch.float64), inputs, toward)
        for name, value in actual.items():
            torch.testing.assert_close(value, truth[name], rtol=1e-9, atol=1e-11, msg=name)
        return
    naive = derivative(plain(case.dtype), inputs, toward)
    truth = derivative(plain(torch.float64), inputs.convert(lambda x: x.double()), toward)
    for name, value in actual.items():
        assert_exact(value, naive[name].to(value.dtype), truth[name], f"{case}: {name}")
