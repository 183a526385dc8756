"""Operations per token by hand, and a peak that is one."""

from __future__ import annotations

import time

import pytest
import torch

from tilelab.study.ask.config import Model, RunConfig
from tilelab.study.train.flops import dtype_of, gemm_peak_flops_s, peak_flops_s, per_token
from tilewise.inspect import peaks
from tilewise.kernels.cpu.core import absence


def test_operations_per_token_by_hand() -> None:
    config = RunConfig(model=Model(layers=3, heads=2, width=10, context=7))
    found = per_token(config, {"total": 1000, "embedding": 70})
    assert found == {
        "full": 6 * 930 + 12 * 3 * 10 * 7,
        "causal": 6 * 930 + 6 * 3 * 10 * 7,
    }


def test_precisions_have_their_dtypes() -> None:
    assert dtype_of("float32") == torch.float32
    assert dtype_of("bf16") == torch.bfloat16
    assert dtype_of("fp16") == torch.float16


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


def test_the_peak_is_that_of_the_better_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def slow(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        begin = time.process_time()
        while right.is_contiguous() and time.process_time() < begin + 0.05:
            pass
        return product(left, right, out=out)

    alone = gemm_peak_flops_s(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch, "mm", slow)
    assert gemm_peak_flops_s(torch.float32, torch.device("cpu")) > 0.2 * alone


def test_waiting_for_a_core_does_not_lower_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    product = torch.mm

    def interrupted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)  # as if another process had the core
        return product(left, right, out=out)

    alone = gemm_peak_flops_s(torch.float32, device)
    monkeypatch.setattr(torch, "mm", interrupted)
    assert gemm_peak_flops_s(torch.float32, device) > 0.2 * alone


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
