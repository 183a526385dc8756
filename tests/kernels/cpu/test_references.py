"""A row subtracts one reference from its scores, and a kernel may keep it while the maximum grows.

With matrix tiles (AMX, bfloat16) most blocks take the references as they are; a block in which some
row's has to grow is computed again. ALiBi and a softcap are made within the softmax, unless the
references have just grown. No row may show which of these its neighbours needed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks, scores

# By ALiBi the references of the first head grow with nearly each block up to the row's own place.
SCORES = {
    "none": None,
    "alibi": scores.alibi(torch.tensor([0.5, 0.01])),
    "softcap": scores.softcap(30.0),
    "both": [scores.softcap(30.0), scores.alibi(torch.tensor([0.5, 0.01]))],
}
WIDTHS = (8, 64, 72, 128)
KEYS = 1101  # the last block has an odd number


def _inputs(width: int, queries: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    sizes = ((1, 2, queries, width), (1, 2, KEYS, width), (1, 2, KEYS, width))
    q, k, v = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
    return q, k, v


def _with_late_keys(q: Tensor, k: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Keys whose scores grow along the sequence for some queries: 20, 40 and 60 at their ends."""
    k = k.clone()
    for step, (row, place) in enumerate(zip(rows, (300, 700, 1090), strict=True)):
        direction = q[0, :, row].float()
        size = direction.square().sum(-1, keepdim=True)
        k[0, :, place] = (direction / size * 20 * (step + 1) * math.sqrt(q.shape[-1])).bfloat16()
    return k


def _truth(q: Tensor, k: Tensor, v: Tensor, score: str = "none") -> tuple[Tensor, Tensor]:
    s = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if score in ("softcap", "both"):
        s = 30 * (s / 30).tanh()
    if score in ("alibi", "both"):
        m, n = torch.arange(q.shape[2])[:, None] + (KEYS - q.shape[2]), torch.arange(KEYS)
        s = s - torch.tensor([0.5, 0.01]).double()[:, None, None] * (m - n).abs()
    return torch.softmax(s, -1) @ v.double(), torch.logsumexp(s, -1)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_keep_their_bits_beside_rows_whose_reference_grows(
    isa: str, width: int, score: str
) -> None:
    q, k, v = _inputs(width)
    k = _with_late_keys(q, k, (3, 40, 99))
    growing, calm = q, q.clone()
    calm[:, :, [3, 40, 99]] = 0
    first, second = (
        tilewise.attention(x, k, v, score=SCORES[score], return_lse=True) for x in (growing, calm)
    )
    others = [m for m in range(q.shape[2]) if m not in (3, 40, 99)]
    assert torch.equal(first.out[:, :, others], second.out[:, :, others])
    assert torch.equal(first.lse[:, :, others], second.lse[:, :, others])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("width", WIDTHS)
def test_references_that_grow_are_exact(isa: str, width: int, score: str) -> None:
    q, k, v = _inputs(width)
    k = _with_late_keys(q, k, (3, 40, 99))
    result = tilewise.attention(q, k, v, score=SCORES[score], return_lse=True)
    out, lse = _truth(q, k, v, score)
    torch.testing.assert_close(result.out.double(), out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_gradients_behind_references_that_grow_are_exact(isa: str, width: int) -> None:
    q, k, v = _inputs(width)
    k = _with_late_keys(q, k, (3, 40, 99))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.autograd.grad(tilewise.attention(*leaves), leaves, grad)
    expected = torch.autograd.grad(_truth(wide[0], wide[1], wide[2])[0], wide, grad.double())
    for mine, right in zip(got, expected, strict=True):
        error = (mine.double() - right).square().mean().sqrt()
        assert error < 1e-2 * right.square().mean().sqrt()


@pytest.mark.parametrize("masked", [False, True])
def test_a_nan_stays_in_its_row_and_the_call_ends(isa: str, masked: bool) -> None:
    q, k, v = _inputs(64)
    q[0, 0, 40, 0] = math.nan
    mask = masks.window(1000) if masked else None
    clean = q.clone()
    clean[0, 0, 40, 0] = 0
    out, expected = (
        tilewise.attention(q, k, v, mask=mask),
        tilewise.attention(clean, k, v, mask=mask),
    )
    assert out[0, 0, 40].isnan().all()
    others = torch.ones(out.shape[:3], dtype=torch.bool)
    others[0, 0, 40] = False
    assert torch.equal(out[others], expected[others])


def _attend(result: multiprocessing.Queue[list[float]]) -> None:
    q, k, v = _inputs(64)
    result.put(tilewise.attention(q, k, v).float().flatten().tolist())


def test_new_threads_and_forked_children_have_the_same_bits(isa: str) -> None:
    # Linux grants matrix tiles to a process, and each thread sets their shapes for itself.
    torch.set_num_threads(1)
    q, k, v = _inputs(64)
    expected = tilewise.attention(q, k, v)
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(tilewise.attention(q, k, v)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(torch.equal(each, expected) for each in results)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_attend, args=(queue,))
    child.start()
    numbers = queue.get(timeout=60)
    child.join()
    assert child.exitcode == 0
    assert torch.equal(torch.tensor(numbers), expected.float().flatten())


def test_signals_change_no_bit(isa: str) -> None:
    # A signal that arrives within the kernel saves the tiles, and what handles it may use them.
    q, k, v = _inputs(64)
    expected = tilewise.attention(q, k, v)
    seen: list[Tensor] = []

    def again(*_: object) -> None:
        seen.append(tilewise.attention(q, k, v))
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        found = []
        while len(seen) < 20:
            found.append(tilewise.attention(q, k, v))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(torch.equal(each, expected) for each in (*found, *seen))


# Linux grants tiles to no process one of whose threads has a signal stack that they do not fit on.
_REFUSED = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(room), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import torch, tilewise
from tilewise import _core
from tilewise.doctor import examine
q = torch.randn(1, 2, 70, 64).bfloat16()
assert tilewise.attention(q, q, q).isfinite().all()
assert "avx512_amx" not in _core.isa_available() and _core.tiles_refused()
print({check.what: check.found for check in examine()}["instruction set"])
"""


def _processor() -> str:
    return Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""


def test_a_system_that_refuses_tiles() -> None:
    from tilewise import _core

    if "avx512_amx" not in _core.isa_available() or "amx_bf16" not in _processor():
        pytest.skip("needs a processor with matrix tiles (AMX)")
    environment = {k: v for k, v in os.environ.items() if k != "TILEWISE_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "sigaltstack" in done.stderr:
        pytest.skip("this system takes no signal stack so small")
    assert done.returncode == 0, done.stderr
    assert "the system does not let this process use them" in done.stdout
