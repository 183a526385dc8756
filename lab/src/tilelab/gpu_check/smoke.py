"""Smoke: where this runs, and whether one call works, forward and backward."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilelab.gpu_check.accuracy import check
from tilelab.gpu_check.clock import synchronize
from tilelab.gpu_check.outcomes import sized
from tilelab.gpu_check.problems import find
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilewise import masks

__all__ = ["jobs", "run"]

STEP = "smoke"


def jobs(setting: Setting) -> list[str]:
    """Return the jobs: describe the machine, and make one call."""
    return ["machine", "first call"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row."""
    if job == "machine":
        yield Row(STEP, job, values=_machine(setting))
        return
    q, k, v = (
        torch.randn(1, 4, 128 // setting.sizes.shrink, 64, device=setting.device).to(setting.dtype)
        for _ in range(3)
    )
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    why = str(tilewise.explain(*leaves, mask=masks.causal(), backend=setting.backend))
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        tilewise.attention(*leaves, mask=masks.causal(), backend=setting.backend)
        synchronize(setting)
        seconds.append(time.perf_counter() - begin)
    yield Row(STEP, job, values={"explain": why, "forward_s": seconds})
    yield from check(setting, STEP, job, sized(setting, find("causal D64")), setting.dtype)


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
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
