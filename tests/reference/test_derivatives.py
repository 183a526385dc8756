"""Tangents and second derivatives of the case table, judged by the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cases import FLOATS, TABLE, Case
from tests.derivatives import check, seconds, tangents
from tests.peak import only_linux, printed

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
