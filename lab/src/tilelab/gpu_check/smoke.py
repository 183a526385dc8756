"""Where this runs, whether one call works, the ceilings of the GPU, and memory of a pass."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import tilewise
from tilelab.cases.case import Pass
from tilelab.cases.table import find
from tilelab.common.environment import version
from tilelab.common.memory import highest
from tilelab.gpu_check.accuracy import check
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting, sized
from tilelab.peers.methods import Method, ours, written_out
from tilelab.peers.work import call_of, draw
from tilewise import masks

STEP = "smoke"
_CEILING_S = 1.0  # of the rounds of a ceiling


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row."""
    if job == "machine":
        yield Row(STEP, job, values=_machine(setting))
        return
    leaves = draw(setting.square(job, 128 // setting.sizes.shrink, 4, 64, passes="both")).leaves
    why = str(tilewise.explain(*leaves, mask=masks.causal(), backend=setting.backend))
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        tilewise.attention(*leaves, mask=masks.causal(), backend=setting.backend)
        setting.synchronize()
        seconds.append(time.perf_counter() - begin)
    yield Row(STEP, job, values={"explain": why, "forward_s": seconds})
    case = sized(setting, find("accuracy", "causal D64")).of(setting.dtype)
    yield from check(setting, STEP, job, case)


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


_HEADS, _WIDTH = 8, 64
# What may be held beside inputs and outputs, for each row of each head: lse and two statistics,
# the row sums of the backward pass, and gradients of grouped keys in float32.
_ROW_BYTES = 4 * (4 + 2 * _WIDTH)
_PLAIN_LONGEST = 16384


def run_memory(setting: Setting, job: str) -> Iterator[Row]:
    """Extra bytes at every length, ours and plain attention's."""
    lengths = setting.sizes.memory
    held = [_extra_bytes(setting, length, job, ours()) for length in lengths]
    fitting = [length for length in lengths if length <= _PLAIN_LONGEST]
    plain = [_extra_bytes(setting, length, job, written_out()) for length in fitting]
    allowed = [_HEADS * length * _ROW_BYTES for length in lengths]
    values = {
        "lengths": list(lengths),
        "extra_bytes": held,
        "plain_bytes": plain,
        "allowed_bytes": allowed,
    }
    over = [n for n, extra, most in zip(lengths, held, allowed, strict=True) if extra > most]
    wrong = bool(over) and not setting.self_test
    note = f"more than a constant for each row at N = {', '.join(map(str, over))}"
    yield Row("memory", job, "wrong" if wrong else "ok", note if wrong else "", values)


def _extra_bytes(setting: Setting, length: int, direction: str, method: Method) -> int:
    """Return the peak of a pass, less what was held before it and less what it gives."""
    passes: Pass = "forward" if direction == "forward" else "both"
    work = setting.square(direction, length, _HEADS, _WIDTH, passes=passes, mask=("causal",))
    given = draw(work)
    call = call_of(work, given, method.make(work, given))
    call()  # what is loaded once is no part of it
    extra, _, _ = highest(call, "cpu" if setting.self_test else "cuda")
    outputs = 1 if direction == "forward" else 4
    return max(0, extra - outputs * given.q.numel() * given.q.element_size())


def _machine(setting: Setting) -> dict[str, Any]:
    """Chip and versions. No host names, no paths."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") or "not installed",
        "tilewise": version("tilewise") or "run from its source tree",
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
