"""chips.detect() on made-up systems and on this one."""

from __future__ import annotations

import os
from pathlib import Path

from tilewise.chips import KNOWN, Chip, detect

X86 = """\
processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model name\t: Some Processor 9000

processor\t: 1
model name\t: Another
"""
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


def system(folder: Path, cpuinfo: str, caches: list[tuple[int, str, str]]) -> tuple[Path, Path]:
    (folder / "cpuinfo").write_text(cpuinfo)
    for index, (level, kind, size) in enumerate(caches):
        cache = folder / f"devices/system/cpu/cpu0/cache/index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (cache / name).write_text(text + "\n")
    return folder, folder


def test_reads_name_and_caches(tmp_path: Path) -> None:
    known = KNOWN[0]
    cpuinfo = X86.format(vendor=known.vendor, family=known.family)
    caches = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1024K")]
    chip = detect(*system(tmp_path, cpuinfo, [*caches, (3, "Unified", "32M")]))
    assert chip.name == "Some Processor 9000"
    assert (chip.l1_bytes, chip.l2_bytes, chip.l3_bytes) == (48 * 2**10, 2**20, 2**25)
    assert chip.bandwidth_bytes_s == known.bandwidth_bytes_s


def test_unknown_kind_has_no_bandwidth(tmp_path: Path) -> None:
    chip = detect(*system(tmp_path, X86.format(vendor="Nobody", family=1), []))
    assert chip.bandwidth_bytes_s is None
    assert chip.l1_bytes is None


def test_arm_gives_numbers_for_a_name(tmp_path: Path) -> None:
    chip = detect(*system(tmp_path, ARM, [(1, "Data", "rubbish")]))
    assert chip.name == "ARM implementer 0x41 part 0xd0c"
    assert chip.l1_bytes is None


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    chip = detect(tmp_path / "no proc", tmp_path / "no sys")
    assert chip.name
    assert chip.cores >= 1
    assert chip.l3_bytes is None


def test_this_machine() -> None:
    chip = detect()
    assert chip.kind == "cpu"
    assert 1 <= chip.cores <= (os.cpu_count() or 1)
    assert chip == detect()
    assert hash(chip) == hash(detect())


def test_peak_is_none_when_only_measured() -> None:
    chip = Chip("made up", "gpu", 1, peak_flops_s=(("float32", 1e12),))
    assert chip.peak("float32") == 1e12
    assert chip.peak("bfloat16") is None
