"""Memory, measured: what a call needs beyond inputs and outputs grows with N, not with N x N."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kernels.targets import TARGETS, Target

# Peak resident memory beyond what was there just before the call, in MiB, for two lengths.
_SCRIPT = """
import sys
import torch
import tilewise

backend, isa, lengths, dropout_p = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
torch.set_num_threads(1)
if isa:
    from tilewise import _core
    _core.set_isa(isa)

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))

def measure(n):
    q, k, v = (torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 1, n, 32)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    out = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), dropout_p=dropout_p, seed=1,
                             backend=backend)
    forward = status("VmHWM") - before
    out.backward(grad)
    return forward, status("VmHWM") - before

measure(300)  # pools and libraries are not the call's
for n in map(int, lengths.split(",")):
    print(*measure(n))
"""


def _measure(target: Target, lengths: tuple[int, ...], dropout_p: float) -> list[list[float]]:
    words = [target.backend, target.isa, ",".join(map(str, lengths)), str(dropout_p)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


def _check(target: Target, lengths: tuple[int, ...], dropout_p: float) -> None:
    """A square of bytes, the least that an N x N anything could take, is never reached."""
    measured = _measure(target, lengths, dropout_p)
    for n, (forward, both) in zip(lengths, measured, strict=True):
        square_mib = n * n / 2**20
        assert forward < square_mib / 2, f"forward took {forward:.1f} MiB at N = {n}"
        assert both < square_mib / 2, f"forward and backward took {both:.1f} MiB at N = {n}"
    (_, small), (_, large) = measured
    ratio = lengths[1] / lengths[0]
    assert large < 1.3 * ratio * small + 6, f"{small:.1f} MiB grew to {large:.1f} MiB"


pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_memory_is_linear(dropout_p: float) -> None:
    """On the best target: N = 4096 and 8192, forward and backward."""
    lengths = (4096, 8192) if TARGETS[0].backend == "cpu" else (2048, 4096)
    _check(TARGETS[0], lengths, dropout_p)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_memory_is_linear_everywhere(target: Target) -> None:
    """On every target (plain arguments: the subprocess forces the instruction set)."""
    _check(target, (4096, 8192), 0.0)
