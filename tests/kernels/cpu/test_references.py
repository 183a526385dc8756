"""A row subtracts one reference from its scores, and a kernel may keep it while the maximum grows.

With matrix tiles (AMX, bfloat16) most blocks take the references as they are; a block in which some
row's has to grow is computed again. No row may show which of the two its neighbours needed.
"""

from __future__ import annotations

import math
import multiprocessing
import threading

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks

WIDTHS = (8, 64, 72, 128)
KEYS = 1100


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


def _truth(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(s, -1) @ v.double(), torch.logsumexp(s, -1)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_keep_their_bits_beside_rows_whose_reference_grows(isa: str, width: int) -> None:
    q, k, v = _inputs(width)
    k = _with_late_keys(q, k, (3, 40, 99))
    growing, calm = q, q.clone()
    calm[:, :, [3, 40, 99]] = 0
    first, second = (tilewise.attention(x, k, v, return_lse=True) for x in (growing, calm))
    others = [m for m in range(q.shape[2]) if m not in (3, 40, 99)]
    assert torch.equal(first.out[:, :, others], second.out[:, :, others])
    assert torch.equal(first.lse[:, :, others], second.lse[:, :, others])


@pytest.mark.parametrize("width", WIDTHS)
def test_references_that_grow_are_exact(isa: str, width: int) -> None:
    q, k, v = _inputs(width)
    k = _with_late_keys(q, k, (3, 40, 99))
    result = tilewise.attention(q, k, v, return_lse=True)
    out, lse = _truth(q, k, v)
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
