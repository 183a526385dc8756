"""Bits where threads share more than tasks: several chunks of keys, split heads, added-up biases.

The backward pass cuts the keys of a head into chunks of max(1024, N / 8) keys; one head's chunks
may be computed by several threads.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, Case, build
from tests.conftest import ran
from tests.contract import assert_same_bits
from tests.kernels.targets import Target, only_cpu
from tests.oracle import assert_same, attend, send
from tilewise import masks, scores
from tilewise.kernels.cpu import absence

WIDTH: dict[str, Any] = {"batch": 1, "head_dim": 16, "value_dim": 16}
CHUNKS = [
    Case("one-head", **WIDTH, heads=1, kv_heads=1, queries=200, keys=4500),
    Case("grouped", **WIDTH, heads=4, kv_heads=1, queries=70, keys=4500, sinks=True),
    Case("window", **WIDTH, heads=1, kv_heads=1, queries=4400, keys=4400, mask=("window",)),
    Case("causal", **WIDTH, heads=1, kv_heads=1, queries=1300, keys=4200, mask=("causal",)),
    Case("biased", **WIDTH, heads=2, kv_heads=1, queries=65, keys=4200, score=("bias",)),
    Case("heads", **WIDTH, heads=9, kv_heads=9, queries=70, keys=4200, mask=("document",)),
    Case("dropout", **WIDTH, heads=2, kv_heads=2, queries=65, keys=9000, dropout_p=0.2),
    Case(
        "packed",
        **WIDTH,
        heads=2,
        kv_heads=1,
        mask=("causal",),
        sequences=((50, 4500), (30, 1100), (1, 7), (64, 2100), (0, 5), (3, 9000)),
    ),
]


def check_threads(case: Case, counts: tuple[int, ...]) -> None:
    """Every result has the bits of one thread on so many threads."""
    inputs = build(case)
    sent = send(inputs)
    torch.set_num_threads(1)
    expected = attend(inputs, "cpu", sent)
    assert all(bool(grad.isfinite().all()) for grad in expected.grads.values())
    for threads in counts:
        torch.set_num_threads(threads)
        assert_same(attend(inputs, "cpu", sent), expected, f"{case}, {threads} threads")


@only_cpu
@pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
def test_chunks(target: Target, case: Case) -> None:
    """One, two and three threads over several chunks of keys; the dtypes take turns."""
    dtype = FLOATS[(CHUNKS.index(case) + target.rank) % 4]
    check_threads(case.of(dtype), (2, 3))


@pytest.mark.slow
@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CHUNKS, ids=lambda case: case.name)
def test_chunks_in_every_dtype(target: Target, case: Case, dtype: torch.dtype) -> None:
    check_threads(case.of(dtype), (2, 3, 2, 3, 5))


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.thorough)])
@only_cpu
def test_a_bias_for_a_whole_batch(target: Target, runs: int) -> None:
    """Batches of unequal work add to one gradient: the order must not be that of the threads."""
    q, k, v = (torch.randn(16, 1, rows, 8) for rows in (512, 1000, 1000))
    bias = torch.randn(1, 1, 512, 1000, requires_grad=True)
    mask = masks.lengths(torch.tensor([190, 1000] * 8))
    grad = torch.randn(16, 1, 512, 8)

    def gradient(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        out = tilewise.attention(q, k, v, mask=mask, score=scores.bias(bias), backend="cpu")
        return torch.autograd.grad(out, bias, grad)[0]

    expected = gradient(1)
    for _ in range(runs):
        assert_same_bits(gradient(2), expected, "grad of the bias")


@only_cpu
@pytest.mark.parametrize("key", [65, 400])
def test_nan_values_in_pairs_of_keys(target: Target, key: int) -> None:
    """bfloat16 takes two keys at once: where NaN goes is a question of tiles, not of threads."""
    case = Case("nan", batch=1, queries=512, keys=513, mask=("causal",), dtype=torch.bfloat16)
    inputs = build(case)
    clean = attend(inputs, "cpu", send(inputs))
    with torch.no_grad():
        inputs.v[:, :, key] = float("nan")
    expected = attend(inputs, "cpu", send(inputs))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        got = attend(inputs, "cpu", send(inputs))
        assert_same(got, expected, f"{threads} threads")
        assert torch.equal(got.out.isnan(), expected.out.isnan())
    assert bool(expected.out[:, :, key - 1 :].isnan().all())
    # Query tiles whose last row does not see the key's tile of 128 do not read it.
    unseen = max(0, key // 128 * 128 - 1) // 64 * 64
    assert_same_bits(expected.out[:, :, :unseen], clean.out[:, :, :unseen], "out")
    assert_same_bits(expected.lse, clean.lse, "lse")


@only_cpu
def test_two_callers_at_once(target: Target) -> None:
    """Two Python threads that call forward and backward get what one gets."""
    cases = [
        Case("first", queries=150, keys=1100, mask=("causal",), score=("bias",)),
        Case("second", queries=300, keys=260, heads=4, kv_heads=2, sinks=True),
    ]
    inputs = [build(case) for case in cases]
    sent = [send(each) for each in inputs]
    torch.set_num_threads(2)
    expected = [attend(each, "cpu", own) for each, own in zip(inputs, sent, strict=True)]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        torch.set_num_threads(2)
        barrier.wait(30)
        for _ in range(10):
            got = attend(inputs[index], "cpu", sent[index])
            assert_same(got, expected[index], cases[index].name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


FORK = """
import os, sys, threading, time
import torch, tilewise
from torch.utils.data import DataLoader, Dataset
q = torch.randn(2, 8, 256, 32)

def call(threads):
    torch.set_num_threads(threads)
    tilewise.attention(q, q, q)

def loss():
    torch.set_num_threads(2)
    tilewise.linear_cross_entropy(q[0, 0], q[0].flatten(0, 1), torch.zeros(256, dtype=torch.int64))

def child(work):
    number = os.fork()
    if number:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            done, status = os.waitpid(number, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(number, 9)
        os.waitpid(number, 0)
        return "hangs"
    try:
        work()
        os._exit(0)
    except tilewise.errors.LostThreads as error:
        assert "set_num_threads(1)" in str(error) and "spawn" in str(error), error
        os._exit(77)
    finally:
        os._exit(1)

def in_a_thread():
    thread = threading.Thread(target=call, args=(2,))
    thread.start()
    thread.join()

class Attends(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return tilewise.attention(q, q, q).sum()

def load():
    torch.set_num_threads(2)
    loader = DataLoader(Attends(), num_workers=2, multiprocessing_context="fork")
    assert len(list(loader)) == 4
"""


# What is done in a process of its own, which has no threads yet, and what it says.
FORKS = {
    "without its threads it raises and does not hang": (
        "call(2); print(child(lambda: call(2)), child(lambda: child(lambda: call(2))))",
        "77 0",  # the second child's own child raises, and that child ends well
    ),
    "without its threads the loss raises, where torch would hang": (
        "call(2); print(child(loss))",
        "77",
    ),
    "with one thread or a thread of its own it goes on": (
        "call(2); print(child(lambda: call(1)), child(in_a_thread))",
        "0 0",
    ),
    "as a worker that loads data it goes on": ("call(2); load(); call(2); print(0)", "0"),
    "that lost no thread may have several": ("call(1); print(child(lambda: call(2)))", "0"),
    "beside a thread that called it may have several": (
        "in_a_thread(); print(child(lambda: call(2)))",
        "0",
    ),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each of FORKS says: the first processes are forks of one that has called nothing."""
    code = "".join(
        f"""
print({name!r}, end=": ", flush=True)
if not (number := os.fork()):
    {code}
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(number, 0)[1] == 0
"""
        for name, (code, _) in FORKS.items()
    )
    done = ran(sys.executable, "-c", FORK + code)
    return dict(line.split(": ") for line in done.stdout.splitlines())


@pytest.mark.skipif(
    sys.platform != "linux" or absence() is not None, reason="of the core with GNU's OpenMP runtime"
)
@pytest.mark.parametrize("name", FORKS)
def test_a_fork(name: str, said: dict[str, str]) -> None:
    assert said[name] == FORKS[name][1]
