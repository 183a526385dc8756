"""Peak resident memory, measured in processes of their own, on Linux."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, ran

only_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)


class Peak:
    """What the process takes beyond what it had, from here on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_mib("VmRSS")

    def mib(self) -> float:
        """The most so far."""
        return _status_mib("VmHWM") - self._before


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def printed(code: str, *words: object) -> list[list[str]]:
    """The words of each line that a program prints, run with these arguments."""
    # What one call frees must go back to the system, or the next one would seem to take nothing.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = ran(sys.executable, "-c", code, *words, timeout=None, cwd=ROOT, env=environment)
    return [line.split() for line in done.stdout.splitlines()]
