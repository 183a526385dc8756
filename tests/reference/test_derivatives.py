"""Runs tangents and second derivatives of a case three ways, as ``oracle.py`` runs gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.cases import FLOATS, TABLE, Case, Inputs, build
from tests.contract import assert_exact
from tests.oracle import call, problem_of
from tests.peak import only_linux, printed
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


# ---- Tangents and second derivatives of the case table, judged by the contract.


# torch's own, when forward mode first runs.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

# How often a pair of a case and a dtype runs quickly: each case in one dtype at least, and one case
# in three where it takes longer.
QUICK_EVERY = 4


def _cases(every: int = QUICK_EVERY) -> list[Any]:
    found = []
    for index, case in enumerate(TABLE):
        for offset, dtype in enumerate(FLOATS):
            quick = (index + offset) % every == 0
            marks = () if quick else (pytest.mark.slow,)
            found.append(pytest.param(case.of(dtype), marks=marks, id=str(case.of(dtype))))
    return found


@pytest.mark.parametrize("case", _cases())
def test_forward_mode(case: Case) -> None:
    """The tangents of out and lse, where every operand moves."""
    # torch gives no tangent to a tensor whose elements share memory.
    layout = "contiguous" if case.layout == "expanded" else case.layout
    check(tangents, replace(case, layout=layout), "tiled")


@pytest.mark.parametrize("case", _cases(3 * QUICK_EVERY))
def test_double_backward(case: Case) -> None:
    """The gradients of a combination of all gradients, by every leaf and both cotangents."""
    if case.sequences == ():
        pytest.skip("the plain implementation of no sequence at all depends on nothing")
    check(seconds, case, "tiled")


# Peak resident memory of a tangent and of a double backward beyond what was there, in MiB.
_MEMORY = """
import sys
import torch
import tilewise
from tests.peak import Peak
from torch.autograd import forward_ad

torch.set_num_threads(1)

def attend(*qkv):
    return tilewise.attention(*qkv, mask=tilewise.masks.causal(), backend="tiled")

def tangent(qkv, toward):
    with forward_ad.dual_level(), torch.no_grad():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(qkv, toward)]
        forward_ad.unpack_dual(attend(*duals)).tangent.sum()

def second(qkv, toward):
    grads = torch.autograd.grad(attend(*qkv).square().sum(), qkv, create_graph=True)
    torch.autograd.grad(grads, qkv, toward)

def measure(call, n):
    qkv = [torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3)]
    toward = [torch.randn(1, 1, n, 32) for _ in range(3)]
    peak = Peak()
    call(qkv, toward)
    return peak.mib()

for call in (tangent, second):
    measure(call, 300)  # pools and libraries are not the call's
    print(*[measure(call, n) for n in map(int, sys.argv[1:])])
"""


@pytest.mark.slow
@only_linux
def test_memory_is_linear() -> None:
    """A byte for each pair, a quarter of one float32 matrix, is never reached."""
    for line in printed(_MEMORY, 1024, 4096):
        small, large = map(float, line)
        assert large < 4096 * 4096 / 2**20, f"{large:.1f} MiB at N = 4096"
        assert large < 1.3 * 4 * small + 6, f"{small:.1f} MiB grew to {large:.1f} MiB"
