"""What chips can do: one row per chip, and the row of the processor that runs this.

``CHIPS`` has the public figures of some chips by name. The row of the processor that runs this
holds what the machine says about itself (cores, caches) and what is known about its kind
(bandwidth). Peaks that are only known by measuring are absent from the row; ``tilewise doctor`` and
the bench measure them, and ``measured`` adds what was measured and kept before.

Linux tells all of it in ``/proc/cpuinfo`` and ``/sys``; where those are missing, the row says None
instead of guessing.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tilewise.errors import InvalidArgument
from tilewise.folders import cache_folder

__all__ = ["CHIPS", "KNOWN", "Chip", "ceilings_file", "detect", "measured", "named"]


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
            missing is only known by measuring. Dense, with float32 sums.
        exponentials_s: powers per second of the whole chip; None where that is unknown.
        memory_bytes: memory of the whole chip; None where it is the machine's.
        source: where the figures are from.
        family: whose kernels and blocks a GPU takes: a name of ``FAMILIES`` in
            ``kernels/gpu/config.py``, e.g. "sm_90". A newer chip may name an older family.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    cores: int
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    bandwidth_bytes_s: float | None = None
    peak_flops_s: tuple[tuple[str, float], ...] = ()
    exponentials_s: float | None = None
    memory_bytes: int | None = None
    source: str = ""
    family: str = ""

    @property
    def last_cache_bytes(self) -> int | None:
        """Return the cache before memory that all cores share; None where it is unknown."""
        return self.l3_bytes or (self.l2_bytes if self.kind == "gpu" else None)

    def peak(self, dtype: str) -> float | None:
        """Peak operations per second in a dtype such as "float32"; None when only measured."""
        return dict(self.peak_flops_s).get(dtype)


@dataclass(frozen=True)
class Known:
    """Facts about a kind of processor that it does not report itself.

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
    """Return the row of the processor that runs this.

    Args:
        proc: where to read ``cpuinfo``.
        sys: where to read ``devices/system/cpu``.

    Returns:
        the row; what the system does not say is None.
    """
    info = cpuinfo(proc / "cpuinfo")
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


_GB, _KIB, _MIB = 10**9, 2**10, 2**20


def _gpu(
    name: str,
    family: str,
    cores: int,
    clock_hz: float,
    caches: tuple[int, int, int | None],
    memory: tuple[int, float],
    tflops: Mapping[str, float],
    source: str,
    powers_a_clock: int = 16,
) -> Chip:
    """Return a row of the table: exponentials are ``powers_a_clock`` x cores x clock.

    ``caches`` are the bytes of L1, L2 and L3, as in ``Chip``. ``memory`` is GB, and GB/s.
    ``tflops`` are dense peaks by dtype, in 1e12 operations per second.
    """
    return Chip(
        name,
        "gpu",
        cores,
        *caches,
        bandwidth_bytes_s=memory[1] * _GB,
        peak_flops_s=tuple((dtype, rate * 1e12) for dtype, rate in tflops.items()),
        exponentials_s=powers_a_clock * cores * clock_hz,
        memory_bytes=memory[0] * _GB,
        source=source,
        family=family,
    )


def _cpu(
    name: str,
    cores: int,
    caches: tuple[int, int, int | None],
    bandwidth: float,
    core_flops_s: tuple[float, float],
    source: str,
) -> Chip:
    """Return a row of the table; a core's peaks are in float32 and bfloat16.

    A processor has no unit for powers: 16 multiply-adds are taken for one, with which the products
    compete.
    """
    single, half = (rate * cores for rate in core_flops_s)
    peaks = (("float32", single), ("bfloat16", half), ("float16", single), ("float64", single / 2))
    return Chip(
        name,
        "cpu",
        cores,
        *caches,
        bandwidth_bytes_s=bandwidth * _GB,
        peak_flops_s=peaks,
        exponentials_s=single / 32,
        source=source,
    )


_AMPERE = {"float16": 312.0, "bfloat16": 312.0, "float32": 19.5, "float64": 19.5}
_HOPPER = {
    "float8_e4m3fn": 1978.9,
    "float16": 989.4,
    "bfloat16": 989.4,
    "float32": 66.9,
    "float64": 66.9,
}
# Sixteen special function units a multiprocessor (four a quarter) are NVIDIA's since Turing, from
# the tuning guides; the clock is the one at which the maker's matrix peak holds. float32 is without
# matrix instructions, which is how exact products are made; tf32 is another dtype's figure.
# Keys are what people type. The part before a dash has to occur in the driver's name (``row_of``).
CHIPS: Mapping[str, Chip] = {
    "a100": _gpu(
        "NVIDIA A100 SXM 80 GB",
        "sm_80",
        108,
        1.41e9,
        (163 * _KIB, 40 * _MIB, None),
        (80, 2039),
        _AMPERE,
        "NVIDIA A100 datasheet (2021); Ampere architecture whitepaper (2020), table 1",
    ),
    "a100-40gb": _gpu(
        "NVIDIA A100 SXM 40 GB",
        "sm_80",
        108,
        1.41e9,
        (163 * _KIB, 40 * _MIB, None),
        (40, 1555),
        _AMPERE,
        "NVIDIA A100 datasheet (2020); the chip of the FlashAttention paper",
    ),
    "h100": _gpu(
        "NVIDIA H100 SXM",
        "sm_90",
        132,
        1.83e9,
        (227 * _KIB, 50 * _MIB, None),
        (80, 3350),
        _HOPPER,
        "NVIDIA H100 datasheet; Hopper architecture whitepaper (2022)",
    ),
    "h200": _gpu(
        "NVIDIA H200 SXM",
        "sm_90",
        132,
        1.83e9,
        (227 * _KIB, 50 * _MIB, None),
        (141, 4800),
        _HOPPER,
        "NVIDIA H200 datasheet (2023)",
    ),
    "b200": _gpu(
        "NVIDIA B200 (HGX)",
        "sm_100",
        148,
        1.86e9,
        (227 * _KIB, 126 * _MIB, None),
        (180, 7700),
        {
            "float8_e4m3fn": 4500.0,
            "float16": 2250.0,
            "bfloat16": 2250.0,
            "float32": 75.0,
            "float64": 37.0,
        },
        "NVIDIA HGX B200 specifications (2025): 180 GB at 7.7 TB/s a chip (of a GB200: 186 GB at 8 "
        "TB/s), half of the sparse figures; L2 and multiprocessors as the driver tells them",
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        "sm_89",
        128,
        2.52e9,
        (99 * _KIB, 72 * _MIB, None),
        (24, 1008),
        {
            "float8_e4m3fn": 330.3,
            "float16": 165.2,
            "bfloat16": 165.2,
            "float32": 82.6,
            "float64": 1.3,
        },
        "NVIDIA Ada architecture whitepaper (2022), table 2; products with float32 sums",
    ),
    "mi300x": _gpu(
        "AMD Instinct MI300X",
        "gfx942",
        304,
        2.1e9,
        (64 * _KIB, 32 * _MIB, 256 * _MIB),
        (192, 5300),
        {
            "float8_e4m3fn": 2614.9,
            "float16": 1307.4,
            "bfloat16": 1307.4,
            "float32": 163.4,
            "float64": 163.4,
        },
        "AMD Instinct MI300X datasheet (2023) and ROCm's page on the MI300 series; LLVM's "
        "scheduling model of gfx9 (D81011): powers at a quarter of the vector rate",
    ),
    "t4": _gpu(
        "NVIDIA T4",
        "sm_75",
        40,
        1.59e9,
        (64 * _KIB, 4 * _MIB, None),
        (16, 320),
        {"float16": 65.0, "float32": 8.1, "float64": 0.25},
        "NVIDIA T4 product page (2018): 320 GB/s, 256 bits at 10 Gb/s (its datasheet says 300); "
        "Turing architecture whitepaper",
    ),
    "apple-m2": _cpu(
        "Apple M2, its four fast cores",
        4,
        (128 * _KIB, 16 * _MIB, 8 * _MIB),
        100,
        (2 * 4 * 4 * 3.49e9, 2 * 4 * 4 * 3.49e9),
        "Apple, M2 announcement (2022): 100 GB/s; four 128-bit multiply-adds a clock at 3.49 GHz, "
        "bfloat16 by way of float32",
    ),
    "graviton3": _cpu(
        "AWS Graviton3",
        64,
        (64 * _KIB, 1 * _MIB, 32 * _MIB),
        307.2,
        (2 * 2 * 8 * 2.6e9, 2 * 2 * 32 * 2.6e9),
        "WikiChip, AWS Graviton3: DDR5-4800 x 8, 2.6 GHz; Arm Neoverse V1 optimisation guide: two "
        "256-bit pipes",
    ),
}


def named(name: str | None = None) -> Chip:
    """Return a chip by its name in ``CHIPS``, or "this" or None for the processor that runs this.

    Raises:
        InvalidArgument: there is no such row.
    """
    if name is None or name == "this":
        return measured(detect())
    key = name.lower().replace("_", "-").replace(" ", "")
    if key not in CHIPS:
        known = ", ".join(["this", *CHIPS])
        raise InvalidArgument("chip", repr(name), f"one of {known}")
    return CHIPS[key]


def ceilings_file() -> Path:
    """Return where measured ceilings are kept: in the folder of what can be made again."""
    return cache_folder().absolute() / "ceilings.json"


def measured(chip: Chip, path: Path | None = None) -> Chip:
    """Return a chip with the ceilings that were measured on it (``tilewise.doctor``).

    A chip without measurements comes back as it is.

    Args:
        chip: of this machine.
        path: the file; None for ``ceilings_file``.
    """
    try:
        kept = json.loads((path or ceilings_file()).read_text())[f"{chip.name} x {chip.cores}"]
        peaks = tuple((str(dtype), float(rate)) for dtype, rate in kept["peak_flops_s"].items())
        return replace(
            chip,
            bandwidth_bytes_s=float(kept["bandwidth_bytes_s"]),
            peak_flops_s=peaks,
            exponentials_s=float(kept["exponentials_s"]),
            source=f"measured here on {kept['date']}",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return chip


def cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the first processor's block of /proc/cpuinfo; empty where the file is missing."""
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
    """Return bytes of the data or unified cache of each level that one core sees."""
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
    """Return the text of a small system file; empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def row_of(name: str, memory_bytes: int) -> Chip | None:
    """Return the row of a GPU by the name that its driver gives it, e.g. "NVIDIA A100-SXM4-80GB".

    Args:
        name: of the device.
        memory_bytes: of the device, which tells variants of a chip apart.
    """
    squeezed = name.lower().replace(" ", "").replace("-", "")
    rows = [
        chip
        for key, chip in CHIPS.items()
        if chip.kind == "gpu" and key.partition("-")[0] in squeezed
    ]
    return min(rows, key=lambda chip: abs((chip.memory_bytes or 0) - memory_bytes), default=None)
