"""``tilewise doctor``: what runs here, and why the rest does not.

It changes nothing and measures nothing that takes time, unless asked for the peaks: ``--peak``
measures the ceilings of this processor, and keeps them for predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.chips import Chip, ceilings_file, detect
from tilewise.engine import dispatch
from tilewise.folders import write_whole
from tilewise.inspect import peaks
from tilewise.kernels.cpu import absence, core

_WIDENED = "widened to float32 first, which saves memory and not time"
# What is fast on a processor and what is not, by the instruction set that runs.
FAST = {
    "avx512_amx": "Fast here: bfloat16, in AMX tiles, float16 without gradients, and float32. "
    f"For gradients float16 is {_WIDENED}.",
    "avx512_bf16": f"Fast here: bfloat16, in pairs, and float32. float16 is {_WIDENED}.",
    "avx512": f"Fast here: float32. bfloat16 and float16 are {_WIDENED}.",
    "avx2": f"Fast here: float32. bfloat16 and float16 are {_WIDENED}.",
    "neon_bf16": f"Fast here: bfloat16, in blocks of 2 x 2, and float32. float16 is {_WIDENED}.",
    "portable": "Portable code runs here. It is fast on ARM, in float32, and slow elsewhere.",
}
_REFUSED = (
    "; the processor has AMX tiles, but the system does not let this process use them: Linux 5.16 "
    "or newer does, unless a thread has a small alternative signal stack (sigaltstack)"
)
_NO_CORE = (
    "Nothing is fast here: without the compiled core only `tiled` runs, in plain torch. It saves "
    "memory, not time."
)
# The file names of the OpenMP runtimes there are: GNU's, LLVM's and Intel's.
_OPENMP_NAMES = ("libgomp", "libomp", "libiomp")
_STREAM = 2**26  # float32 numbers that are streamed: beyond what caches hold
_POWERS = 2**17  # float32 numbers of which powers are taken: within what caches hold
_REPEATS = 5


class Check(NamedTuple):
    """One line of the report."""

    what: str  # what was looked at, e.g. ``"instruction set"``
    found: str  # what was found, in words
    ok: bool = True  # False for what needs mending: the exit status is then 1


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the OpenMP runtimes that are mapped into this process, by path; one is right.

    Two runtimes in one process keep two teams of threads that fight for the same cores. ``maps`` is
    the kernel's list of what is mapped; where it is missing the answer is empty.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    # address, permissions, offset, device, inode, and then the path, which may hold spaces
    paths = {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}
    return sorted(path for path in paths if Path(path).name.startswith(_OPENMP_NAMES))


def examine() -> list[Check]:
    """Everything the doctor looks at, in the order of the report."""
    chip = detect()
    checks = [*_core_checks(), _chip_check(chip), _cache_check(chip)]
    checks.append(Check("threads", f"{torch.get_num_threads()} (torch.set_num_threads changes it)"))
    checks += [_backend_check(name) for name in dispatch.BACKEND_NAMES]
    checks += [_openmp_check(openmp_runtimes()), _versions()]
    return checks


def report(checks: Sequence[Check]) -> str:
    """Return the checks as aligned lines; what needs mending is marked with an exclamation mark."""
    width = max(len(check.what) for check in checks)
    return "\n".join(
        f"{' ' if check.ok else '!'} {check.what:<{width}}  {check.found}" for check in checks
    )


def what_is_fast() -> str:
    """Return a sentence or two on what is fast on this machine and what is not."""
    said = _NO_CORE if absence() else FAST[core().isa_active()]
    if dispatch.load("gpu").absence() is None:
        said += " On the GPU the Triton kernels run."
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 if something needs mending, else 0."""
    parser = argparse.ArgumentParser(
        prog="tilewise doctor", description="What runs here, and why the rest does not."
    )
    parser.add_argument(
        "--peak",
        action="store_true",
        help="also measure the ceilings (a few seconds), and keep them for tilewise explain",
    )
    options = parser.parse_args(argv)
    checks = examine()
    if options.peak:
        checks += _peak_checks()
    print(report(checks))
    print(f"\n`tilewise bench me` measures this machine in a minute.\n{what_is_fast()}")
    return 0 if all(check.ok for check in checks) else 1


def _core_checks() -> list[Check]:
    missing = absence()
    if missing:
        return [Check("compiled core", missing, ok=False)]
    forced = os.environ.get("TILEWISE_ISA")
    how = f", forced by TILEWISE_ISA={forced}" if forced else ""
    compiled = core()
    refused = _REFUSED if compiled.tiles_refused() else ""
    return [
        Check("compiled core", str(compiled.__file__)),
        Check(
            "instruction set",
            f"{compiled.isa_active()} runs{how}; "
            f"this machine has {', '.join(compiled.isa_available())}{refused}",
        ),
    ]


def _chip_check(chip: Chip) -> Check:
    bandwidth = chip.bandwidth_bytes_s
    known = f", about {bandwidth / 1e9:.0f} GB/s" if bandwidth else ""
    return Check("chip", f"{chip.name}, {chip.cores} core{'s'[: chip.cores > 1]}{known}")


def _cache_check(chip: Chip) -> Check:
    caches = (("L1", chip.l1_bytes), ("L2", chip.l2_bytes), ("L3", chip.l3_bytes))
    found = [f"{name} {size // 1024} KiB" for name, size in caches if size]
    return Check("caches", ", ".join(found) or "unknown")


def _backend_check(name: str) -> Check:
    absence = dispatch.load(name).absence()
    no_gpu = name == "gpu" and not torch.cuda.is_available()
    return Check(f"backend {name}", absence or "ready", absence is None or no_gpu)


def _openmp_check(runtimes: Sequence[str]) -> Check:
    if len(runtimes) == 1:
        return Check("OpenMP runtime", f"one: {runtimes[0]}")
    if not runtimes:
        # Not an error by itself: torch may be built without OpenMP, and then one thread works.
        return Check("OpenMP runtime", "none is mapped: the kernels run on one thread")
    return Check(
        "OpenMP runtime", f"{len(runtimes)} mapped, one is right: {', '.join(runtimes)}", False
    )


def _versions() -> Check:
    packages = ("tilewise", "torch", "numpy")
    found = [f"{name} {_version(name)}" for name in packages]
    machine = f"{platform.system()} {platform.machine()}"
    return Check("versions", f"{', '.join(found)}, Python {sys.version.split()[0]}, {machine}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _peak_checks() -> list[Check]:
    """Return the ceilings, measured; kept unless a lower instruction set is forced."""
    if absence():
        return []

    threads = torch.get_num_threads()
    kinds = (("fma", "float32 multiply-add"), ("bf16", "bfloat16 dot product"))
    measured = [(what, core().peak(kind, threads)) for kind, what in kinds]
    found = [
        Check(
            "peak", f"{what}: {flops_s / 1e9:.0f} GFLOP/s on {threads} thread{'s' * (threads > 1)}"
        )
        for what, flops_s in measured
        if flops_s
    ]
    chip = measure(detect())
    bandwidth, powers = chip.bandwidth_bytes_s or 0.0, chip.exponentials_s or 0.0
    found.append(Check("peak", f"memory reads: {bandwidth / 1e9:.1f} GB/s"))
    found.append(Check("peak", f"exponentials: {powers / 1e9:.2f} G/s"))
    if os.environ.get("TILEWISE_ISA"):
        return [*found, Check("ceilings", "not kept, because TILEWISE_ISA forces them down")]
    try:
        return [*found, Check("ceilings", f"kept in {keep(chip)}")]
    except OSError as error:
        return [*found, Check("ceilings", f"not kept: {error}")]


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
    write_whole(path, json.dumps(kept, indent=1))
    return path
