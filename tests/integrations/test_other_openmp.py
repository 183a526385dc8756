"""The core on LLVM's OpenMP runtime, whose teams it starts in another way than GNU's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ran

FOLDER = os.environ.get("OTHER_OPENMP")
FOUND = sorted(Path(FOLDER).rglob("libiomp5.so")) if FOLDER else []
CODE = """
import torch, tilewise
import tilewise._core as core
q, k, v = (torch.randn(2, 4, 300, 32, requires_grad=True) for _ in range(3))
grad = torch.randn_like(q)
results = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    out = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), backend="cpu")
    results.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
# Rates of the threads, each by its own processor time, added up.
print(core.openmp_runtime(), core.peak("fma", 3) > 2 * core.peak("fma", 1))
"""


@pytest.mark.skipif(
    not FOUND or sys.platform != "linux",
    reason="needs Linux, and OTHER_OPENMP: the folder with what .ci/openmp.txt lists",
)
def test_teams_of_llvms_runtime() -> None:
    """Loaded before torch's, so that the core finds it first: three threads, the bits of one."""
    environment = os.environ | {"LD_PRELOAD": str(FOUND[0].resolve()), "OMP_NUM_THREADS": "1"}
    done = ran(sys.executable, "-c", CODE, env=environment)
    assert done.stdout.split() == [str(FOUND[0].resolve()), "True"]
