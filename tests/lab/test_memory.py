"""What a process holds grows with what it touches; the peak stays until it is reset."""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE, mmap
from pathlib import Path

import pytest

from tests.conftest import ran
from tilelab.common import memory

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells and forgets the peak"
)


def test_resident_memory_and_its_peak() -> None:
    memory.release()
    memory.reset_peak()
    before = memory.resident_bytes()
    assert memory.peak_bytes() == pytest.approx(before, abs=4 * MIB)
    # Straight from the system, and one byte to a page: what the C library is given, be it the
    # bytes to write, it may keep, and hand out again.
    with mmap(-1, 64 * MIB) as held:
        held[::PAGESIZE] = b"x" * (len(held) // PAGESIZE)
        assert memory.resident_bytes() > before + 60 * MIB
    assert memory.resident_bytes() < before + 20 * MIB
    assert memory.peak_bytes() > before + 60 * MIB
    memory.reset_peak()
    assert memory.peak_bytes() < before + 20 * MIB


def test_release_gives_back_what_was_freed() -> None:
    memory.release()
    before = memory.resident_bytes()
    # Small: the C library keeps such. Not of zeros: pages that are never written do not count.
    pieces = [b"x" * 100_000 for _ in range(600)]
    last = b"x" * 100_000
    assert memory.resident_bytes() > before + 40 * MIB
    del pieces
    memory.release()
    assert memory.resident_bytes() < before + 10 * MIB
    del last


KEEPING = """
import torch
from tests.conftest import ran
from tilelab.common import memory
memory.keep({largest})
memory.release()
before = memory.resident_bytes()
del_me = torch.ones(16 << 20)  # 64 MiB, which the C library would take from the system
del del_me
kept = memory.resident_bytes() - before
memory.release()
print(kept >> 20, (memory.resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
@pytest.mark.parametrize(("largest", "keep"), [(32 * MIB, False), (47 * MIB, True)])
def test_kept_memory_is_given_back_by_release(largest: int, keep: bool) -> None:
    code = KEEPING.format(largest=largest)
    kept, after = map(int, ran(sys.executable, "-c", code).stdout.split())
    assert (kept > 50) == keep, kept
    assert after < 10, after


def test_available_memory_is_what_the_machine_has_at_most() -> None:
    available = memory.available_bytes()
    assert available is None or 0 < available < 1 << 50


def test_a_containers_file_pages_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    before = memory.available_bytes()
    assert before is not None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 500000\nactive_file 30000\n")
    assert memory.available_bytes() == 630_000
    assert memory.total_bytes() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() == pytest.approx(before, rel=0.5)
