"""Where this runs, whether one call works, and the ceilings of the GPU."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilelab.cases.table import find
from tilelab.gpu_check.accuracy import check
from tilelab.gpu_check.outcomes import sized
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.peers.work import draw
from tilewise import masks

STEP = "smoke"
_CEILING_S = 1.0  # of the rounds of a ceiling


def jobs(setting: Setting) -> list[str]:
    """Return the jobs: describe the machine, and make one call."""
    return ["machine", "first call"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row."""
    if job == "machine":
        yield Row(STEP, job, values=_machine(setting))
        return
    leaves = draw(setting.work(STEP, job, 128 // setting.sizes.shrink, 4, 64, passes="both")).leaves
    why = str(tilewise.explain(*leaves, mask=masks.causal(), backend=setting.backend))
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        tilewise.attention(*leaves, mask=masks.causal(), backend=setting.backend)
        setting.synchronize()
        seconds.append(time.perf_counter() - begin)
    yield Row(STEP, job, values={"explain": why, "forward_s": seconds})
    case = sized(setting, find("causal D64")).of(setting.dtype)
    yield from check(setting, STEP, job, case)


def jobs_of_ceilings(setting: Setting) -> list[str]:
    """Both of them."""
    return ["matrix", "copy"]


def run_ceilings(setting: Setting, job: str) -> Iterator[Row]:
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
    samples = setting.race({job: call}, _CEILING_S)
    yield Row("ceilings", job, values={"amount": amount, "unit": unit, "samples_s": samples})


def _machine(setting: Setting) -> dict[str, Any]:
    """Chip and versions. No host names, no paths."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tilewise": _version("tilewise"),
        "system": f"{platform.system()} {platform.machine()}",
        "chip": "none: Triton's interpreter on the processor",
    }
    if setting.self_test:
        return found
    chip = torch.cuda.get_device_properties(setting.device)
    return found | {
        "chip": chip.name,
        "capability": f"{chip.major}.{chip.minor}",
        "multiprocessors": chip.multi_processor_count,
        "memory_bytes": chip.total_memory,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "clocks": _clocks(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "run from its source tree" if package == "tilewise" else "not installed"


def _clocks() -> str:
    """Driver, clocks and temperature as the GPU says them; empty where nothing can be asked."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
