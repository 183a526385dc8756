"""The ceilings of the processor that runs this: measured in seconds, kept for predictions."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from tilewise.chips import Chip, ceilings_file
from tilewise.inspect import peaks

_STREAM = 2**26  # float32 numbers that are streamed: beyond what caches hold
_POWERS = 2**17  # float32 numbers of which powers are taken: within what caches hold
_REPEATS = 5


def measure(chip: Chip, stream: int = _STREAM) -> Chip:
    """The row with its ceilings: bandwidth of reads, peaks of the products, rate of exponentials.

    On all its cores, by the time that threads ran and not that they waited. The best of some runs
    each: a ceiling is what was ever reached.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(chip.cores)
    try:
        return _measured(chip, stream, chip.cores)
    finally:
        torch.set_num_threads(before)


def _measured(chip: Chip, stream: int, threads: int) -> Chip:
    single = peaks.measure("fma", threads, "cpu")
    pairs = peaks.loop("bfloat16", peaks.isa())
    half = peaks.measure(pairs, threads, "cpu") if pairs != "fma" else single
    numbers = torch.ones(stream)
    read = _best(numbers.sum)
    few, out = torch.full((_POWERS,), -0.5), torch.empty(_POWERS)
    power = _best(lambda: [torch.exp(few, out=out) for _ in range(16)]) / 16
    return replace(
        chip,
        bandwidth_bytes_s=numbers.numel() * 4 / read,
        peak_flops_s=(
            ("float32", single),
            ("float64", single / 2),
            ("float16", single),
            ("bfloat16", half),
        ),
        exponentials_s=_POWERS / power,
        source="measured here",
    )


def _best(call: Callable[[], object]) -> float:
    """The shortest of some runs, in seconds; the first one, which warms up, does not count."""
    call()
    threads, found = torch.get_num_threads(), []
    for _ in range(_REPEATS):
        wall, own = time.perf_counter(), time.process_time()
        call()
        ran = (time.process_time() - own) / threads
        found.append(min(time.perf_counter() - wall, ran))
    return min(found)


def keep(chip: Chip, path: Path | None = None) -> Path:
    """Write the ceilings where ``chips.measured`` finds them; those of other chips stay.

    Raises:
        OSError: it cannot be written.
    """
    path = path or ceilings_file()
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {}
    kept = kept if isinstance(kept, dict) else {}
    kept[f"{chip.name} x {chip.cores}"] = {
        "date": date.today().isoformat(),
        "bandwidth_bytes_s": chip.bandwidth_bytes_s,
        "peak_flops_s": dict(chip.peak_flops_s),
        "exponentials_s": chip.exponentials_s,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: written beside it and renamed over it.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
        json.dump(kept, file, indent=1)
    os.replace(file.name, path)
    return path
