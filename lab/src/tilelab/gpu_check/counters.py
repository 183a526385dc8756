"""Bytes of a GPU's memory, counted by Nsight Compute (``ncu``) while a process runs.

``ncu`` empties the caches before each kernel, so every kernel is counted from cold memory. It
counts only between the start and the stop of the profiler. Reading counters needs a right that many
machines do not give (``ERR_NVGPUCTRPERM``).
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tilewise.errors import TilewiseError

__all__ = ["METRICS", "Bytes", "CannotCount", "bytes_of", "count"]

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
Bytes = dict[str, int]
_REFUSED = "ERR_NVGPUCTRPERM"


class CannotCount(TilewiseError):  # noqa: N818  no error of the check: a counter cannot be read
    """Why nothing can be counted here."""


def count(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> list[Bytes]:
    """Count the bytes that every kernel of a process reads and writes, in order.

    Args:
        command: of the process.
        environment: of the process.
        limit_s: for all of it.

    Raises:
        CannotCount: ncu is missing, refuses, or does not come to its end.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CannotCount("ncu (Nsight Compute) is not installed")
    asked = [
        *(ncu, "--metrics", ",".join(METRICS), "--csv", "--print-units", "base"),
        *("--profile-from-start", "off", "--target-processes", "all", *command),
    ]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, check=False, env=environment, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise CannotCount(f"ncu was not done after {limit_s:.0f} s") from None
    said = done.stdout + done.stderr
    if _REFUSED in said:
        raise CannotCount(f"counters cannot be read here: {_REFUSED}")
    if done.returncode != 0:
        raise CannotCount(f"ncu ended with {done.returncode}: {' '.join(said.split())[-200:]}")
    return bytes_of(done.stdout)


def bytes_of(printed: str) -> list[Bytes]:
    """Return the counts in what ncu printed: for each kernel, bytes by metric.

    Raises:
        CannotCount: there is no table with these metrics in it.
    """
    lines = printed.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise CannotCount("ncu printed no table: no kernel ran between start and stop")
    kernels: dict[str, Bytes] = {}
    for row in csv.DictReader(lines[head:]):
        name, unit, value = (row.get(f"Metric {part}") or "" for part in ("Name", "Unit", "Value"))
        if name not in METRICS:
            continue
        if unit != "byte":
            raise CannotCount(f"{name} in {unit or 'no unit'}, not in bytes")
        kernels.setdefault(row["ID"], {})[name] = round(float(value.replace(",", "")))
    if not kernels or any(len(found) < len(METRICS) for found in kernels.values()):
        raise CannotCount(f"ncu's table lacks {' or '.join(METRICS)}")
    return list(kernels.values())
