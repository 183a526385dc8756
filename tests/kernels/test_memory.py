"""Memory, measured: what a call needs beyond inputs and outputs grows with N, not with N x N."""

from __future__ import annotations

import itertools

import pytest

from tests.kernels.targets import TARGETS, Target
from tests.peak import only_linux, printed

# Peak resident memory beyond what was there just before the call, in MiB, for two lengths.
_SCRIPT = """
import sys
import torch
import tilewise
from tests.peak import Peak

backend, isa, lengths, rates = sys.argv[1:]
torch.set_num_threads(1)
if isa:
    from tilewise import _core
    _core.set_isa(isa)

def measure(n, dropout_p):
    q, k, v = (torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 1, n, 32)
    peak = Peak()
    out = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), dropout_p=dropout_p, seed=1,
                             backend=backend)
    forward = peak.mib()
    out.backward(grad)
    return forward, peak.mib()

for dropout_p in map(float, rates.split(",")):
    measure(300, dropout_p)  # pools and libraries are not the call's
    for n in map(int, lengths.split(",")):
        print(*measure(n, dropout_p))
"""


def _check(target: Target, lengths: tuple[int, ...], rates: str) -> None:
    """A square of bytes, the least that an N x N anything could take, is never reached."""
    words = (target.backend, target.isa, ",".join(map(str, lengths)), rates)
    measured = [[float(word) for word in line] for line in printed(_SCRIPT, *words)]
    assert len(measured) == 2 * len(rates.split(","))
    for n, (forward, both) in zip(itertools.cycle(lengths), measured, strict=False):
        square_mib = n * n / 2**20
        assert forward < square_mib / 2, f"forward took {forward:.1f} MiB at N = {n}"
        assert both < square_mib / 2, f"forward and backward took {both:.1f} MiB at N = {n}"
    for (_, small), (_, large) in zip(measured[::2], measured[1::2], strict=True):
        most = 1.3 * lengths[1] / lengths[0] * small + 6
        assert large < most, f"{small:.1f} MiB grew to {large:.1f} MiB"


pytestmark = only_linux


def test_memory_is_linear() -> None:
    """On the best target: N = 4096 and 8192, forward and backward, without dropout and with it."""
    lengths = (4096, 8192) if TARGETS[0].backend == "cpu" else (2048, 4096)
    _check(TARGETS[0], lengths, "0,0.1")


# Peak resident memory of forward and backward beyond what was there before the call, and the bytes
# of q, k, v and out, both in MiB: for each kind of call a line per length.
_KINDS = """
import sys
import torch
import tilewise
from tests.peak import Peak
from tilewise import masks

isa, threads, lengths = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")]
torch.set_num_threads(threads)
from tilewise import _core
_core.set_isa(isa)

def measure(call, q, k, v):
    for tensor in (q, k, v):
        tensor.requires_grad_()
    grad = torch.randn(*q.shape)
    peak = Peak()
    out = call(q, k, v)
    out.backward(grad)
    return peak.mib(), sum(t.numel() * t.element_size() for t in (q, k, v, out)) / 2**20

def dense(n, heads, kv_heads, mask, batch=1):
    q = torch.randn(batch, heads, n // batch, 32)
    k, v = (torch.randn(batch, kv_heads, n // batch, 32) for _ in range(2))
    return measure(lambda *qkv: tilewise.attention(*qkv, mask=mask, backend="cpu"), q, k, v)

def packed(n):
    q, k, v = (torch.randn(n, 4, 32) for _ in range(3))
    cu = torch.tensor([0, n // 2, n // 2 + 1, n * 5 // 8, n])
    def call(q, k, v):
        return tilewise.attention_varlen(q, k, v, cu, cu, mask=masks.window(300, 0), backend="cpu")
    return measure(call, q, k, v)

def documents(n):
    return masks.document(torch.arange(n) // 512) & masks.causal()

kinds = {
    "grouped": lambda n: dense(n, 8, 1, masks.window(300, 0)),
    "grouped-each": lambda n: dense(n, 8, 2, masks.window(100, 100), batch=2),
    "varlen": packed,
    "lengths": lambda n: dense(n, 4, 4, masks.lengths(torch.tensor([n // 16]))),
    "document": lambda n: dense(n, 4, 2, documents(n)),
}
for name, kind in kinds.items():
    kind(300)
    for n in lengths:
        print(name, *kind(n))
"""


def _check_kinds(isa: str, threads: int, lengths: tuple[int, int]) -> None:
    """A few times what q, k, v and out take, whatever the length: linear in N.

    Twice for one thread: gradients are most of it. Threads that share a head's keys take partial
    sums of grad q beside, as much as kPartialShare in csrc/passes/backward.h lets them.
    """
    lines = printed(_KINDS, isa, threads, ",".join(map(str, lengths)))
    assert len(lines) == 10
    times = 2 if threads == 1 else 5
    wrong = [
        f"{name}: {taken} MiB beside {held} MiB of q, k, v, out"
        for name, taken, held in lines
        if float(taken) > times * float(held) + 4
    ]
    assert not wrong, wrong


@pytest.mark.thorough
@pytest.mark.skipif(TARGETS[0].backend != "cpu", reason="the compiled core is not built")
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_of_masks_and_layouts(threads: int) -> None:
    """Grouped heads under a window, packed sequences, lengths and documents."""
    _check_kinds(TARGETS[0].isa, threads, (4096, 8192))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_memory_is_linear_everywhere(target: Target) -> None:
    """On every target (plain arguments: the subprocess forces the instruction set)."""
    _check(target, (4096, 8192), "0")
