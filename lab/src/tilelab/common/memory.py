"""Peak memory of a process or of a GPU, and memory that the machine has available."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from tilelab.common.clock import seconds_of

_Result = TypeVar("_Result")
_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt
_MOST = 2**31 - 1
_KEPT_BYTES = 1 << 25
_ROOM = 0.7  # of what is free: others live here too


def resident_bytes() -> int:
    """Memory that this process holds now; its peak where the system does not tell."""
    now = _kilobyte_field(_STATUS, "VmRSS")
    return peak_bytes() if now is None else now


def peak_bytes() -> int:
    """Return the peak memory of this process since ``reset_peak`` (or since it started)."""
    peak = _kilobyte_field(_STATUS, "VmHWM")
    if peak is not None:
        return peak
    import resource  # not on every system, and needed only where there is no /proc

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def file_bytes() -> int:
    """Return the part of ``resident_bytes`` that is pages of files: code, and mapped data."""
    return _kilobyte_field(_STATUS, "RssFile") or 0


def reset_peak() -> None:
    """Forget the peak so far, where the system can (Linux); else it stays that of the start."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def release() -> None:
    """Give the system back what this process has freed, where its C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep(largest: int) -> None:
    """Let this process keep large blocks that it frees until ``release``, where it can (glibc).

    ``largest`` is the bytes of the largest block that is taken again and again.

    glibc learns by itself to keep blocks of up to 32 MiB. A larger one comes from the system each
    time, page by page: a gradient of 47 MB takes 12,000 page faults a step, a quarter of the time
    of fine-tuning a small encoder. With smaller blocks nothing is changed: where all come from one
    heap, its gaps make the peak differ more from run to run.
    """
    if largest <= _KEPT_BYTES:
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)  # large blocks come from the heap too, which is kept
        library.mallopt(_TRIM_THRESHOLD, _MOST)


def highest(call: Callable[[], _Result], device: str) -> tuple[int, float, _Result]:
    """Return the extra bytes during a call, its seconds, and what it returned, still held."""
    kept: list[_Result] = []
    before = held_bytes(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()
    seconds = seconds_of(lambda: kept.append(call()), "cuda" if device == "cuda" else "cpu")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()
    return max(0, peak - before), seconds, kept[0]


def held_bytes(device: str) -> int:
    """Return the memory that is held now and give back what is freed."""
    if device == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    release()
    return resident_bytes()


def total_bytes() -> int | None:
    """Memory of the machine, or what its container may take of it; None where nobody knows."""
    return _least(_cgroup_limit(), _kilobyte_field(_MEMINFO, "MemTotal"))


def available_bytes() -> int | None:
    """Memory that a new process could take now without swapping; None where nobody knows."""
    return _least(_cgroup_left(), _kilobyte_field(_MEMINFO, "MemAvailable"))


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def too_large(wanted: float, device: str) -> str:
    """Return why so many bytes are too many for a device; empty if they fit."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    if free is None or wanted <= _ROOM * free:
        return ""
    return f"its matrices need about {wanted / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"


def _kilobyte_field(path: Path, field: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _cgroup_limit() -> int | None:
    """Return the bytes that the container may take (cgroup version 2), if it has a limit."""
    try:
        return int((_CGROUP / "memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _cgroup_left() -> int | None:
    """Return the bytes that the container may still take; its page cache counts as available."""
    limit = _cgroup_limit()
    try:
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    used -= sum(int(fields.get(name, "0")) for name in ("inactive_file", "active_file"))
    return None if limit is None else min(limit, max(limit - used, 0))
