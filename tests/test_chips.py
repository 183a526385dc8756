"""chips.detect() on made-up systems and on this one, and the table of public figures."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tilewise.chips import CHIPS, KNOWN, Chip, detect
from tilewise.kernels.gpu.config import FAMILIES

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


# Dense products of a multiprocessor in a clock, with float32 sums: two operations a multiply-add.
# Of a family, or of a chip that has other units than its family (a row under the chip's own name).
# "powers" are those of a clock, where they are not 16: the row's ``powers_a_clock``.
PER_CLOCK: dict[str, dict[str, float]] = {
    "sm_75": {"float16": 1024, "float32": 128},
    "sm_80": {"float16": 2048, "bfloat16": 2048, "float32": 128, "float64": 128},
    "sm_89": {"float16": 512, "bfloat16": 512, "float32": 256, "float8_e4m3fn": 1024},
    "sm_90": {"float16": 4096, "bfloat16": 4096, "float8_e4m3fn": 8192},
    "sm_100": {"float16": 8192, "bfloat16": 8192, "float8_e4m3fn": 16384},
    "gfx942": {"float16": 2048, "bfloat16": 2048, "float32": 256, "float8_e4m3fn": 4096},
}


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.kind == "gpu"])
def test_the_peaks_of_a_gpu_are_those_of_its_multiprocessors(name: str) -> None:
    """Cores x clock x what the architecture does in one: a slip in any of the figures shows."""
    chip = CHIPS[name]
    assert chip.exponentials_s is not None
    assert chip.family in PER_CLOCK, f"add {chip.family} to PER_CLOCK, from the maker's paper"
    units = dict(PER_CLOCK.get(name, PER_CLOCK[chip.family]))
    clocks = chip.exponentials_s / units.pop("powers", 16)  # of all multiprocessors, a second
    for dtype, operations in units.items():
        hint = f"{dtype}: a figure is wrong, or {name} needs a row of its own in PER_CLOCK"
        assert chip.peak(dtype) == pytest.approx(clocks * operations, rel=0.01), hint


@pytest.mark.parametrize("name", CHIPS)
def test_the_docs_name_every_chip(name: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "io-model.md").read_text()
    section = page.partition("\n## Time\n")[2].partition("\n## ")[0]
    spelled = re.sub(r"(?<=[a-z])(?=[0-9])", " ?", name.partition("-")[0])  # rtx4090: RTX 4090
    found = re.search(rf"\b{spelled}\b", section, re.IGNORECASE)
    assert found, f'name {name} in docs/io-model.md, under "Time"'


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.kind == "gpu"])
def test_the_gpu_backend_has_blocks_for_its_family(name: str) -> None:
    hint = "name the family whose code the chip runs, or add a new one to kernels/gpu/config.py"
    assert CHIPS[name].family in FAMILIES, hint


def test_every_row_is_whole() -> None:
    for name, chip in CHIPS.items():
        figures = (chip.bandwidth_bytes_s, chip.exponentials_s, chip.l1_bytes, chip.l2_bytes)
        assert all(figures), name
        assert chip.last_cache_bytes, name
        assert chip.peak("float16"), name
        assert len(chip.source) > 20, f"{name}: name the document that has the figures"
        assert (chip.kind == "gpu") == bool(chip.memory_bytes and chip.family), name
