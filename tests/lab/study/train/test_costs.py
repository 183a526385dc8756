"""Operations and peaks by hand; sums over storages, saved activations, the peak of memory."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

from tilelab.common.memory import resident_bytes
from tilelab.study.ask.config import Model, RunConfig
from tilelab.study.tasks.task import dtype_of
from tilelab.study.train.costs import (
    PeakMeter,
    gemm_peak_flops_s,
    peak_flops_s,
    per_token,
    saved_bytes,
    storage_bytes,
)
from tilewise.inspect import peaks
from tilewise.kernels.cpu.core import absence


def test_operations_per_token_by_hand_and_dtypes() -> None:
    config = RunConfig(model=Model(layers=3, heads=2, width=10, context=7))
    found = per_token(config, {"total": 1000, "embedding": 70})
    assert found == {
        "full": 6 * 930 + 12 * 3 * 10 * 7,
        "causal": 6 * 930 + 6 * 3 * 10 * 7,
    }
    precisions = ("float32", "bf16", "fp16")
    assert [dtype_of(each) for each in precisions] == [torch.float32, torch.bfloat16, torch.float16]


def test_a_product_is_not_faster_than_the_peak() -> None:
    peak = gemm_peak_flops_s(torch.float32, torch.device("cpu"))
    a = torch.ones(256, 256)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    # Generous on both sides: other processes share these cores.
    assert peak > 0.2 * 2 * 256**3 / min(times)
    assert peak < 1e15


def _busy(right: torch.Tensor) -> None:
    """Take longer with one of the layouts: the peak is that of the better one."""
    begin = time.process_time()
    while right.is_contiguous() and time.process_time() < begin + 0.05:
        pass


def _wait(right: torch.Tensor) -> None:
    """As if another process had the core."""
    time.sleep(0.03)


@pytest.mark.parametrize("slow", [_busy, _wait])
def test_what_is_not_the_product_does_not_lower_the_peak(
    slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = torch.mm

    def slowed(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        slow(right)
        return product(left, right, out=out)

    alone = gemm_peak_flops_s(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch, "mm", slowed)
    assert gemm_peak_flops_s(torch.float32, torch.device("cpu")) > 0.2 * alone


@pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")
def test_the_peak_is_the_bare_loop_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cpu"), []

    def loop(kind: str, threads: int, clock: str) -> float:
        asked.append((threads, clock))
        return 1e18

    monkeypatch.setattr(peaks, "measure", loop)
    assert peak_flops_s(torch.float32, device) == 1e18
    assert set(asked) == {(torch.get_num_threads(), "cpu")}
    monkeypatch.setattr(peaks, "measure", lambda *_: 0.0)
    assert 1e6 < peak_flops_s(torch.float32, device) < 1e15


MIB = 1 << 20


def test_a_storage_counts_once_however_many_views_share_it() -> None:
    x = torch.zeros(6, 4)
    assert storage_bytes([x, x[1:], x.t(), torch.zeros(3)]) == 6 * 4 * 4 + 3 * 4


def test_saved_bytes_count_each_storage_once_and_no_weight() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    # exp keeps its result and the product keeps x, 4 x 8 floats each; the weight does not count.
    _, kept = saved_bytes(lambda: (x @ weight).exp().sum(), [weight])
    assert kept == 2 * 4 * 8 * 4
    doubled = x.clone().requires_grad_()
    _, kept = saved_bytes(lambda: (doubled * doubled.view(4, 8)).sum(), [])
    assert kept == 4 * 8 * 4


def test_what_was_counted_is_freed() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    results: list[weakref.ref[torch.Tensor]] = []

    def run() -> torch.Tensor:
        result = (weight @ weight).exp()  # its own graph saves it
        results.append(weakref.ref(result))
        return result.sum()

    saved_bytes(run, [weight])
    gc.collect()
    assert [result() for result in results] == [None]


@pytest.mark.skipif(resident_bytes() == 0, reason="this system does not tell")
def test_a_pause_does_not_count_towards_the_peak() -> None:
    meter = PeakMeter(torch.device("cpu"))
    held = torch.ones(16 * MIB // 4)
    meter.pause()
    much = torch.ones(128 * MIB // 4)
    del much
    meter.resume()
    peak = meter.peak_bytes()
    assert 12 * MIB < peak < 100 * MIB
    more = torch.ones(64 * MIB // 4)
    assert meter.peak_bytes() > peak + 30 * MIB
    del held, more
    meter.pause()
    meter.resume()
    assert meter.peak_bytes() > peak + 30 * MIB, "a peak before a pause stays"
