"""Floor 1: what chips can do: one row per chip, and the row of the processor that runs this.

A row holds what the machine says about itself (cores, caches) and what is known about its kind
(bandwidth). Peaks that are only known by measuring are absent from the row; ``tilewise doctor`` and
the bench measure them.

Linux tells all of it in ``/proc/cpuinfo`` and ``/sys``; where those are missing, the row says None
instead of guessing.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

__all__ = ["KNOWN", "Chip", "detect"]


@dataclass(frozen=True)
class Chip:
    """One chip: what bounds a kernel that runs on it.

    Attributes:
        name: the maker's name.
        kind: "cpu" or "gpu".
        cores: cores that this process may use (streaming multiprocessors on a GPU).
        l1_bytes: fast memory next to one core: L1 data cache (shared memory on a GPU).
        l2_bytes: L2 cache of one core (of the whole chip on a GPU).
        l3_bytes: last-level cache that cores share; None where there is none or it is unknown.
        bandwidth_bytes_s: memory bandwidth of the whole chip; None where it is unknown.
        peak_flops_s: (dtype name, peak floating-point operations per second) pairs; a dtype that is
            missing is only known by measuring.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    cores: int
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    bandwidth_bytes_s: float | None = None
    peak_flops_s: tuple[tuple[str, float], ...] = ()

    def peak(self, dtype: str) -> float | None:
        """Peak operations per second in a dtype such as "float32"; None when only measured."""
        return dict(self.peak_flops_s).get(dtype)


@dataclass(frozen=True)
class Known:
    """What is known about a kind of processor beyond what it says about itself.

    Attributes:
        vendor: as in /proc/cpuinfo, e.g. "AuthenticAMD".
        family: the "cpu family" of /proc/cpuinfo.
        bandwidth_bytes_s: sustained memory reads of all the cores of one small machine.
    """

    vendor: str
    family: int
    bandwidth_bytes_s: float


# Measured here on a 2-core machine, best of an uncontended run. A new chip is one row.
KNOWN = (Known("AuthenticAMD", 26, 50e9),)


def detect(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Chip:
    """The row of the processor that runs this.

    Args:
        proc: where to read ``cpuinfo``.
        sys: where to read ``devices/system/cpu``.

    Returns:
        the row; what the system does not say is None.
    """
    info = _cpuinfo(proc / "cpuinfo")
    caches = _caches(sys / "devices" / "system" / "cpu" / "cpu0" / "cache")
    chip = Chip(
        name=_name(info),
        kind="cpu",
        cores=_usable_cores(sys / "devices" / "system" / "cpu"),
        l1_bytes=caches.get(1),
        l2_bytes=caches.get(2),
        l3_bytes=caches.get(3),
    )
    for known in KNOWN:
        if info.get("vendor_id") == known.vendor and info.get("cpu family") == str(known.family):
            return replace(chip, bandwidth_bytes_s=known.bandwidth_bytes_s)
    return chip


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty where the file is missing."""
    info: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, colon, value = line.partition(":")
        if colon:
            info.setdefault(key.strip(), value.strip())
    return info


def _name(info: dict[str, str]) -> str:
    if "model name" in info:
        return info["model name"]
    if "CPU implementer" in info:  # aarch64 gives numbers instead of a name
        return f"ARM implementer {info['CPU implementer']} part {info.get('CPU part', '?')}"
    return platform.processor() or platform.machine() or "unknown processor"


def _caches(folder: Path) -> dict[int, int]:
    """Bytes of the data or unified cache of each level that one core sees."""
    sizes: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        level, size = _read(index / "level").strip(), _bytes(_read(index / "size").strip())
        if level.isdigit() and size and _read(index / "type").strip() in ("Data", "Unified"):
            sizes[int(level)] = size
    return sizes


def _bytes(size: str) -> int | None:
    """48K -> 49152; None for what is not a size."""
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 0)
    digits = size[:-1] if unit else size
    return int(digits) * (unit or 1) if digits.isdigit() else None


def _usable_cores(folder: Path) -> int:
    """Cores, not hardware threads, that this process may use."""
    try:
        usable = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    siblings = {_read(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in usable}
    return len(usable) if "" in siblings else max(1, len(siblings))


def _read(path: Path) -> str:
    """The text of a small system file; empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
