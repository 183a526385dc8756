"""Measure the ceilings of the GPU: a large matrix product, and a copy of memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tilelab.gpu_check.clock import interleave
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting

__all__ = ["jobs", "run"]

STEP = "ceilings"
_BUDGET_S = 1.0


def jobs(setting: Setting) -> list[str]:
    """Both of them."""
    return ["matrix", "copy"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Operations per second of the product; bytes read and written per second of the copy.

    Random numbers: a GPU is faster on zeros.
    """
    sizes, device = setting.sizes, setting.device
    if job == "matrix":
        n = sizes.matrix
        a, b = (torch.randn(n, n, device=device).to(setting.dtype) for _ in range(2))
        call, amount, unit = partial(torch.matmul, a, b), 2.0 * n**3, "TFLOP/s"
    else:
        source = torch.randint(-128, 127, (sizes.copy_bytes,), dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        call, amount, unit = partial(target.copy_, source), 2.0 * sizes.copy_bytes, "TB/s"
    call()
    samples = interleave(setting, {job: call}, _BUDGET_S)
    yield Row(STEP, job, values={"amount": amount, "unit": unit, "samples_s": samples})
